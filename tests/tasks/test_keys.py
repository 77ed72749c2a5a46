"""State dicts name their tasks: no order of attaching can swap two of them."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.errors import refuses
from tests.support.strategies import scatter, some_pixels, tiny_backbone
from torch import Tensor, nn

from engram import MemoryViT
from engram.tasks.task import module_name, task_name

BACKBONE = tiny_backbone(torch.float32)
PIXELS = some_pixels(2, dtype=torch.float32)


def model_with(*names: str, seed: int = 0) -> MemoryViT:
    """Tasks of one shape, with values that depend on the seed and the order."""
    model = MemoryViT(copy.deepcopy(BACKBONE)).eval()
    for i, name in enumerate(names):
        scatter(model.add_task(name, 3, cells=2), by=0.5, seed=10 * seed + i)
    return model


def answers(model: MemoryViT) -> dict[str, Tensor]:
    with torch.no_grad():
        return dict(model(PIXELS))


def check_same(one: MemoryViT, other: MemoryViT) -> None:
    expected = answers(other)
    for name, logits in answers(one).items():
        torch.testing.assert_close(logits, expected[name], rtol=0, atol=1e-6)


@given(name=st.text(min_size=1))
def test_a_name_of_a_module_is_the_name_of_one_task(name: str) -> None:
    module = module_name(name)
    assert task_name(module) == name
    assert "." not in module
    assert not hasattr(MemoryViT, module)


def test_two_models_with_tasks_in_another_order_exchange_their_weights() -> None:
    first, second = model_with("cats", "dogs"), model_with("dogs", "cats", seed=1)
    assert not torch.allclose(answers(first)["cats"], answers(second)["cats"], atol=1e-3)
    second.load_state_dict(first.state_dict())
    check_same(second, first)


def test_names_with_dots_and_names_of_methods_are_keys() -> None:
    names = ("a", "a.head", "pets-v1.2", "train", "type")
    model, other = model_with(*names), model_with(*reversed(names), seed=1)
    assert "task:pets-v1%2E2.cells" in model.state_dict()
    assert "task:train.head.weight" in model.state_dict()
    other.load_state_dict(model.state_dict())
    check_same(other, model)
    assert other.get_submodule("task:train") is other.task("train")


@pytest.mark.parametrize("wrap", [nn.Sequential, nn.DataParallel])
def test_a_model_inside_of_another_module_names_its_tasks(wrap: type[nn.Module]) -> None:
    first, second = model_with("cats", "dogs"), model_with("dogs", "cats", seed=1)
    wrap(second).load_state_dict(wrap(first).state_dict())
    check_same(second, first)


def test_a_missing_or_unknown_task_is_refused_by_name_and_changes_nothing() -> None:
    model = model_with("cats", "dogs")
    before = answers(model)
    with refuses("does not have the task 'dogs'"):
        model.load_state_dict(model_with("cats", "birds", seed=1).state_dict())
    with refuses("has the tasks 'ants', 'birds'"):
        model.load_state_dict(model_with("cats", "dogs", "birds", "ants", seed=1).state_dict())
    assert all(torch.equal(logits, before[name]) for name, logits in answers(model).items())


def test_without_strict_the_tasks_that_both_have_are_loaded() -> None:
    model, other = model_with("cats", "dogs"), model_with("birds", "dogs", seed=1)
    keys = model.load_state_dict(other.state_dict(), strict=False)
    assert {key.split(".")[0] for key in keys.missing_keys} == {"task:cats"}
    assert {key.split(".")[0] for key in keys.unexpected_keys} == {"task:birds"}
    torch.testing.assert_close(answers(model)["dogs"], answers(other)["dogs"])


def test_a_copy_of_a_model_has_tasks_of_its_own() -> None:
    model = model_with("cats", "dogs")
    before = answers(model)
    other = copy.deepcopy(model)
    check_same(other, model)
    scatter(other.task("cats"))
    other.detach("dogs")
    assert list(other.state_dict()) == [k for k in model.state_dict() if "dogs" not in k]
    assert all(torch.equal(logits, before[name]) for name, logits in answers(model).items())
    assert not torch.allclose(answers(other)["cats"], before["cats"])
