"""forward.py against the slow reference, for random backbones and random graphs of tasks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support import passes as ways
from tests.support import reference
from tests.support.passes import (
    Pass,
    assert_same,
    assert_same_gradients,
    loss,
    normed_of_every_layer,
)
from tests.support.strategies import (
    DIAMOND,
    FAMILY_OPTIONS,
    Node,
    backbone_options,
    every_family,
    expected,
    graphs,
    model_of,
    some_pixels,
    tiny_backbone,
)
from torch import Tensor

from engram import MemoryViT
from engram.methods import forward
from engram.methods.adapters import Adapters
from engram.methods.masked import Masked
from engram.model.passes import task_inputs

TIGHT = {"rtol": 1e-9, "atol": 1e-9}
SINGLE = {"rtol": 1e-5, "atol": 1e-5}


def from_cache(tokens: bool) -> Pass:
    def answer(model: MemoryViT, pixels: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            layers = normed_of_every_layer(model.backbone, pixels)
        streams = Masked.memory(task_inputs(model, list(model.tasks)), model.backbone)
        rotation = model.backbone.rotation(pixels.shape[-2:], layers[0].shape[1])
        can = tokens and rotation is None
        with mock.patch.object(forward, "reads_tokens", return_value=can):
            (y,) = forward.from_cached(model.backbone, layers, [streams], rotation)
        own = streams.split(model.backbone.norm(y))
        return {name: model.task(name).head(own[name].mean(1)) for name in model.tasks}

    return answer


PATHS = {
    **ways.PATHS,
    "from the cache, by keys": from_cache(tokens=False),
    "from the cache, by tokens": from_cache(tokens=True),
}


# The reference takes most of the time, so every case goes all ways.


@settings(max_examples=25)
@given(options=backbone_options(), nodes=graphs())
@example(options={}, nodes=DIAMOND)
@example(options={}, nodes=[Node(cells=0)])
@example(options={}, nodes=[Node(), Node()])
@every_family(nodes=DIAMOND)
def test_every_path_gives_the_logits_of_the_reference(
    options: dict[str, Any], nodes: list[Node]
) -> None:
    model, pixels = model_of(nodes, dtype=torch.float64, **options), some_pixels()
    wanted = expected(model, pixels)
    for path, run in PATHS.items():
        assert_same(path, run(model, pixels), wanted, **TIGHT)


@settings(max_examples=20)
@given(options=backbone_options(), nodes=graphs())
@example(options={}, nodes=DIAMOND)
@example(options=FAMILY_OPTIONS["dinov3"], nodes=DIAMOND)
def test_every_path_gives_the_gradients_of_the_reference(
    options: dict[str, Any], nodes: list[Node]
) -> None:
    model, pixels = model_of(nodes, dtype=torch.float64, **options), some_pixels()
    parameters = [p for task in model.tasks.values() for p in task.parameters()]
    wanted = torch.autograd.grad(loss(expected(model, pixels)), parameters)
    for path in list(PATHS)[2:]:
        assert_same_gradients(path, model, PATHS[path](model, pixels), wanted, **TIGHT)


@settings(max_examples=5)
@given(options=backbone_options(), nodes=graphs())
@example(options={}, nodes=DIAMOND)
@example(options=FAMILY_OPTIONS["dinov3"], nodes=DIAMOND)
def test_single_precision_stays_within_a_hundred_thousandth(
    options: dict[str, Any], nodes: list[Node]
) -> None:
    model, pixels = model_of(nodes, **options), some_pixels(dtype=torch.float32)
    found = {path: run(model, pixels) for path, run in PATHS.items()}
    wanted = expected(model.double(), pixels.double())
    for path, outputs in found.items():
        doubles = {name: logits.double() for name, logits in outputs.items()}
        assert_same(path, doubles, wanted, **SINGLE)


def test_gradients_reach_pixels_as_in_the_reference() -> None:
    model = model_of(DIAMOND, dtype=torch.float64)
    pixels = some_pixels().requires_grad_()
    wanted = torch.autograd.grad(loss(expected(model, pixels)), pixels)
    for task in model.tasks.values():
        task.requires_grad_(False)
    found = torch.autograd.grad(loss(model(pixels)), pixels)
    torch.testing.assert_close(found, wanted, **TIGHT)


def test_the_plain_backbone_is_the_reference_without_tasks() -> None:
    backbone, pixels = tiny_backbone(registers=1, pre_norm=True, layer_scale=True), some_pixels()
    wanted = torch.stack([reference.masked(backbone, image, []).normed for image in pixels])
    torch.testing.assert_close(backbone.tokens(pixels), wanted, **TIGHT)


# Full attention, Figure 2b


@pytest.mark.parametrize("update", ["fresh", "propagate", "add"])
@pytest.mark.parametrize("adapter", [0, 2])
@settings(max_examples=8)
@given(options=backbone_options(), cells=st.integers(0, 3))
def test_full_attention_is_the_reference(
    update: str, adapter: int, options: dict[str, Any], cells: int
) -> None:
    vit, pixels = tiny_backbone(**options).requires_grad_(False), some_pixels()
    depth, width = vit.config.depth, vit.config.width
    layers = 1 if update == "propagate" else depth
    values = torch.randn(layers, cells, width, dtype=torch.float64, requires_grad=True)
    shapes = (depth, 2, width, adapter), (depth, 2, adapter, width)
    tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    adapters = Adapters(*tensors) if adapter else None
    own = {"adapters.down": adapters.down, "adapters.up": adapters.up} if adapters else {}
    x = forward.full_attention(vit, pixels, {"cells": values, **own}, update)
    down, up = (adapters.down, adapters.up) if adapters else (None, None)
    wanted = torch.stack(
        [reference.unmasked(vit, p, None, values, update, down, up) for p in pixels]
    )
    tokens = vit.norm(x)
    torch.testing.assert_close(tokens, wanted, **TIGHT)
    by = torch.linspace(-1, 2, tokens.numel(), dtype=torch.float64).view_as(tokens)
    parameters = [values, *([] if adapters is None else [adapters.down, adapters.up])]
    # no cells, no gradient; `0 * values` keeps them in the graph
    found = torch.autograd.grad((tokens * by).sum() + 0 * values.sum(), parameters)
    theirs = torch.autograd.grad((wanted * by).sum() + 0 * values.sum(), parameters)
    torch.testing.assert_close(found, theirs, **TIGHT)
