"""What each regime trains, what it starts from, and what it gives by the slow reference."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import reference
from tests.support.strategies import scatter, some_pixels, tiny_trunk, trunk_options
from torch import nn

from engram import EngramError, MemoryViT, ViT
from engram.tasks.regimes import REGIMES
from engram.tasks.spec import TaskSpec
from engram.tasks.task import Task
from engram.train.trainable import train_only
from engram.vit import ViTConfig

HEAD = ["head.weight", "head.bias"]
TRUNK = [
    "class_token",
    "registers",
    "prefix_position",
    "position",
    "patch.weight",
    "patch.bias",
    "pre_norm.weight",
    "pre_norm.bias",
    *(
        f"blocks.{layer}.{name}"
        for layer in (0, 1)
        for name in (
            "scale1",
            "scale2",
            "norm1.weight",
            "norm1.bias",
            "qkv.weight",
            "qkv.bias",
            "proj.weight",
            "proj.bias",
            "norm2.weight",
            "norm2.bias",
            "mlp.fc1.weight",
            "mlp.fc1.bias",
            "mlp.fc2.weight",
            "mlp.fc2.bias",
        )
    ),
    "norm.weight",
    "norm.bias",
]
TRAINS = {
    "masked": ["cells", "class_token", *HEAD],
    "masked+adapter": ["cells", "class_token", "adapters.down", "adapters.up", *HEAD],
    "memory": ["cells", "class_token", *HEAD],
    "class": ["class_token", *HEAD],
    "head": HEAD,
    "mlp-head": ["head.hidden.weight", "head.hidden.bias", *HEAD],
    "full": [*(f"trunk.{name}" for name in TRUNK), *HEAD],
    "adapter": ["class_token", "adapters.down", "adapters.up", *HEAD],
    "memory+adapter": ["cells", "class_token", "adapters.down", "adapters.up", *HEAD],
}
EVERYTHING = {"registers": 2, "pre_norm": True, "layer_scale": True, "depth": 2}
ALONE = ["memory", "class", "full", "adapter", "memory+adapter"]


def make(regime: str, trunk: dict[str, Any] | None = None, **settings: Any) -> MemoryViT:
    """A model with one task, no value of which is trivial; its head is not zero."""
    model = MemoryViT(tiny_trunk(**(EVERYTHING if trunk is None else trunk)))
    scatter(model.add_task("task", 3, cells=2, regime=regime, adapter_width=2, **settings))
    return model


# What trains


def test_every_regime_is_tested_here() -> None:
    assert set(TRAINS) == set(REGIMES)


@pytest.mark.parametrize("regime", TRAINS)
def test_exactly_the_intended_parameters_train_and_each_gets_a_gradient(regime: str) -> None:
    model = make(regime)
    if not REGIMES[regime].changes_trunk:
        scatter(model.add_task("other", 3))
    chosen = train_only(model, "task")
    task = model.task("task")
    names = {id(parameter): name for name, parameter in task.named_parameters()}
    assert sorted(names[id(parameter)] for _, parameter in chosen) == sorted(TRAINS[regime])
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert trained == {id(parameter) for _, parameter in chosen}

    model(some_pixels(), tasks=["task"])["task"].pow(3).sum().backward()
    for name, parameter in model.named_parameters():
        if id(parameter) in trained:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name
        else:
            assert parameter.grad is None, name


@pytest.mark.parametrize("update", ["propagate", "add"])
def test_every_cell_of_the_alternatives_gets_a_gradient(update: str) -> None:
    model = make("memory", update=update)
    train_only(model, "task")
    model(some_pixels())["task"].pow(3).sum().backward()
    cells = model.task("task").cells
    assert cells.shape == (1 if update == "propagate" else 2, 2, 8)
    assert (cells.grad.abs().sum(-1) > 0).all()


@pytest.mark.parametrize("regime", ["masked", "masked+adapter"])
def test_all_class_tokens_of_a_task_get_a_gradient(regime: str) -> None:
    model = make(regime, tokens=3)
    train_only(model, "task")
    model(some_pixels())["task"].pow(3).sum().backward()
    assert (model.task("task").class_token.grad.abs().sum(1) > 0).all()


def test_training_another_task_freezes_the_first() -> None:
    model = make("masked")
    model.add_task("other", 3)
    train_only(model, "task")
    train_only(model, "other")
    assert not any(p.requires_grad for p in model.task("task").parameters())
    assert all(p.requires_grad for p in model.task("other").parameters())


def test_tasks_may_train_together() -> None:
    model = make("masked")
    for name in ("other", "frozen"):
        model.add_task(name, 3)
    chosen = {id(parameter) for _, parameter in train_only(model, "task", "other")}
    assert chosen == {id(p) for name in ("task", "other") for p in model.task(name).parameters()}
    assert chosen == {id(p) for p in model.parameters() if p.requires_grad}


def test_a_parameter_that_is_nobodys_is_an_error() -> None:
    model = make("masked")
    model.mine = nn.Linear(2, 2)
    with pytest.raises(EngramError, match=r"The parameter mine\.weight belongs neither to the"):
        train_only(model, "task")


# What they give


@pytest.mark.parametrize("regime", [*ALONE, "head", "mlp-head"])
@settings(max_examples=6)
@given(options=trunk_options(), update=st.sampled_from(["fresh", "propagate", "add"]))
def test_every_regime_gives_the_logits_of_the_reference(
    regime: str, options: dict[str, Any], update: str
) -> None:
    # Where registers carry positions and there is no class token, position 0 is a register's.
    options = {**options, "prefix_positions": min(1, options["prefix_positions"])}
    if not options["class_token"]:
        options["prefix_positions"] = 0
    extra = {"update": update} if REGIMES[regime].cells else {}
    model, pixels = make(regime, options, **extra), some_pixels()
    task = model.task("task")
    trunk = model.trunk if task.trunk is None else task.trunk
    down, up = (task.adapters.down, task.adapters.up) if task.adapters else (None, None)
    wanted = []
    for image in pixels:
        tokens = reference.unmasked(trunk, image, task.class_token, task.cells, update, down, up)
        if task.class_token is not None or options["class_token"]:
            pooled = tokens[0]
        else:
            pooled = tokens[options["registers"] :].mean(0)
        if regime == "mlp-head":
            hidden = task.head.hidden
            pooled = reference.gelu(hidden.weight @ pooled + hidden.bias)
        wanted.append(task.head.weight @ pooled + task.head.bias)
    parameters = list(task.parameters())
    ours, theirs = model(pixels)["task"], torch.stack(wanted)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    found = torch.autograd.grad(ours.pow(2).sum(), parameters, materialize_grads=True)
    grads = torch.autograd.grad(theirs.pow(2).sum(), parameters, materialize_grads=True)
    torch.testing.assert_close(found, grads, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("regime", ["adapter", "masked+adapter", "memory+adapter"])
def test_adapters_change_nothing_before_they_are_trained(regime: str) -> None:
    pixels, model = some_pixels(), make(regime)
    nn.init.zeros_(model.task("task").adapters.up)
    before = model(pixels)["task"]
    nn.init.normal_(model.task("task").adapters.down)
    assert torch.equal(model(pixels)["task"], before)


def test_a_full_task_leaves_the_trunk_alone() -> None:
    model, pixels = make("full"), some_pixels()
    before = model.trunk(pixels)
    chosen = [parameter for _, parameter in train_only(model, "task")]
    optimiser = torch.optim.SGD(chosen, lr=0.1)
    model(pixels)["task"].pow(2).sum().backward()
    optimiser.step()
    assert torch.equal(model(pixels)["base"], before)


def test_a_full_task_learns_positions_of_images_of_another_size() -> None:
    """Positions are resized once while they stay the same, and only then."""
    model, larger = make("full"), some_pixels(2, 16)
    position = model.task("task").trunk.position
    optimiser = torch.optim.AdamW([position], lr=0.1, fused=True)
    train_only(model, "task")
    with torch.no_grad():
        before = model(larger)["task"]
    model(larger)["task"].pow(2).sum().backward()
    assert position.grad.abs().sum() > 0
    optimiser.step()
    with torch.no_grad():
        assert not torch.allclose(model(larger)["task"], before)


# Where they start


def test_cells_are_drawn_with_a_standard_deviation_of_two_hundredths() -> None:
    cells = MemoryViT(tiny_trunk(width=64)).add_task("task", 3, cells=500).cells
    assert abs(cells.std().item() - 0.02) < 3e-4
    assert abs(cells.mean().item()) < 3e-4


def test_heads_start_at_zero() -> None:
    model = MemoryViT(tiny_trunk())
    for regime in ("masked", "head", "mlp-head"):
        model.add_task(regime, 3, regime=regime)
    for regime in ("masked", "head", "mlp-head"):
        assert not model(some_pixels())[regime].any()


@pytest.mark.parametrize("regime", ["masked", "masked+adapter", "memory", "class"])
def test_the_class_token_starts_as_the_trunks(regime: str) -> None:
    trunk = tiny_trunk()
    task = MemoryViT(trunk).add_task("task", 3, regime=regime)
    assert torch.equal(task.class_token, trunk.class_token)
    assert task.class_token.data_ptr() != trunk.class_token.data_ptr()


def test_a_new_class_task_sees_the_picture_as_the_trunk_does() -> None:
    trunk, pixels = tiny_trunk(), some_pixels()
    model = MemoryViT(trunk)
    head = scatter(model.add_task("task", 3, regime="class").head)
    assert torch.equal(model(pixels)["task"], head(trunk.tokens(pixels)[:, 0]))


def test_several_class_tokens_start_apart() -> None:
    token = MemoryViT(tiny_trunk()).add_task("task", 3, tokens=3).class_token
    assert len({tuple(row.tolist()) for row in token}) == 3


def test_the_class_token_can_start_at_random() -> None:
    trunk = tiny_trunk(width=512)
    random = MemoryViT(trunk).add_task("task", 3, class_init="random").class_token
    without = MemoryViT(tiny_trunk(width=512, class_token=False)).add_task("task", 3).class_token
    for token in (random, without):
        assert abs(token.std().item() - 0.02) < 3e-3
    with pytest.raises(EngramError, match="class_init is 'zeros'; choose 'trunk' or 'random'"):
        MemoryViT(trunk).add_task("task", 3, class_init="zeros")


@pytest.mark.parametrize(("cells", "count"), [(1, 9_984), (5, 46_848), (10, 92_928), (20, 185_088)])
@pytest.mark.parametrize("regime", ["masked", "memory"])
def test_a_task_has_as_many_parameters_as_in_the_paper(regime: str, cells: int, count: int) -> None:
    config = ViTConfig((224, 224), 32, width=768, depth=12, heads=12, mlp_width=3072)
    with torch.device("meta"):
        task = Task(TaskSpec("task", ("a", "b"), regime=regime, cells=cells), ViT(config))
    head = 2 * 768 + 2
    assert sum(parameter.numel() for parameter in task.parameters()) == count + head


# Tasks that change the trunk


@pytest.mark.parametrize("regime", ALONE)
@pytest.mark.parametrize("other", ["masked", "head", "memory"])
@pytest.mark.parametrize("first", [True, False])
def test_a_task_that_changes_the_trunk_shares_no_pass(regime: str, other: str, first: bool) -> None:
    model = MemoryViT(tiny_trunk())
    one, two = (regime, other) if first else (other, regime)
    model.add_task("one", 3, regime=one)
    with pytest.raises(
        EngramError,
        match=r"which changes the trunk's own tokens, so 'two' and 'one' cannot share a pass; use "
        r"one MemoryViT for each, or train with the regime masked\.$",
    ):
        model.add_task("two", 3, regime=two)
    assert list(model.tasks) == ["one"]


def test_unmasked_memory_tasks_read_each_others_cells() -> None:
    """The experiment of the paper's section 4.4."""
    pixels, alone = some_pixels(), {}
    both = MemoryViT(tiny_trunk(), unmasked=True)
    for i, name in enumerate(("one", "two")):
        single = MemoryViT(tiny_trunk(), unmasked=True)
        for model in (single, both):
            scatter(model.add_task(name, 3, cells=i + 2, regime="memory"), by=0.5, seed=i)
        both.task(name).load_state_dict(single.task(name).state_dict())
        alone[name] = single(pixels)[name]
    together = both(pixels)
    tasks = both.tasks
    cells = torch.cat([tasks["one"].cells, tasks["two"].cells], dim=1)
    for name, task in tasks.items():
        assert (together[name] - alone[name]).abs().max() > 1e-2
        tokens = [reference.unmasked(both.trunk, p, task.class_token, cells) for p in pixels]
        wanted = torch.stack([task.head.weight @ t[0] + task.head.bias for t in tokens])
        torch.testing.assert_close(together[name], wanted, rtol=1e-9, atol=1e-9)


def test_only_memory_tasks_of_one_update_are_ever_unmasked() -> None:
    model = MemoryViT(tiny_trunk(), unmasked=True)
    model.add_task("one", 3, regime="memory")
    for settings_ in ({"regime": "masked"}, {"regime": "memory", "update": "propagate"}):
        with pytest.raises(EngramError, match="cannot share a pass"):
            model.add_task("two", 3, **settings_)


# Settings that make no sense


@pytest.mark.parametrize(
    ("settings_", "problem"),
    [
        ({"regime": "lora"}, "there is no regime 'lora'; choose one of masked, masked+adapter"),
        ({"kind": "detection"}, "there is no kind of task 'detection'"),
        ({"cells": -1}, "cells is -1; it must be a whole number from 0 to 10,000."),
        ({"cells": 2.5}, "cells is 2.5; it must be a whole number from 0 to 10,000."),
        ({"cells": "5"}, "cells is '5'; it must be a whole number"),
        ({"tokens": 0}, "tokens is 0; it must be a whole number from 1 to 10,000."),
        ({"adapter_width": 0}, "adapter_width is 0; it must be"),
        ({"update": "magic", "regime": "memory"}, "there is no update 'magic'"),
        ({"update": "add"}, "update='add' is for the regimes memory and memory+adapter only."),
        ({"update": "add", "regime": "class"}, "update='add' is for the regimes memory and"),
        ({"tokens": 2, "regime": "memory"}, "the regime 'memory' has one class token, not 2."),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(settings_: dict[str, Any], problem: str) -> None:
    model = MemoryViT(tiny_trunk())
    with pytest.raises(EngramError, match="Task 'task': " + re.escape(problem)):
        model.add_task("task", 3, **settings_)
    assert not model.tasks


def test_a_task_names_its_tensors_as_its_file_does() -> None:
    shapes = {
        name: tuple(tensor.shape) for name, tensor in make("masked").task("task").tensors().items()
    }
    assert shapes == {
        "cells": (2, 2, 8),
        "class_token": (1, 8),
        "head.weight": (3, 8),
        "head.bias": (3,),
    }


def test_a_refused_training_leaves_everything_as_it_was() -> None:
    model = make("masked")
    model.add_task("other", 3)
    train_only(model, "other")
    model.mine = nn.Linear(2, 2)
    before = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(EngramError):
        train_only(model, "task")
    assert [parameter.requires_grad for parameter in model.parameters()] == before


# Names of classes


def test_a_class_that_no_answer_could_name_is_refused() -> None:
    """A folder named in Latin-1, as Python reads it."""
    with pytest.raises(EngramError, match=r"the class 'caf\\udce9' is no text in UTF-8.*rename"):
        TaskSpec("t", ("tea", "caf\udce9"))


def test_many_classes_are_looked_through_once() -> None:
    started = time.process_time()
    with pytest.raises(EngramError, match="the class '29999' is there twice"):
        TaskSpec("t", (*map(str, range(30_000)), "29999"))
    assert time.process_time() - started < 1
