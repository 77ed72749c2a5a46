"""MemoryViT: the promises that hold with any tasks attached, and the sentences of its errors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.errors import refuses
from tests.support.strategies import (
    FAMILY,
    MIXED,
    SHARING,
    SIDE_FAMILY,
    Node,
    ancestors,
    graphs,
    model_of,
    name_of,
    scatter,
    some_pixels,
    tiny_trunk,
    trunk_options,
)
from torch import Tensor, nn

from engram import EngramError, MemoryViT, random_trunk
from engram.side import Sides
from engram.train.trainable import train_only
from engram.util.tensors import tensors_hash
from engram.vit import Block, HeadConfig

CLOSE = {"rtol": 1e-6, "atol": 1e-5}


@pytest.fixture(params=["masked", "side"])
def family(request: pytest.FixtureRequest) -> MemoryViT:
    """A parent, two children, a grandchild of both, and two strangers."""
    return model_of(SIDE_FAMILY if request.param == "side" else FAMILY)


@pytest.fixture
def pixels() -> Tensor:
    return some_pixels(3, dtype=torch.float32)


# Promise 1: base


@settings(max_examples=25)
@given(options=trunk_options(), nodes=graphs(families=SHARING))
@example(options={}, nodes=FAMILY)
@example(options={}, nodes=MIXED)
@example(options={"class_token": False, "prefix_positions": 0}, nodes=FAMILY)
@example(options={"registers": 1, "head": HeadConfig(3, "distilled")}, nodes=FAMILY)
@example(options={"head": HeadConfig(3, hidden=True, raw=True)}, nodes=FAMILY)
@example(options={"class_token": False, "head": HeadConfig(3, "attention")}, nodes=FAMILY)
def test_base_is_the_plain_trunk_with_any_tasks_attached(
    options: dict[str, Any], nodes: list[Node]
) -> None:
    model, pixels = model_of(nodes, **options), some_pixels(dtype=torch.float32)
    with torch.no_grad():
        plain = model.trunk(pixels)
        torch.testing.assert_close(model(pixels)["base"], plain, **CLOSE)
        torch.testing.assert_close(model(pixels, tasks=["base", "task0"])["base"], plain, **CLOSE)
        assert torch.equal(model(pixels, exact=True)["base"], plain)
        assert torch.equal(model(pixels, tasks=["base"], exact=True)["base"], plain)
    assert torch.equal(model(pixels, exact=True)["base"], plain)
    torch.testing.assert_close(model(pixels)["base"], plain, **CLOSE)


def test_base_is_the_plain_trunk_beside_a_task_that_changes_the_trunk(pixels: Tensor) -> None:
    model = MemoryViT(tiny_trunk(torch.float32))
    model.add_task("alone", 3, regime="memory+adapter")
    scatter(model.task("alone"))
    assert torch.equal(model(pixels)["base"], model.trunk(pixels))


# Promise 2: unrelated tasks


@settings(max_examples=25)
@given(nodes=graphs(least=2, most=6, families=SHARING), data=st.data())
def test_a_task_does_not_depend_on_unrelated_tasks_or_the_order_of_attachment(
    nodes: list[Node], data: st.DataObject
) -> None:
    everybody, pixels = model_of(nodes), some_pixels(dtype=torch.float32)
    chosen = data.draw(st.permutations(range(len(nodes))))[: data.draw(st.integers(1, 3))]
    order: list[int] = []
    for position in chosen:  # with all that it needs, in an order of its own
        order += [i for i in lineage(nodes, position, data) if i not in order]
    few = model_of(nodes, order)
    with torch.no_grad():
        for exact in (False, True):
            many_logits, few_logits = everybody(pixels, exact=exact), few(pixels, exact=exact)
            for name in few.tasks:
                alone = few(pixels, tasks=[name], exact=exact)
                for logits in (few_logits, alone):
                    if exact:
                        assert torch.equal(logits[name], many_logits[name])
                    else:
                        torch.testing.assert_close(logits[name], many_logits[name], **CLOSE)


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


def test_heads_on_the_plain_trunk_share_a_pass_with_masked_tasks(pixels: Tensor) -> None:
    model = model_of(FAMILY)
    for regime in ("head", "mlp-head"):
        scatter(model.add_task(regime, 3, regime=regime))
    lonely = MemoryViT(model.trunk)
    scatter(lonely.add_task("head", 3, regime="head"))
    with torch.no_grad():
        for exact in (False, True):
            logits = model(pixels, exact=exact)
            wanted = model.task("head").head(model.trunk.tokens(pixels)[:, 0])
            torch.testing.assert_close(logits["head"], wanted, **CLOSE)
        assert torch.equal(logits["head"], lonely(pixels, exact=True)["head"])


def test_tasks_stay_the_same_while_others_are_detached_and_attached_again(pixels: Tensor) -> None:
    model = model_of(MIXED)
    with torch.no_grad():
        before = model(pixels, exact=True)
        removed = {name: model.engram(name) for name in reversed(list(model.tasks))}
        for name in removed:
            model.detach(name)
            after = model(pixels, exact=True)
            assert all(torch.equal(after[left], before[left]) for left in ("base", *model.tasks))
        for name in reversed(removed):
            model.attach(removed[name])
        again = model(pixels, exact=True)
    assert all(torch.equal(again[name], before[name]) for name in before)


@pytest.mark.parametrize("nodes", [FAMILY, SIDE_FAMILY, MIXED], ids=["masked", "side", "mixed"])
def test_a_task_answers_the_same_under_another_name(nodes: list[Node], pixels: Tensor) -> None:
    model = model_of([node for node in nodes if not node.extends])
    other = MemoryViT(model.trunk).eval()
    for name in reversed(list(model.tasks)):
        other.attach(model.engram(name).renamed(f"a-{name}"))
    with torch.no_grad():
        before, after = model(pixels, exact=True), other(pixels, exact=True)
    assert all(torch.equal(after[f"a-{name}"], before[name]) for name in model.tasks)


def test_a_task_can_take_the_place_of_another(pixels: Tensor) -> None:
    model = model_of(MIXED)
    with torch.no_grad():
        before, readout = model(pixels, exact=True), model.task("task5").spec
        task = model.swap(replace(readout, layers=1))
        assert list(model.tasks) == [name_of(i) for i in range(len(MIXED))]
        assert task.head.weight.shape == (3, 3 * 8)
        after = model(pixels, exact=True)
    assert torch.equal(after["task5"], torch.zeros(3, 3))
    assert all(torch.equal(after[name], before[name]) for name in before if name != "task5")


def test_two_images_do_not_read_each_other(family: MemoryViT, pixels: Tensor) -> None:
    with torch.no_grad():
        together, first = family(pixels), family(pixels[:1])
    for name in together:
        torch.testing.assert_close(together[name][:1], first[name], **CLOSE)


# Promise 3: training a task beside the trunk


def steps(
    model: MemoryViT,
    name: str,
    pixels: Tensor,
    optimiser: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    count: int = 3,
) -> None:
    model.train()
    updates = optimiser([parameter for _, parameter in train_only(model, name)])
    labels = torch.arange(len(pixels)) % len(model.task(name).spec.classes)
    for _ in range(count):
        updates.zero_grad()
        nn.functional.cross_entropy(model(pixels, tasks=[name])[name], labels).backward()
        updates.step()
    model.eval()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


@pytest.mark.parametrize("position", range(len(FAMILY)))
def test_training_a_task_changes_no_tensor_of_trunk_or_other_tasks(
    family: MemoryViT, pixels: Tensor, position: int
) -> None:
    trained = name_of(position)
    before = {name: tensors_hash(task.tensors()) for name, task in family.tasks.items()}
    trunk = copy.deepcopy(family.trunk.state_dict())
    base = family.trunk(pixels)
    steps(family, trained, pixels, sgd)
    after = {name: tensors_hash(task.tensors()) for name, task in family.tasks.items()}
    assert [name for name in before if before[name] != after[name]] == [trained]
    for name, tensor in family.trunk.state_dict().items():
        assert torch.equal(tensor, trunk[name]), name
    assert torch.equal(family(pixels, exact=True)["base"], base)
    assert all(parameter.grad is None for parameter in family.trunk.parameters())


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


def test_training_a_masked_task_keeps_no_activation_of_the_trunk() -> None:
    trunk = random_trunk(image_size=64, patch=8, width=64, depth=4)
    model, pixels = MemoryViT(trunk), some_pixels(4, 64, torch.float32)
    scatter(model.add_task("masked", 3))
    train_only(model, "masked")
    tokens, width, hidden = 65, trunk.config.width, trunk.config.mlp_width

    grown: list[bool] = []
    for block in trunk.layers:
        block.register_forward_hook(
            lambda block, args, out: grown.append(out.requires_grad and out.shape[1] >= tokens)
        )
    lean, kept = saved_bytes(lambda: model(pixels)["masked"].sum(), model)
    assert not any(grown)

    # Of the trunk's tokens, only keys and values, which the task reads, are kept: one storage of
    # queries, keys and values a layer.
    of_trunk = [t for t in kept if tokens in t.shape and t.numel() >= tokens * width]
    one = 4 * tokens * 3 * width * 4
    assert sum(t.untyped_storage().nbytes() for t in of_trunk) <= one * trunk.config.depth
    assert not [t for t in kept if t.shape[-1] == hidden and tokens in t.shape]

    other = MemoryViT(trunk)
    scatter(other.add_task("memory", 3, regime="memory"))
    train_only(other, "memory")
    heavy, _ = saved_bytes(lambda: other(pixels)["memory"].sum(), other)
    assert lean < heavy / 4


def test_a_trunk_that_runs_for_a_masked_task_needs_no_gradient(pixels: Tensor) -> None:
    model = model_of(FAMILY[:1])
    logits = model(pixels)
    assert logits["task0"].requires_grad
    assert not logits["base"].requires_grad


# What is kept between passes


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
        assert once == len(model.trunk.layers) * (20 if exact else 1)
        again = model(pixels, exact=exact)
    assert len(made_calls) == once
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("exact", [False, True])
def test_maps_of_side_patches_are_stacked_once_while_nothing_changes(
    pixels: Tensor, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    model, made = model_of(MIXED), []
    real = MemoryViT.sides

    def counted(self: MemoryViT, names: Sequence[str]) -> Sides:
        made.append(names)
        return real(self, names)

    monkeypatch.setattr(MemoryViT, "sides", counted)
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
    family: MemoryViT, pixels: Tensor, optimiser: str
) -> None:
    with torch.no_grad():
        before = family(pixels)
    steps(family, "task1", pixels, optimisers()[optimiser], count=1)
    check_fresh(family, pixels, before, changed={"task1", "task3"})


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
    family: MemoryViT, pixels: Tensor, change: str
) -> None:
    with torch.no_grad():
        before = family(pixels)
    CHANGES[change](family)
    check_fresh(family, pixels, before, changed={"task1", "task3"})


def test_a_cast_is_seen_by_the_next_pass(family: MemoryViT, pixels: Tensor) -> None:
    with torch.no_grad():
        before = family(pixels)
        for dtype in (torch.float64, torch.bfloat16, torch.float32):
            family.to(dtype)
            assert {x.dtype for x in family(pixels.to(dtype)).values()} == {dtype}
    # what is left of the values after bfloat16
    check_fresh(family, pixels, before, changed=set(before))


def test_a_change_of_the_trunk_is_seen_by_the_next_pass(family: MemoryViT, pixels: Tensor) -> None:
    with torch.no_grad():
        before = family(pixels)
        family.trunk.layers[0].norm1.weight[::2].mul_(2)
    check_fresh(family, pixels, before, changed=set(before))


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
    family: MemoryViT, pixels: Tensor, exact: bool
) -> None:
    with torch.no_grad():
        before = family(pixels, exact=exact)
        with torch.autocast("cpu", torch.bfloat16):
            half = family(pixels, exact=exact)
            again = rebuilt(family)(pixels.bfloat16(), exact=exact)
        after = family(pixels, exact=exact)
    for name in before:
        assert torch.equal(before[name], after[name])
        for logits in (half, again):
            torch.testing.assert_close(logits[name].float(), before[name], rtol=0.1, atol=0.3)


def test_every_task_trains_in_half_precision(family: MemoryViT, pixels: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        logits = family(pixels)
    torch.cat([x.float() for x in logits.values()], dim=1).square().sum().backward()
    for task in family.tasks.values():
        for name, parameter in task.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


def rebuilt(model: MemoryViT) -> MemoryViT:
    """The same trunk and tasks in a model that has kept nothing yet."""
    fresh = MemoryViT(model.trunk).eval()
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
    family: MemoryViT, pixels: Tensor
) -> None:
    with torch.inference_mode():
        family(pixels)
    steps(family, "task1", pixels, sgd, count=1)
    for task in family.tasks.values():
        task.requires_grad_(False)
    assert family(pixels)["task1"].isfinite().all()


def test_a_copy_of_a_model_is_a_model_of_its_own(family: MemoryViT, pixels: Tensor) -> None:
    with torch.no_grad():
        before = family(pixels)
        other = copy.deepcopy(family)
        written_in_place(other)
        after, others = family(pixels), other(pixels)
    assert torch.equal(before["task1"], after["task1"])
    assert not torch.allclose(before["task1"], others["task1"])


# What is asked for


def test_answers_come_in_the_order_they_were_asked_for(family: MemoryViT, pixels: Tensor) -> None:
    assert list(family(pixels)) == ["base", *(name_of(i) for i in range(len(FAMILY)))]
    assert list(family(pixels, tasks=["task3", "base"])) == ["task3", "base"]
    assert list(family(pixels, tasks=["task2", "task2"])) == ["task2"]
    assert family(pixels, tasks=[]) == {}


def test_a_trunk_without_a_head_gives_tasks_and_no_base(pixels: Tensor) -> None:
    model = model_of(FAMILY, head=None)
    assert list(model(pixels)) == list(model.tasks)
    with pytest.raises(EngramError, match=r"no head of its own, so there is no 'base'\.$"):
        model(pixels, tasks=["base"])


def test_images_of_other_sizes_are_answered(family: MemoryViT) -> None:
    larger = some_pixels(2, 16, torch.float32)
    with torch.no_grad():
        logits = family(larger, exact=True)
        assert torch.equal(logits["base"], family.trunk(larger))
        for name, fast in family(larger).items():
            torch.testing.assert_close(fast, logits[name], **CLOSE)


# Errors are sentences


def test_tasks_as_a_text_are_refused(family: MemoryViT, pixels: Tensor) -> None:
    with refuses("tasks is the text 'flowers'; give a list such as ['flowers']."):
        family(pixels, tasks="flowers")


def test_an_unknown_task_is_refused_with_those_there_are(pixels: Tensor) -> None:
    model = model_of([Node(), Node()])
    with refuses("There is no task 'flowers' in this model; attached: task0, task1."):
        model(pixels, tasks=["flowers"])
    with refuses("There is no task 'flowers'"):
        model.detach("flowers")
    with refuses("attached: none."):
        MemoryViT(model.trunk).task("flowers")


def test_extends_as_a_text_is_refused(family: MemoryViT) -> None:
    with refuses("extends is the text 'task0'; give a list such as ['task0']."):
        family.add_task("roses", 3, extends="task0")


@pytest.mark.parametrize(
    ("pixels", "problem"),
    [
        (torch.zeros(3, 8, 8), "got pixels of shape (3, 8, 8)"),
        (torch.zeros(2, 1, 8, 8), "got pixels of shape (2, 1, 8, 8)"),
        (torch.zeros(2, 8, 8, 3), "got pixels of shape (2, 8, 8, 3)"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "type torch.uint8; it expects floating-point"),
        (torch.zeros(2, 3, 8, 8).double(), "is in torch.float32 and got pixels in torch.float64"),
        (torch.zeros(2, 3, 9, 8), "got images of 9 x 8 pixels"),
        (torch.zeros(2, 3, 0, 8), "got images of 0 x 8 pixels"),
        (np.zeros((2, 3, 8, 8), np.float32), "got pixels as ndarray; it expects a torch tensor"),
    ],
)
def test_wrong_pixels_are_refused(family: MemoryViT, pixels: Tensor, problem: str) -> None:
    for tasks in (None, ["task0"], ["base"]):
        with refuses(problem):
            family(pixels, tasks=tasks)


def test_a_task_may_be_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = MemoryViT(tiny_trunk()).eval()
        model.add_task("a", 3)
        assert model(torch.zeros(2, 3, 8, 8).double())["a"].shape == (2, 3)


def test_a_line_describes_a_model() -> None:
    model = MemoryViT(random_trunk(image_size=8, patch=4, width=8, depth=1, heads=2, classes=0))
    assert repr(model).endswith("8 x 8 pixels, 1,328 parameters; tasks: none)")
    model.add_task("pets", 2)
    model.add_task("tiny", 2, regime="head")
    assert repr(model).endswith("; tasks: pets (masked), tiny (head))")
