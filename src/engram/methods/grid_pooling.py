"""Grid pooling: means of the patches over a 4 x 4 grid, which keep where things are.

Heads of side networks and readouts see them beside what is pooled over the whole picture.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.util.devices import to_device
from engram.vit import ViT

_SIDE = 4  # grid cells along a side of the picture
GRID_CELLS = _SIDE**2


def pooling_weights(prefix: int, patches: tuple[int, int]) -> Tensor:
    """The weight of each of the n tokens in the mean of each grid cell: (16, n).

    The tokens are a prefix, which counts in none, and (rows, columns) of patches. A patch on the
    border of grid cells counts in each by its area.
    """
    along = []
    for size in patches:
        edges = torch.arange(_SIDE + 1, dtype=torch.float64) * (size / _SIDE)
        start = torch.arange(size, dtype=torch.float64)
        low = torch.maximum(edges[:-1, None], start)
        high = torch.minimum(edges[1:, None], start + 1)
        along.append((high - low).clamp(min=0) * (_SIDE / size))  # (4, size)
    weights = along[0][:, None, :, None] * along[1][None, :, None, :]
    return F.pad(weights.reshape(GRID_CELLS, -1), (prefix, 0))


def grid_weights(backbone: ViT, size: Sequence[int], device: torch.device) -> Tensor:
    """The pooling weights for the tokens of images of this (height, width), cached."""
    rows, columns = (side // backbone.config.patch for side in size)
    exact = torch.promote_types(backbone.dtype, torch.float32)  # not every device has float64

    def make() -> Tensor:
        weights = pooling_weights(backbone.config.prefix, (rows, columns))
        return to_device(weights.to(exact), device)

    return backbone.keep(("grid", rows, columns, exact, device), make)
