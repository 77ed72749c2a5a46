"""Squares: average pooling of the patches over a 4 x 4 grid, which keeps where things are.

Heads of side patches and readouts see them beside what is pooled over the whole picture.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.util.devices import to_device
from engram.vit import ViT

_GRID = 4  # squares along a side of the picture
SQUARES = _GRID**2


def squares(prefix: int, grid: tuple[int, int]) -> Tensor:
    """How much each of the n tokens counts in the mean of each square: (16, n).

    The tokens are a prefix, which counts in none, and the patches of a grid of any size. A patch
    on the border of squares counts in each by its area.
    """
    along = []
    for size in grid:
        edges = torch.arange(_GRID + 1, dtype=torch.float64) * (size / _GRID)
        patches = torch.arange(size, dtype=torch.float64)
        low = torch.maximum(edges[:-1, None], patches)
        high = torch.minimum(edges[1:, None], patches + 1)
        along.append((high - low).clamp(min=0) * (_GRID / size))  # (4, size)
    weights = along[0][:, None, :, None] * along[1][None, :, None, :]
    return F.pad(weights.reshape(SQUARES, -1), (prefix, 0))


def squares_of(trunk: ViT, size: Sequence[int], device: torch.device) -> Tensor:
    """The squares of images of this (height, width), for its tokens, prefix included."""
    rows, columns = (side // trunk.config.patch for side in size)
    exact = torch.promote_types(trunk.dtype, torch.float32)  # not every device has float64

    def make() -> Tensor:
        return to_device(squares(trunk.config.prefix, (rows, columns)).to(exact), device)

    return trunk.keep(("squares", rows, columns, exact, device), make)
