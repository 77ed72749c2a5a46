"""Grid cells are the means that torch's own pooling finds, and keep their sum on any grid."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engram import random_backbone
from engram.methods.readout import GRID_CELLS, grid_weights, pooling_weights


@pytest.mark.parametrize("grid", [(4, 4), (8, 8), (4, 12), (16, 8)])
def test_grid_cells_are_the_means_that_torch_pools_where_the_grid_divides(
    grid: tuple[int, int],
) -> None:
    tokens = torch.randn(2 + grid[0] * grid[1], 3, dtype=torch.float64)
    picture = tokens[2:].T.reshape(3, *grid)
    wanted = F.adaptive_avg_pool2d(picture, 4).flatten(1).T
    torch.testing.assert_close(pooling_weights(2, grid) @ tokens, wanted)


@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (7, 7), (14, 14), (5, 37)])
def test_every_grid_cell_is_a_mean_and_every_patch_counts_as_much(grid: tuple[int, int]) -> None:
    weights, patches = pooling_weights(1, grid), grid[0] * grid[1]
    assert weights.shape == (GRID_CELLS, 1 + patches)
    assert not weights[:, 0].any()
    torch.testing.assert_close(weights.sum(1), torch.ones(GRID_CELLS).double())
    each = torch.full((patches,), GRID_CELLS / patches).double()
    torch.testing.assert_close(weights[:, 1:].sum(0), each)


def test_a_patch_on_the_border_of_grid_cells_counts_in_each_by_its_area() -> None:
    weights = pooling_weights(0, (1, 6))[:4]  # a cell is a patch and a half wide
    wanted = torch.tensor([[2, 1, 0, 0, 0, 0], [0, 1, 2, 0, 0, 0]]).double() / 3
    torch.testing.assert_close(weights[:2], wanted)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
)
def test_pooling_weights_have_the_precision_of_the_backbone_but_not_less_than_single(
    weights: torch.dtype, expected: torch.dtype
) -> None:
    backbone = random_backbone().to(weights)
    found = grid_weights(backbone, (32, 64), torch.device("cpu"))
    assert (found.dtype, found.shape) == (expected, (GRID_CELLS, 1 + 4 * 8))
