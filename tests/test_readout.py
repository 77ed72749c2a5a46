"""Moments are what numpy computes of the tokens, on every kind of trunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.strategies import Node, model_of, some_pixels, tiny_trunk
from torch import Tensor

from engram import ViT
from engram.readout import (
    Moments,
    Readers,
    moments_of,
    moments_per_layer,
    squares_count,
    steps_with_squares,
)
from engram.side import Climb
from engram.squares import squares

WIDTH = 8
TRUNKS: dict[str, dict[str, Any]] = {
    "class token": {},
    "class token and registers": {"registers": 2},
    "no class token": {"class_token": False, "prefix_positions": 0},
    "registers alone": {"class_token": False, "prefix_positions": 0, "registers": 2},
}


def tokens_of(trunk: ViT, layers: int = 3, patches: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    n = trunk.config.prefix + patches
    return [torch.randn(2, n, WIDTH, generator=generator) for _ in range(layers)]


def grid_of(trunk: ViT) -> Tensor:
    return squares(trunk.config.prefix, trunk.config.grid)


@pytest.mark.parametrize("options", TRUNKS.values(), ids=TRUNKS.keys())
def test_moments_are_class_token_mean_and_deviation_of_the_patches_and_squares_their_means(
    options: dict[str, Any],
) -> None:
    trunk = tiny_trunk(torch.float32, depth=2, **options)
    layers = tokens_of(trunk)
    wanted = []
    for tokens in reversed([layer.numpy().astype(np.float64) for layer in layers]):
        patches = tokens[:, trunk.config.prefix :]
        own = [tokens[:, 0]] if trunk.config.class_token else []
        wanted += [*own, patches.mean(1), patches.std(1)]
    for tokens in (layers[2], layers[1], layers[0]):  # of two layers and the final tokens: all
        rows = tokens[:, trunk.config.prefix :].numpy().astype(np.float64)  # a grid of 2 x 2
        grid = rows.reshape(2, 2, 2, WIDTH).repeat(2, axis=1).repeat(2, axis=2)
        wanted += [grid.reshape(2, -1)]
    found = moments_of(layers, trunk, grid_of(trunk))
    moments = 3 * moments_per_layer(trunk.config.class_token)
    assert found.shape == (2, (moments + squares_count(2)) * WIDTH)
    np.testing.assert_allclose(found.numpy(), np.concatenate(wanted, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", TRUNKS.values(), ids=TRUNKS.keys())
def test_the_last_layers_are_a_beginning_of_all_and_start_with_the_pooled_token(
    options: dict[str, Any],
) -> None:
    trunk = tiny_trunk(torch.float32, depth=2, **options)
    layers, moments = tokens_of(trunk), Moments(trunk, grid_of(trunk))
    for step, tokens in enumerate(layers):
        moments.see(step, tokens)
    every = moments_of(layers, trunk, grid_of(trunk))
    each = moments_per_layer(trunk.config.class_token) * WIDTH
    for count in (1, 2, 3):
        assert torch.equal(moments.last(count), every[:, : count * each])
    assert torch.equal(moments.last(3, squares=True), every)
    assert torch.equal(moments.last(0), every[:, :WIDTH])
    torch.testing.assert_close(every[:, :WIDTH], trunk.pool(layers[-1]))


@pytest.mark.parametrize("size", [4, 8, 20])
def test_images_of_any_size_have_as_many_moments(size: int) -> None:
    model = model_of([Node(family="readout", squares=True)], depth=2)
    with torch.no_grad():
        assert model(some_pixels(2, size, torch.float32))["task0"].shape == (2, 2)
    one_patch = tokens_of(model.trunk, patches=1)
    found = moments_of(one_patch, model.trunk, squares(1, (1, 1))).unflatten(1, (-1, WIDTH))
    assert torch.equal(found[:, 2:9:3], torch.zeros(2, 3, WIDTH))  # deviations
    assert torch.equal(found[:, 9:25], one_patch[-1][:, 1:].expand(-1, 16, -1))


@pytest.mark.parametrize(
    ("depth", "steps"), [(1, (1, 0)), (2, (2, 1, 0)), (12, (12, 7, 3)), (24, (24, 14, 6))]
)
def test_squares_are_of_three_layers_low_in_the_middle_and_last(
    depth: int, steps: tuple[int, ...]
) -> None:
    assert steps_with_squares(depth) == steps
    assert squares_count(depth) == 16 * len(steps)


# What a task sees of them


def climb_of(*nodes: Node) -> tuple[ViT, Climb]:
    model = model_of([*nodes], depth=2)
    return model.trunk, model.sides(list(model.tasks)).begin(grid_of(model.trunk))


def test_nothing_is_read_for_nobody() -> None:
    assert not Readers({}, None)
    trunk, climb = climb_of(Node(family="side"))
    assert Readers(dict.fromkeys(climb.sides.places, climb), None)
    assert Readers({}, Moments(trunk, None))


def test_a_head_sees_moments_or_the_pooled_token_and_its_own_side() -> None:
    trunk, climb = climb_of(Node(family="side"), Node(family="side"))
    readers = Readers(dict.fromkeys(climb.sides.places, climb), Moments(trunk, climb.squares))
    layers = tokens_of(trunk)
    with torch.no_grad():
        for step, tokens in enumerate(layers):
            readers.see(step, tokens)
        pooled, own = trunk.pool(layers[-1]), climb.features["task1"]
        assert torch.equal(readers.features("head", 0, pooled), pooled)
        assert torch.equal(readers.features("task1", 0, pooled), torch.cat([pooled, own], 1))
        every = moments_of(layers, trunk, climb.squares)
        assert torch.equal(readers.features("readout", 3, pooled, squares=True), every)
        two = every[:, : 2 * 3 * WIDTH]
        assert torch.equal(readers.features("readout", 2, pooled), two)
        assert torch.equal(readers.features("task1", 2, pooled), torch.cat([two, own], 1))


def test_a_head_sees_the_rows_of_patches_without_those_of_the_prefix() -> None:
    trunk, climb = climb_of(Node(family="side"))
    readers, layers = Readers(dict.fromkeys(climb.sides.places, climb), None), tokens_of(trunk)
    with torch.no_grad():
        for step, tokens in enumerate(layers):
            readers.see(step, tokens)
    patches = layers[-1][:, trunk.config.prefix :]
    assert readers.patches("head", patches) is patches
    seen = readers.patches("task0", patches)
    assert torch.equal(seen[..., :WIDTH], patches)
    assert torch.equal(seen[..., WIDTH:], climb.patches("task0")[:, trunk.config.prefix :])
