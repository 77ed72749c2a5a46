"""side.py against the slow reference, for random backbones and random mixes of tasks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support import passes
from tests.support.passes import (
    TRAINING,
    assert_same,
    assert_same_gradients,
    loss,
    normed_of_every_layer,
)
from tests.support.strategies import (
    MIXED,
    SHARING,
    Node,
    ancestors,
    attach_graph,
    backbone_options,
    expected,
    graphs,
    model_of,
    name_of,
    scatter,
    some_pixels,
    tiny_backbone,
)
from torch import Tensor

from engram import MemoryViT
from engram.backbones.shape import BackboneShape
from engram.methods.method import Cached, TaskShape
from engram.methods.side import Side

TIGHT = {"rtol": 1e-9, "atol": 1e-9}
SINGLE = {"rtol": 1e-4, "atol": 1e-4}

ONE = [Node(family="side")]
NO_CLASS_TOKEN = {"class_token": False, "prefix_positions": 0}


def from_cache(model: MemoryViT, pixels: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        layers, final = normed_of_every_layer(model.backbone, pixels), model.backbone.tokens(pixels)
    size = (pixels.shape[2], pixels.shape[3])
    cached = Cached(model.backbone.pool(final), layers, final)
    return model.from_cache(cached, list(model.tasks), size).outputs()


PATHS = {**passes.PATHS, "from the cache": from_cache}


def check(options: dict[str, Any], nodes: list[Node]) -> None:
    """The reference takes most of the time, so every case goes all ways."""
    model, pixels = model_of(nodes, dtype=torch.float64, **options), some_pixels()
    wanted = expected(model, pixels)
    for path, run in PATHS.items():
        assert_same(path, run(model, pixels), wanted, **TIGHT)


@pytest.mark.parametrize(
    "options", [{}, {"registers": 2}, NO_CLASS_TOKEN, {**NO_CLASS_TOKEN, "registers": 1}]
)
@pytest.mark.parametrize("nodes", [ONE, MIXED], ids=["one", "mixed"])
def test_every_path_gives_the_outputs_of_the_reference(
    options: dict[str, Any], nodes: list[Node]
) -> None:
    check(options, nodes)


@settings(max_examples=8)
@given(options=backbone_options(), nodes=graphs(families=SHARING))
def test_every_path_gives_the_outputs_of_the_reference_for_any_tasks(
    options: dict[str, Any], nodes: list[Node]
) -> None:
    check(options, nodes)


@settings(max_examples=5)
@given(options=backbone_options(), nodes=graphs(families=SHARING))
@example(options={}, nodes=ONE)
@example(options={}, nodes=MIXED)
@example(options=NO_CLASS_TOKEN, nodes=MIXED)
def test_every_path_gives_the_gradients_of_the_reference(
    options: dict[str, Any], nodes: list[Node]
) -> None:
    model, pixels = model_of(nodes, dtype=torch.float64, **options), some_pixels()
    parameters = [p for task in model.tasks.values() for p in task.parameters()]
    wanted = torch.autograd.grad(
        loss(expected(model, pixels)), parameters, materialize_grads=True
    )  # the reference never reads a layer's cells where there are none
    for path in (*TRAINING, "from the cache"):
        assert_same_gradients(path, model, PATHS[path](model, pixels), wanted, **TIGHT)


@pytest.mark.parametrize("position", range(len(MIXED)))
@pytest.mark.parametrize("exact", [False, True])
def test_one_task_trains_while_all_others_are_frozen(position: int, exact: bool) -> None:
    """The others answer in the same pass, by whichever path is theirs."""
    model, pixels = model_of(MIXED, dtype=torch.float64), some_pixels(1)
    task = model.task(name_of(position))
    model.requires_grad_(False)
    task.requires_grad_(True)
    outputs, wanted = model(pixels, exact=exact), expected(model, pixels)
    for name, logits in outputs.items():
        torch.testing.assert_close(logits, wanted[name], **TIGHT)
    reached = {name for name, logits in outputs.items() if logits.requires_grad}
    children = {name for name in model.tasks if task.spec.name in ancestors(model, name)}
    assert task.spec.name in reached
    if exact:
        assert reached == {task.spec.name} | children
    parameters = list(task.parameters())
    theirs = torch.autograd.grad(loss(wanted), parameters, materialize_grads=True)
    found = torch.autograd.grad(loss(outputs), parameters)
    torch.testing.assert_close(found, theirs, **TIGHT)


def test_single_precision_stays_close() -> None:
    model, pixels = model_of(MIXED), some_pixels(dtype=torch.float32)
    found = {path: run(model, pixels) for path, run in PATHS.items()}
    wanted = expected(model.double(), pixels.double())
    for path, outputs in found.items():
        doubles = {name: logits.double() for name, logits in outputs.items()}
        assert_same(path, doubles, wanted, **SINGLE)


def test_images_of_other_sizes_are_those_of_the_reference() -> None:
    """The reference resizes no positions: its backbone has the other size as its own."""
    pixels = some_pixels(1, 12)
    model, sized = model_of(MIXED, dtype=torch.float64), model_of([], dtype=torch.float64)
    own_size = MemoryViT(sized.backbone.at_size((12, 12)))
    attach_graph(own_size, MIXED)
    wanted = expected(own_size, pixels)
    for path, run in PATHS.items():
        assert_same(path, run(model, pixels), wanted, **TIGHT)


def test_gradients_reach_pixels_as_in_the_reference() -> None:
    model = model_of(MIXED, dtype=torch.float64)
    pixels = some_pixels(1).requires_grad_()
    wanted = torch.autograd.grad(loss(expected(model, pixels)), pixels)
    for task in model.tasks.values():
        task.requires_grad_(False)
    found = torch.autograd.grad(loss(model(pixels)), pixels)
    torch.testing.assert_close(found, wanted, **TIGHT)


# What a task starts from


def test_training_starts_from_a_linear_head_on_the_pooled_token() -> None:
    model, pixels = MemoryViT(tiny_backbone()), some_pixels()
    side, head = model.add_task("side", 3, regime="side"), model.add_task("head", 3, regime="head")
    scatter(head)
    with torch.no_grad():
        assert torch.equal(side.head.weight, torch.zeros(3, 8 + 24 * 16))
        side.head.weight[:, :8] = head.head.weight
        side.head.bias.copy_(head.head.bias)
        logits = model(pixels)
    torch.testing.assert_close(logits["side"], logits["head"], **TIGHT)


def test_maps_keep_the_size_of_what_they_map_and_parents_start_at_zero() -> None:
    torch.manual_seed(0)
    backbone = tiny_backbone(torch.float32, depth=3, width=100)
    shape = TaskShape(BackboneShape.measure(backbone), classes=3, parents=2)
    side = {name: one.draw(backbone) for name, one in Side().parameters(shape).items()}
    for name, inputs in (("project", 100), ("attention", 16), ("up", 16), ("down", 32)):
        assert side[f"side.{name}"].std().item() == pytest.approx(inputs**-0.5, rel=0.1)
    assert side["side.queries"].std().item() == pytest.approx(1, rel=0.3)
    assert torch.equal(side["side.parents"], torch.zeros(2, 4, 16, 16))


def test_a_child_starts_as_if_it_had_no_parents() -> None:
    torch.manual_seed(0)
    model, pixels = MemoryViT(tiny_backbone()), some_pixels()
    scatter(model.add_task("parent", 3, regime="side"))
    child = model.add_task("child", 3, regime="side", extends=["parent"])
    with torch.no_grad():
        child.head.weight.normal_()
        before = model(pixels)["child"]
        scatter(model.task("parent"), seed=5)
        torch.testing.assert_close(model(pixels)["child"], before, **TIGHT)
        child.side.parents.normal_()
        assert (model(pixels)["child"] - before).abs().max() > 1e-3


# How tasks share a pass


@settings(max_examples=20)
@given(nodes=graphs(least=2, families=SHARING), data=st.data())
def test_a_task_is_moved_by_those_it_extends_and_by_no_other(
    nodes: list[Node], data: st.DataObject
) -> None:
    model, pixels = model_of(nodes, dtype=torch.float64), some_pixels(1)
    moved = name_of(data.draw(st.integers(0, len(nodes) - 1)))
    readers = {name for name in model.tasks if moved in ancestors(model, name)}
    with torch.no_grad():
        before = model(pixels, exact=True)
        scatter(model.task(moved), seed=3)
        after = model(pixels, exact=True)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == readers | {moved}


@pytest.mark.parametrize("tasks", [1, 20])
def test_the_number_of_products_does_not_depend_on_the_number_of_tasks(tasks: int) -> None:
    model = model_of([Node(family="side")] * tasks, depth=2)
    pixels, names = some_pixels(1, dtype=torch.float32), list(model.tasks)
    with torch.no_grad():
        model(pixels, names)  # what depends on no image is kept
        with torch.profiler.profile() as profile:
            model(pixels, names)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::scaled_dot_product_attention"] == 2  # the backbone's layers
    assert counts["aten::matmul"] <= 3 * 7 + 2 + 2 * 4 + tasks  # the steps, their reading included


def test_many_tasks_are_computed_in_parts_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of([*MIXED, *[Node(family="side")] * 7], dtype=torch.float64)
    pixels = some_pixels()
    with torch.no_grad():
        wanted = model(pixels)
        monkeypatch.setattr("engram.methods.side._GROUP", 5)
        monkeypatch.setattr("engram.methods.side._CHUNK", 1)
        model.joined.clear()
        found = model(pixels)
    for name, logits in found.items():
        torch.testing.assert_close(logits, wanted[name], **TIGHT)
