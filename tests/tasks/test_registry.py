"""Who may share a backbone, who reads whom, and in which order."""

from __future__ import annotations

import pytest
import torch
from tests.support.errors import refuses
from tests.support.strategies import FAMILY, model_of, some_pixels, tiny_backbone
from torch import Tensor

from engram import EngramError, MemoryViT
from engram.methods import METHODS
from engram.tasks.spec import TaskSpec
from engram.tasks.task import TaskRegistry

ALONE = [name for name, regime in METHODS.items() if not regime.shares_pass]


# Who may share a pass


@pytest.mark.parametrize("regime", ALONE)
@pytest.mark.parametrize("other", ["masked", "head", "memory"])
@pytest.mark.parametrize("first", [True, False])
def test_a_task_that_changes_the_backbone_shares_no_pass(
    regime: str, other: str, first: bool
) -> None:
    model = MemoryViT(tiny_backbone())
    one, two = (regime, other) if first else (other, regime)
    model.add_task("one", 3, regime=one)
    with pytest.raises(
        EngramError,
        match="'two' and 'one' cannot share a pass",
    ):
        model.add_task("two", 3, regime=two)
    assert list(model.tasks) == ["one"]


def test_only_memory_tasks_of_one_update_are_ever_unmasked() -> None:
    model = MemoryViT(tiny_backbone(), unmasked=True)
    model.add_task("one", 3, regime="memory")
    for settings_ in ({"regime": "masked"}, {"regime": "memory", "update": "propagate"}):
        with pytest.raises(EngramError, match="cannot share a pass"):
            model.add_task("two", 3, **settings_)


# Names and parents


@pytest.fixture
def pixels() -> Tensor:
    return some_pixels(dtype=torch.float32)


def test_a_name_is_given_once(family: MemoryViT) -> None:
    with refuses("'task0' is attached already"):
        family.add_task("task0", 3)


def test_a_missing_parent_is_refused(family: MemoryViT) -> None:
    with refuses("'roses' extends 'flowers'"):
        family.add_task("roses", 3, extends=["flowers"])
    assert "roses" not in family.tasks


def test_a_task_without_a_stream_cannot_be_extended(family: MemoryViT) -> None:
    family.add_task("plain", 3, regime="head")
    with refuses("cannot extend 'plain'"):
        family.add_task("roses", 3, extends=["plain"])


@pytest.mark.parametrize("regime", ["head", "readout"])
def test_a_task_without_rows_cannot_be_extended_by_side_patches(regime: str) -> None:
    model = MemoryViT(tiny_backbone())
    model.add_task("plain", 3, regime=regime)
    with refuses("cannot extend 'plain'"):
        model.add_task("roses", 3, regime="side", extends=["plain"])


@pytest.mark.parametrize(
    ("parent", "child"),
    [
        ("masked", "side"),
        ("side", "masked"),
        ("side", "masked+adapter"),
        ("masked", "side+readout"),
    ],
)
def test_streams_and_side_patches_do_not_extend_each_other(parent: str, child: str) -> None:
    model = MemoryViT(tiny_backbone())
    model.add_task("flowers", 3, regime=parent)
    with refuses(f"its regime is '{child}' and that of the other '{parent}'"):
        model.add_task("roses", 3, regime=child, extends=["flowers"])
    assert list(model.tasks) == ["flowers"]


def test_side_patches_extend_those_of_their_rank() -> None:
    model = MemoryViT(tiny_backbone())
    model.add_task("flowers", 3, regime="side", rank=4)
    with refuses("choose rank 4"):
        model.add_task("roses", 3, regime="side", extends=["flowers"])
    for name, regime in (("roses", "side"), ("tulips", "side+readout")):
        model.add_task(name, 3, regime=regime, rank=4, extends=["flowers"])
    assert list(model.tasks) == ["flowers", "roses", "tulips"]


def test_a_parent_stays_while_it_is_extended(family: MemoryViT, pixels: Tensor) -> None:
    with refuses("'task0' is extended by task1, task2"):
        family.detach("task0")
    for name in ("task3", "task2", "task1", "task0"):
        family.detach(name)
    assert list(family(pixels)) == ["base", "task4", "task5"]


# The registry itself


def registry_of(model: MemoryViT) -> TaskRegistry:
    registry = TaskRegistry()
    for task in model.tasks.values():
        registry.put(task)
    return registry


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [4, 0, 2, 1, 3, 5], [5, 4, 0, 1, 2, 3]])
def test_what_is_read_comes_first_in_an_order_that_attaching_leaves_alone(order: list[int]) -> None:
    registry = registry_of(model_of(FAMILY, order))
    assert registry.closure(["task3"]) == ["task0", "task1", "task2", "task3"]
    assert registry.closure(["task2"]) == ["task0", "task2"]
    assert registry.closure(["task4", "task1"]) == ["task0", "task4", "task1"]
    assert registry.closure([]) == []


def test_a_registry_is_checked_before_it_is_changed(family: MemoryViT) -> None:
    registry = registry_of(family)
    for spec, sentence in (
        (TaskSpec("task0", ("a", "b")), "'task0' is attached already"),
        (TaskSpec("roses", ("a", "b"), extends=("flowers",)), "'flowers', which is not attached"),
        (
            TaskSpec("roses", ("a", "b"), method=METHODS["full"]()),
            "'roses' and 'task0' cannot share a pass",
        ),
    ):
        with refuses(sentence):
            registry.check(spec)
    with refuses("'task1' is extended by task3"):
        registry.remove("task1")
    assert list(registry) == list(family.tasks)
    registry.remove("task3")
    registry.remove("task1")
    assert list(registry) == ["task0", "task2", "task4", "task5"]
    assert registry["task2"] is family.task("task2")
