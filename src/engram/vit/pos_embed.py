"""Positions that are computed from the grid of patches: rotary ones, waves, and resized ones.

*Rotary* positions turn the queries and keys of patches by angles that grow with their row and
column, so that a score depends on how far two patches are from each other. They are no tokens'
values: class tokens, registers and memory cells have no place in the picture and are not turned.

Axes as in layers.py: b images, n tokens of the backbone, D width, h heads, d width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class RotaryConfig:
    """Angles by which a patch is turned: along each axis, one for each quarter of a head's numbers.

    The patch of row y, of `rows`, is at ((y + offset) / rows) * span + start, likewise along the
    columns. Pair i of an axis, of d / 4, turns by base ** (-4 i / d) times that.
    """

    base: float
    span: float  # a grid of any size spans the same angles
    start: float = 0.0
    offset: float = 0.0
    halves: bool = False  # pairs are the numbers i and i + d / 2; otherwise 2 i and 2 i + 1
    columns_first: bool = False  # the first pairs are those of columns; otherwise of rows


@dataclass(frozen=True, eq=False)
class Rotation:
    """Turns the queries or keys (b, h, n, d) of the backbone's tokens, each by its own angles."""

    cos: Tensor  # (n, d), 1 for what is no patch
    sin: Tensor  # (n, d), 0 for what is no patch, and negative for the first of each pair
    halves: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Turn x (b, h, tokens, d); tokens behind the n of the backbone stay."""
        n = len(self.cos)
        if x.shape[2] > n:
            return torch.cat([self(x[:, :, :n]), x[:, :, n:]], dim=2)
        shape, pair = ((2, -1), -2) if self.halves else ((-1, 2), -1)
        partners = x.reshape(*x.shape[:-1], *shape).flip(pair).flatten(-2)
        return x * self.cos + partners * self.sin


def rotation(config: RotaryConfig, grid: Sequence[int], n: int, d: int, like: Tensor) -> Rotation:
    """The rotation of n tokens, the last of them a grid of patches, for heads of width d."""
    speeds = config.base ** -(torch.arange(0, d, 4, dtype=torch.float64) / d)  # (d / 4)
    axes = [
        (torch.arange(places, dtype=torch.float64) + config.offset) / places * config.span
        + config.start
        for places in grid
    ]
    rows, columns = (at.outer(speeds) for at in axes)
    rows, columns = (
        rows.unsqueeze(1).expand(-1, len(columns), -1),
        columns.expand(len(rows), -1, -1),
    )
    both = [columns, rows] if config.columns_first else [rows, columns]
    angles = torch.cat(both, dim=-1).flatten(0, 1)  # (patches, d / 2)
    angles = torch.cat([angles.new_zeros(n - len(angles), d // 2), angles])
    cos, sin = angles.cos(), angles.sin()
    dim = -2 if config.halves else -1  # where the two of a pair lie
    cos = torch.stack([cos, cos], dim).flatten(-2)
    sin = torch.stack([-sin, sin], dim).flatten(-2)
    return Rotation(_like(cos, like), _like(sin, like), config.halves)


def waves(grid: Sequence[int], width: int, like: Tensor) -> Tensor:
    """Sine and cosine of columns, then of rows, a quarter of the width each: (patches, D)."""
    rows, columns = (torch.arange(places, dtype=torch.float64) for places in grid)
    quarter = width // 4
    speeds = 10_000 ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
    x = columns.repeat(len(rows)).outer(speeds)
    y = rows.repeat_interleave(len(columns)).outer(speeds)
    return _like(torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1), like)


def resized(
    position: Tensor, old: tuple[int, int], grid: tuple[int, int], antialias: bool
) -> Tensor:
    """Learned position embeddings (patches, D) of the old grid as those of another one."""
    field = position.float().T.reshape(1, -1, *old)  # (1, D, rows, columns)
    field = F.interpolate(
        field, size=grid, mode="bicubic", align_corners=False, antialias=antialias
    )
    return field.flatten(2)[0].T.to(position.dtype)


def _like(table: Tensor, like: Tensor) -> Tensor:
    return table.to(like.dtype).to(like.device)  # in two steps: not every device has fp64
