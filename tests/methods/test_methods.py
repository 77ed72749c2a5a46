"""What each regime trains, what it starts from, and what it gives by the slow reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import reference
from tests.support.regimes import SUPERVISED, known
from tests.support.strategies import backbone_options, scatter, some_pixels, tiny_backbone
from torch import nn

import engram
from engram import EngramError, MemoryViT
from engram.methods import METHODS, Method, OwnPassMethod, SharedPassMethod
from engram.train.loop.trainable import train_only

HEAD = ["head.weight", "head.bias"]
SIDE = [f"side.{name}" for name in ("project", "attention", "up", "down", "queries")]
BACKBONE = [
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
    "side": ["cells", *SIDE, *HEAD],
    "readout": HEAD,
    "masked+readout": ["cells", "class_token", *HEAD],
    "masked+adapter+readout": ["cells", "class_token", "adapters.down", "adapters.up", *HEAD],
    "side+readout": ["cells", *SIDE, *HEAD],
    "pooling": ["queries", "values", *HEAD],
    "memory": ["cells", "class_token", *HEAD],
    "class": ["class_token", *HEAD],
    "head": HEAD,
    "mlp-head": ["head.hidden.weight", "head.hidden.bias", *HEAD],
    "full": [*(f"backbone.{name}" for name in BACKBONE), *HEAD],
    "adapter": ["class_token", "adapters.down", "adapters.up", *HEAD],
    "memory+adapter": ["cells", "class_token", "adapters.down", "adapters.up", *HEAD],
}
EVERYTHING = {"registers": 2, "pre_norm": True, "layer_scale": True, "depth": 2}
ALONE = ["memory", "class", "full", "adapter", "memory+adapter"]


def make(regime: str, backbone: dict[str, Any] | None = None, **settings: Any) -> MemoryViT:
    """A model with one task, no value of which is trivial; its head is not zero."""
    model = MemoryViT(tiny_backbone(**(EVERYTHING if backbone is None else backbone)))
    scatter(
        model.add_task(
            "task", 3, regime=regime, **known(regime, cells=2, adapter_width=2), **settings
        )
    )
    return model


# What trains


def test_every_regime_is_tested_here() -> None:
    assert set(TRAINS) == set(SUPERVISED)


@pytest.mark.parametrize("regime", TRAINS)
def test_exactly_the_intended_parameters_train_and_each_gets_a_gradient(regime: str) -> None:
    model = make(regime)
    if METHODS[regime].shares_pass:
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


# What they give


@pytest.mark.parametrize("regime", [*ALONE, "head", "mlp-head"])
@settings(max_examples=6)
@given(options=backbone_options(), update=st.sampled_from(["fresh", "propagate", "add"]))
def test_every_regime_gives_the_logits_of_the_reference(
    regime: str, options: dict[str, Any], update: str
) -> None:
    # Where registers carry positions and there is no class token, position 0 is a register's.
    options = {**options, "prefix_positions": min(1, options["prefix_positions"])}
    if not options["class_token"]:
        options["prefix_positions"] = 0
    extra = known(regime, update=update)
    model, pixels = make(regime, options, **extra), some_pixels()
    task = model.task("task")
    backbone = model.backbone if task.backbone is None else task.backbone
    tensors = task.input().tensors
    down, up = tensors.get("adapters.down"), tensors.get("adapters.up")
    token, cells = tensors.get("class_token"), tensors.get("cells")
    wanted = []
    for image in pixels:
        tokens = reference.unmasked(backbone, image, token, cells, update, down, up)
        if token is not None or options["class_token"]:
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


def test_a_full_task_leaves_the_backbone_alone() -> None:
    model, pixels = make("full"), some_pixels()
    before = model.backbone(pixels)
    chosen = [parameter for _, parameter in train_only(model, "task")]
    optimiser = torch.optim.SGD(chosen, lr=0.1)
    model(pixels)["task"].pow(2).sum().backward()
    optimiser.step()
    assert torch.equal(model(pixels)["base"], before)


def test_a_full_task_learns_positions_of_images_of_another_size() -> None:
    """Positions are resized once while they stay the same, and only then."""
    model, larger = make("full"), some_pixels(2, 16)
    position = model.task("task").backbone.position
    optimiser = torch.optim.AdamW([position], lr=0.1, fused=True)
    train_only(model, "task")
    with torch.no_grad():
        before = model(larger)["task"]
    model(larger)["task"].pow(2).sum().backward()
    assert position.grad.abs().sum() > 0
    optimiser.step()
    with torch.no_grad():
        assert not torch.allclose(model(larger)["task"], before)


# Tasks that change the backbone


def test_unmasked_memory_tasks_read_each_others_cells() -> None:
    """The experiment of the paper's section 4.4."""
    pixels, alone = some_pixels(), {}
    both = MemoryViT(tiny_backbone(), unmasked=True)
    for i, name in enumerate(("one", "two")):
        single = MemoryViT(tiny_backbone(), unmasked=True)
        for model in (single, both):
            scatter(model.add_task(name, 3, cells=i + 2, regime="memory"), by=0.5, seed=i)
        both.task(name).load_state_dict(single.task(name).state_dict())
        alone[name] = single(pixels)[name]
    together = both(pixels)
    tasks = both.tasks
    cells = torch.cat([tasks["one"].cells, tasks["two"].cells], dim=1)
    for name, task in tasks.items():
        assert (together[name] - alone[name]).abs().max() > 1e-2
        tokens = [reference.unmasked(both.backbone, p, task.class_token, cells) for p in pixels]
        wanted = torch.stack([task.head.weight @ t[0] + task.head.bias for t in tokens])
        torch.testing.assert_close(together[name], wanted, rtol=1e-9, atol=1e-9)


def test_a_method_shares_the_pass_or_has_its_own() -> None:
    class Neither(Method):
        name = "neither"

    with pytest.raises(EngramError, match="SharedPassMethod"):
        engram.register(Neither)
    for method in METHODS.values():
        assert method.shares_pass == issubclass(method, SharedPassMethod)
        assert method.shares_pass != issubclass(method, OwnPassMethod)
        assert hasattr(method, "join") == method.shares_pass
