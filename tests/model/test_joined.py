"""What is kept from pass to pass is made once, and again when anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from tests.support.strategies import (
    MIXED,
    Node,
    model_of,
    scatter,
)
from tests.support.training import sgd, steps
from torch import Tensor, nn

from engram import MemoryViT, ViT
from engram.methods.method import Joined, TaskInput
from engram.methods.side import Side
from engram.vit.vit import Block


@pytest.fixture
def made_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every time that a layer makes keys and values of cells."""
    calls: list[int] = []
    real = Block.keys_values

    def counted(block: Block, normed: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(normed.shape[1])
        return real(block, normed)

    monkeypatch.setattr(Block, "keys_values", counted)
    return calls


@pytest.mark.parametrize("exact", [False, True])
def test_keys_and_values_of_cells_are_made_once_while_nothing_changes(
    pixels: Tensor, made_calls: list[int], exact: bool
) -> None:
    model = model_of([Node() for _ in range(20)])
    with torch.no_grad():
        first = model(pixels, exact=exact)
        once = len(made_calls)
        assert once == len(model.backbone.layers) * (20 if exact else 1)
        again = model(pixels, exact=exact)
    assert len(made_calls) == once
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("exact", [False, True])
def test_maps_of_side_patches_are_stacked_once_while_nothing_changes(
    pixels: Tensor, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    model, made = model_of(MIXED), []

    join = Side.join

    def counted(tasks: Sequence[TaskInput], backbone: ViT) -> Joined:
        made.append(tasks)
        return join(tasks, backbone)

    monkeypatch.setattr(Side, "join", counted)
    with torch.no_grad():
        first, again = model(pixels, exact=exact), model(pixels, exact=exact)
    assert len(made) == (5 if exact else 1)
    assert all(torch.equal(first[name], again[name]) for name in first)


def optimisers() -> dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]:
    def unseen(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        class WritesData(torch.optim.Optimizer):
            def step(self, closure: object = None) -> None:  # type: ignore[override]
                for parameter in self.param_groups[0]["params"]:
                    parameter.data.add_(parameter.grad, alpha=-0.1)

        return WritesData(parameters, {})

    return {
        "SGD": sgd,
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
        "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
        "one that writes to .data": unseen,
    }


@pytest.mark.parametrize("optimiser", optimisers())
def test_an_optimiser_step_is_seen_by_the_next_pass(
    either_family: MemoryViT, pixels: Tensor, optimiser: str
) -> None:
    with torch.no_grad():
        before = either_family(pixels)
    steps(either_family, "task1", pixels, optimisers()[optimiser], count=1)
    check_fresh(either_family, pixels, before, changed={"task1", "task3"})


def new_values(task: nn.Module) -> dict[str, Tensor]:
    return {name: tensor + torch.randn_like(tensor) for name, tensor in task.state_dict().items()}


def written_in_place(model: MemoryViT) -> None:
    with torch.no_grad():
        model.task("task1").cells.mul_(-3)


def one_element(model: MemoryViT) -> None:
    with torch.no_grad():
        model.task("task1").cells[0, 0, 0] = 3


def replaced(model: MemoryViT) -> None:
    task = model.task("task1")
    task.cells = nn.Parameter(task.cells.detach() * -3)


def data_replaced(model: MemoryViT) -> None:
    task = model.task("task1")
    task.cells.data = task.cells.data * -3


CHANGES = {
    "load_state_dict": lambda m: m.task("task1").load_state_dict(new_values(m.task("task1"))),
    "load_state_dict with assign": lambda m: m.task("task1").load_state_dict(
        new_values(m.task("task1")), assign=True
    ),
    "in place": written_in_place,
    "one element": one_element,
    "another parameter": replaced,
    "another .data": data_replaced,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_parameter_is_seen_by_the_next_pass(
    either_family: MemoryViT, pixels: Tensor, change: str
) -> None:
    with torch.no_grad():
        before = either_family(pixels)
    CHANGES[change](either_family)
    check_fresh(either_family, pixels, before, changed={"task1", "task3"})


def test_a_cast_is_seen_by_the_next_pass(either_family: MemoryViT, pixels: Tensor) -> None:
    with torch.no_grad():
        before = either_family(pixels)
        for dtype in (torch.float64, torch.bfloat16, torch.float32):
            either_family.to(dtype)
            assert {x.dtype for x in either_family(pixels.to(dtype)).values()} == {dtype}
    # what is left of the values after bfloat16
    check_fresh(either_family, pixels, before, changed=set(before))


def test_a_change_of_the_backbone_is_seen_by_the_next_pass(
    either_family: MemoryViT, pixels: Tensor
) -> None:
    with torch.no_grad():
        before = either_family(pixels)
        either_family.backbone.layers[0].norm1.weight[::2].mul_(2)
    check_fresh(either_family, pixels, before, changed=set(before))


def test_another_task_of_the_same_name_is_seen_by_the_next_pass(pixels: Tensor) -> None:
    model = model_of([Node(), Node()])
    with torch.no_grad():
        before = model(pixels)
        model.detach("task1")
        assert list(model(pixels)) == ["base", "task0"]
        scatter(model.add_task("task1", 3, cells=2), by=0.5, seed=9)
    check_fresh(model, pixels, before, changed={"task1"})


@pytest.mark.parametrize("exact", [False, True])
def test_half_precision_of_autocast_does_not_outlive_it(
    either_family: MemoryViT, pixels: Tensor, exact: bool
) -> None:
    with torch.no_grad():
        before = either_family(pixels, exact=exact)
        with torch.autocast("cpu", torch.bfloat16):
            half = either_family(pixels, exact=exact)
            again = rebuilt(either_family)(pixels.bfloat16(), exact=exact)
        after = either_family(pixels, exact=exact)
    for name in before:
        assert torch.equal(before[name], after[name])
        for logits in (half, again):
            torch.testing.assert_close(logits[name].float(), before[name], rtol=0.1, atol=0.3)


def test_every_task_trains_in_half_precision(either_family: MemoryViT, pixels: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        logits = either_family(pixels)
    torch.cat([x.float() for x in logits.values()], dim=1).square().sum().backward()
    for task in either_family.tasks.values():
        for name, parameter in task.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


def rebuilt(model: MemoryViT) -> MemoryViT:
    """The same backbone and tasks in a model that has kept nothing yet."""
    fresh = MemoryViT(model.backbone).eval()
    for name in model.tasks:
        fresh.attach(model.engram(name))
    return fresh


def check_fresh(
    model: MemoryViT, pixels: Tensor, before: dict[str, Tensor], changed: set[str]
) -> None:
    """The next pass gives what a model that has kept nothing gives."""
    with torch.no_grad():
        after, fresh = model(pixels), rebuilt(model)(pixels)
    for name in fresh:
        assert torch.equal(after[name], fresh[name]), name
        assert torch.allclose(before[name], fresh[name], rtol=0, atol=1e-6) == (
            name not in changed
        ), name


def test_keys_kept_in_inference_mode_do_not_disturb_training(
    either_family: MemoryViT, pixels: Tensor
) -> None:
    with torch.inference_mode():
        either_family(pixels)
    steps(either_family, "task1", pixels, sgd, count=1)
    for task in either_family.tasks.values():
        task.requires_grad_(False)
    assert either_family(pixels)["task1"].isfinite().all()


def test_a_copy_of_a_model_is_a_model_of_its_own(either_family: MemoryViT, pixels: Tensor) -> None:
    with torch.no_grad():
        before = either_family(pixels)
        other = copy.deepcopy(either_family)
        written_in_place(other)
        after, others = either_family(pixels), other(pixels)
    assert torch.equal(before["task1"], after["task1"])
    assert not torch.allclose(before["task1"], others["task1"])
