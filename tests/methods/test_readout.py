"""Layer statistics are what numpy computes of the tokens, on every kind of backbone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.strategies import Node, model_of, some_pixels, tiny_backbone
from torch import Tensor

from engram import ViT
from engram.methods.readout import (
    LayerStatistics,
    grid_count,
    grid_layers,
    pooling_weights,
    statistics_per_layer,
)

WIDTH = 8
BACKBONES: dict[str, dict[str, Any]] = {
    "class token": {},
    "class token and registers": {"registers": 2},
    "no class token": {"class_token": False, "prefix_positions": 0},
    "registers alone": {"class_token": False, "prefix_positions": 0, "registers": 2},
}


def tokens_of(backbone: ViT, layers: int = 3, patches: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    n = backbone.config.prefix + patches
    return [torch.randn(2, n, WIDTH, generator=generator) for _ in range(layers)]


def grid_of(backbone: ViT) -> Tensor:
    return pooling_weights(backbone.config.prefix, backbone.config.grid)


@pytest.mark.parametrize("options", BACKBONES.values(), ids=BACKBONES.keys())
def test_statistics_are_class_token_mean_and_deviation_of_the_patches_and_grids_their_means(
    options: dict[str, Any],
) -> None:
    backbone = tiny_backbone(torch.float32, depth=2, **options)
    layers = tokens_of(backbone)
    wanted = []
    for tokens in reversed([layer.numpy().astype(np.float64) for layer in layers]):
        patches = tokens[:, backbone.config.prefix :]
        own = [tokens[:, 0]] if backbone.config.class_token else []
        wanted += [*own, patches.mean(1), patches.std(1)]
    for tokens in (layers[2], layers[1], layers[0]):  # of two layers and the final tokens: all
        rows = tokens[:, backbone.config.prefix :].numpy().astype(np.float64)  # a grid of 2 x 2
        grid = rows.reshape(2, 2, 2, WIDTH).repeat(2, axis=1).repeat(2, axis=2)
        wanted += [grid.reshape(2, -1)]
    found = LayerStatistics.from_layers(layers, backbone, grid_of(backbone)).all()
    statistics = 3 * statistics_per_layer(backbone.config.class_token)
    assert found.shape == (2, (statistics + grid_count(2)) * WIDTH)
    np.testing.assert_allclose(found.numpy(), np.concatenate(wanted, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", BACKBONES.values(), ids=BACKBONES.keys())
def test_statistics_start_with_the_pooled_token(options: dict[str, Any]) -> None:
    backbone = tiny_backbone(torch.float32, depth=2, **options)
    layers = tokens_of(backbone)
    every = LayerStatistics.from_layers(layers, backbone, grid_of(backbone)).all()
    torch.testing.assert_close(every[:, :WIDTH], backbone.pool(layers[-1]))


@pytest.mark.parametrize("size", [4, 8, 20])
def test_images_of_any_size_have_as_many_statistics(size: int) -> None:
    model = model_of([Node(family="readout", grid=True)], depth=2)
    with torch.no_grad():
        assert model(some_pixels(2, size, torch.float32))["task0"].shape == (2, 2)
    one_patch = tokens_of(model.backbone, patches=1)
    weights = pooling_weights(1, (1, 1))
    rows = LayerStatistics.from_layers(one_patch, model.backbone, weights).all()
    found = rows.unflatten(1, (-1, WIDTH))
    assert torch.equal(found[:, 2:9:3], torch.zeros(2, 3, WIDTH))  # deviations
    assert torch.equal(found[:, 9:25], one_patch[-1][:, 1:].expand(-1, 16, -1))


@pytest.mark.parametrize(
    ("depth", "steps"), [(1, (1, 0)), (2, (2, 1, 0)), (12, (12, 7, 3)), (24, (24, 14, 6))]
)
def test_grids_are_of_three_layers_low_in_the_middle_and_last(
    depth: int, steps: tuple[int, ...]
) -> None:
    assert grid_layers(depth) == steps
    assert grid_count(depth) == 16 * len(steps)


# What a task sees of them


def test_a_head_sees_statistics_or_the_pooled_token_and_its_own_side_network() -> None:
    nodes = [
        Node(family="head"),
        Node(family="side"),
        Node(family="readout", grid=True),
        Node(family="readout", layers=2),
        Node(family="side+readout", layers=2),
        Node(family="masked+readout", layers=2),
    ]
    model, pixels = model_of(nodes, depth=2), some_pixels(dtype=torch.float32)
    with torch.no_grad():
        head, side, every, two, both, token_too = model.embed(pixels, list(model.tasks)).values()
        tokens = model.backbone.tokens(pixels)
    torch.testing.assert_close(head, model.backbone.pool(tokens))
    assert torch.equal(side[:, :WIDTH], head)
    assert torch.equal(every[:, : 2 * 3 * WIDTH], two)
    assert both.shape[1] == side.shape[1] + two.shape[1] - WIDTH
    assert torch.equal(both[:, side.shape[1] :], two[:, WIDTH:])  # the pooled token is there once
    assert torch.equal(both[:, :WIDTH], head)
    assert torch.equal(token_too[:, WIDTH:], two)
