"""Exactly what was named trains; everything else is frozen."""

import pytest
from tests.support.strategies import scatter, tiny_backbone
from torch import nn

from engram import EngramError, MemoryViT
from engram.train.loop.trainable import train_only


@pytest.fixture
def model() -> MemoryViT:
    model = MemoryViT(tiny_backbone())
    scatter(model.add_task("task", 3, cells=2))
    return model


def test_training_another_task_freezes_the_first(model: MemoryViT) -> None:
    model.add_task("other", 3)
    train_only(model, "task")
    train_only(model, "other")
    assert not any(p.requires_grad for p in model.task("task").parameters())
    assert all(p.requires_grad for p in model.task("other").parameters())


def test_tasks_may_train_together(model: MemoryViT) -> None:
    for name in ("other", "frozen"):
        model.add_task(name, 3)
    chosen = {id(parameter) for _, parameter in train_only(model, "task", "other")}
    assert chosen == {id(p) for name in ("task", "other") for p in model.task(name).parameters()}
    assert chosen == {id(p) for p in model.parameters() if p.requires_grad}


def test_a_parameter_that_is_nobodys_is_an_error(model: MemoryViT) -> None:
    model.mine = nn.Linear(2, 2)
    with pytest.raises(EngramError, match=r"mine\.weight"):
        train_only(model, "task")


def test_a_refused_training_leaves_everything_as_it_was(model: MemoryViT) -> None:
    model.add_task("other", 3)
    train_only(model, "other")
    model.mine = nn.Linear(2, 2)
    before = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(EngramError):
        train_only(model, "task")
    assert [parameter.requires_grad for parameter in model.parameters()] == before
