"""MemoryViT: the promises that hold with any tasks attached, and the sentences of its errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.errors import refuses
from tests.support.strategies import (
    FAMILY,
    FAMILY_OPTIONS,
    MIXED,
    SHARING,
    SIDE_FAMILY,
    Node,
    ancestors,
    backbone_options,
    every_family,
    graphs,
    model_of,
    name_of,
    scatter,
    some_pixels,
    tiny_backbone,
)
from tests.support.training import sgd, steps
from torch import Tensor, nn

from engram import EngramError, MemoryViT, random_backbone
from engram.train.loop.trainable import train_only
from engram.util.tensors import tensors_hash
from engram.vit.vit import HeadConfig

CLOSE = {"rtol": 1e-6, "atol": 1e-5}


# Promise 1: base


@settings(max_examples=25)
@given(options=backbone_options(), nodes=graphs(families=SHARING))
@example(options={}, nodes=FAMILY)
@example(options={}, nodes=MIXED)
@example(options={"class_token": False, "prefix_positions": 0}, nodes=FAMILY)
@example(options={"registers": 1, "head": HeadConfig(3, "distilled")}, nodes=FAMILY)
@example(options={"head": HeadConfig(3, hidden=True, raw=True)}, nodes=FAMILY)
@example(options={"class_token": False, "head": HeadConfig(3, "attention")}, nodes=FAMILY)
@every_family(nodes=MIXED)
def test_base_is_the_plain_backbone_with_any_tasks_attached(
    options: dict[str, Any], nodes: list[Node]
) -> None:
    model, pixels = model_of(nodes, **options), some_pixels(dtype=torch.float32)
    with torch.no_grad():
        plain = model.backbone(pixels)
        torch.testing.assert_close(model(pixels)["base"], plain, **CLOSE)
        torch.testing.assert_close(model(pixels, tasks=["base", "task0"])["base"], plain, **CLOSE)
        assert torch.equal(model(pixels, exact=True)["base"], plain)
        assert torch.equal(model(pixels, tasks=["base"], exact=True)["base"], plain)
    assert torch.equal(model(pixels, exact=True)["base"], plain)
    torch.testing.assert_close(model(pixels)["base"], plain, **CLOSE)


def test_base_is_the_plain_backbone_beside_a_task_that_changes_the_backbone(pixels: Tensor) -> None:
    model = MemoryViT(tiny_backbone(torch.float32))
    model.add_task("alone", 3, regime="memory+adapter")
    scatter(model.task("alone"))
    assert torch.equal(model(pixels)["base"], model.backbone(pixels))


# Promise 2: unrelated tasks


@settings(max_examples=25)
@given(
    family=st.sampled_from(["plain", *FAMILY_OPTIONS]),
    nodes=graphs(least=2, most=6, families=SHARING),
    data=st.data(),
)
def test_a_task_does_not_depend_on_unrelated_tasks_or_the_order_of_attachment(
    family: str, nodes: list[Node], data: st.DataObject
) -> None:
    """Bit for bit with `exact`; else to rounding, which some random backbones enlarge in fp32."""
    options = FAMILY_OPTIONS.get(family, {})
    chosen = data.draw(st.permutations(range(len(nodes))))[: data.draw(st.integers(1, 3))]
    order: list[int] = []
    for position in chosen:  # with all that it needs, in an order of its own
        order += [i for i in lineage(nodes, position, data) if i not in order]
    for dtype, exact in ((torch.float64, False), (torch.float32, True)):
        everybody = model_of(nodes, dtype=dtype, **options)
        few, pixels = model_of(nodes, order, dtype, **options), some_pixels(dtype=dtype)
        with torch.no_grad():
            many_logits, few_logits = everybody(pixels, exact=exact), few(pixels, exact=exact)
            for name in few.tasks:
                alone = few(pixels, tasks=[name], exact=exact)
                for logits in (few_logits, alone):
                    if exact:
                        assert torch.equal(logits[name], many_logits[name])
                    else:
                        torch.testing.assert_close(
                            logits[name], many_logits[name], rtol=1e-9, atol=1e-9
                        )


def test_side_patches_that_a_child_reads_do_not_depend_on_it() -> None:
    """In one product with its child's, rows of rank 3 would be rounded differently."""
    nodes = [Node(family="side", rank=3), Node((0,), family="side", rank=3)]
    model, pixels = model_of(nodes), some_pixels(dtype=torch.float32)
    with torch.no_grad():
        for names in (["task0", "task1"], ["task1", "task0"]):
            beside = model(pixels, tasks=names, exact=True)["task0"]
            assert torch.equal(beside, model(pixels, tasks=["task0"], exact=True)["task0"])


def lineage(nodes: list[Node], position: int, data: st.DataObject) -> list[int]:
    """A task behind all it extends, siblings shuffled."""
    found: list[int] = []
    for parent in data.draw(st.permutations(nodes[position].extends)):
        found += [i for i in lineage(nodes, parent, data) if i not in found]
    return [*found, position]


@pytest.mark.parametrize("exact", [False, True])
@settings(max_examples=25)
@given(nodes=graphs(least=2, families=SHARING), data=st.data())
@example(nodes=[Node(cells=2), Node(cells=1)], data=None)
@example(nodes=[Node(cells=2), Node(cells=0), Node((1,), cells=1)], data=None)
@example(nodes=MIXED, data=None)
def test_a_task_that_diverged_spoils_only_those_that_read_it(
    exact: bool, nodes: list[Node], data: st.DataObject | None
) -> None:
    model, pixels = model_of(nodes), some_pixels(1, dtype=torch.float32)
    bad = name_of(data.draw(st.integers(0, len(nodes) - 1)) if data else 0)
    spoiled = {bad} | {name for name in model.tasks if bad in ancestors(model, name)}
    with torch.no_grad():
        for parameter in model.task(bad).parameters():
            parameter.fill_(torch.nan)
    logits = model(pixels, exact=exact)
    assert {n for n in logits if not logits[n].isfinite().all()} == spoiled

    # Trained together, as in a sweep: the gradients of tasks that nobody spoiled reads.
    read = set[str]().union(*(ancestors(model, name) for name in spoiled))
    unrelated = set(model.tasks) - spoiled - read
    if unrelated:
        torch.stack([logits[name].square().sum() for name in unrelated]).sum().backward()
    for name in unrelated:
        for parameter in model.task(name).parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all()


@pytest.mark.parametrize("nodes", [FAMILY, SIDE_FAMILY, MIXED], ids=["masked", "side", "mixed"])
def test_a_task_answers_the_same_under_another_name(nodes: list[Node], pixels: Tensor) -> None:
    model = model_of([node for node in nodes if not node.extends])
    other = MemoryViT(model.backbone).eval()
    for name in reversed(list(model.tasks)):
        other.attach(model.engram(name).renamed(f"a-{name}"))
    with torch.no_grad():
        before, after = model(pixels, exact=True), other(pixels, exact=True)
    assert all(torch.equal(after[f"a-{name}"], before[name]) for name in model.tasks)


# Promise 3: training a task beside the backbone


@pytest.mark.parametrize("position", range(len(FAMILY)))
def test_training_a_task_changes_no_tensor_of_backbone_or_other_tasks(
    either_family: MemoryViT, pixels: Tensor, position: int
) -> None:
    trained = name_of(position)
    before = {name: tensors_hash(task.tensors()) for name, task in either_family.tasks.items()}
    backbone = copy.deepcopy(either_family.backbone.state_dict())
    base = either_family.backbone(pixels)
    steps(either_family, trained, pixels, sgd)
    after = {name: tensors_hash(task.tensors()) for name, task in either_family.tasks.items()}
    assert [name for name in before if before[name] != after[name]] == [trained]
    for name, tensor in either_family.backbone.state_dict().items():
        assert torch.equal(tensor, backbone[name]), name
    assert torch.equal(either_family(pixels, exact=True)["base"], base)
    assert all(parameter.grad is None for parameter in either_family.backbone.parameters())


def saved_bytes(run: Callable[[], Tensor], ignore: nn.Module) -> tuple[int, list[Tensor]]:
    """What a forward pass keeps for the backward pass, parameters left out."""
    parameters = {parameter.data_ptr() for parameter in ignore.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    assert out.requires_grad
    return sum(t.untyped_storage().nbytes() for t in kept.values()), list(kept.values())


def test_training_a_masked_task_keeps_no_activation_of_the_backbone() -> None:
    backbone = random_backbone(image_size=64, patch=8, width=64, depth=4)
    model, pixels = MemoryViT(backbone), some_pixels(4, 64, torch.float32)
    scatter(model.add_task("masked", 3))
    train_only(model, "masked")
    tokens, width, hidden = 65, backbone.config.width, backbone.config.mlp_width

    grown: list[bool] = []
    for block in backbone.layers:
        block.register_forward_hook(
            lambda block, args, out: grown.append(out.requires_grad and out.shape[1] >= tokens)
        )
    lean, kept = saved_bytes(lambda: model(pixels)["masked"].sum(), model)
    assert not any(grown)

    # Of the backbone's tokens, only keys and values, which the task reads, are kept: one storage of
    # queries, keys and values a layer.
    of_backbone = [t for t in kept if tokens in t.shape and t.numel() >= tokens * width]
    one = 4 * tokens * 3 * width * 4
    assert sum(t.untyped_storage().nbytes() for t in of_backbone) <= one * backbone.config.depth
    assert not [t for t in kept if t.shape[-1] == hidden and tokens in t.shape]

    other = MemoryViT(backbone)
    scatter(other.add_task("memory", 3, regime="memory"))
    train_only(other, "memory")
    heavy, _ = saved_bytes(lambda: other(pixels)["memory"].sum(), other)
    assert lean < heavy / 4


def test_a_backbone_that_runs_for_a_masked_task_needs_no_gradient(pixels: Tensor) -> None:
    model = model_of(FAMILY[:1])
    logits = model(pixels)
    assert logits["task0"].requires_grad
    assert not logits["base"].requires_grad


# What is asked for


def test_answers_come_in_the_order_they_were_asked_for(
    either_family: MemoryViT, pixels: Tensor
) -> None:
    assert list(either_family(pixels)) == ["base", *(name_of(i) for i in range(len(FAMILY)))]
    assert list(either_family(pixels, tasks=["task3", "base"])) == ["task3", "base"]
    assert list(either_family(pixels, tasks=["task2", "task2"])) == ["task2"]
    assert either_family(pixels, tasks=[]) == {}


def test_a_backbone_without_a_head_gives_tasks_and_no_base(pixels: Tensor) -> None:
    model = model_of(FAMILY, head=None)
    assert list(model(pixels)) == list(model.tasks)
    with pytest.raises(EngramError, match="no head"):
        model(pixels, tasks=["base"])


# Errors are sentences


def test_tasks_as_a_text_are_refused(either_family: MemoryViT, pixels: Tensor) -> None:
    with refuses("tasks is the text 'flowers'"):
        either_family(pixels, tasks="flowers")


def test_an_unknown_task_is_refused_with_those_there_are(pixels: Tensor) -> None:
    model = model_of([Node(), Node()])
    with refuses("no task 'flowers'"):
        model(pixels, tasks=["flowers"])
    with refuses("There is no task 'flowers'"):
        model.detach("flowers")
    with refuses("attached: none."):
        MemoryViT(model.backbone).task("flowers")


@pytest.mark.parametrize(
    ("pixels", "problem"),
    [
        (torch.zeros(3, 8, 8), "got pixels of shape (3, 8, 8)"),
        (torch.zeros(2, 1, 8, 8), "got pixels of shape (2, 1, 8, 8)"),
        (torch.zeros(2, 8, 8, 3), "got pixels of shape (2, 8, 8, 3)"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "type torch.uint8"),
        (torch.zeros(2, 3, 8, 8).double(), "got pixels in torch.float64"),
        (torch.zeros(2, 3, 9, 8), "got images of 9 x 8 pixels"),
        (torch.zeros(2, 3, 0, 8), "got images of 0 x 8 pixels"),
        (np.zeros((2, 3, 8, 8), np.float32), "got pixels as ndarray"),
        ("cat.jpg", "engram.predict(model, image)"),
    ],
)
def test_wrong_pixels_are_refused(either_family: MemoryViT, pixels: Tensor, problem: str) -> None:
    for tasks in (None, ["task0"], ["base"]):
        with refuses(problem):
            either_family(pixels, tasks=tasks)
