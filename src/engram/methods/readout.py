"""Readout: a linear head on statistics of every layer, not on the last tokens alone.

Of each layer's normed tokens, and of the final ones, there are three *layer statistics*: the class
token, and the mean and the standard deviation of the patches (D numbers each). A backbone without a
class token has two, and its pooled token comes first where it has a pooling of its own. They do not
say where in the picture something is, so some layers have *grid pooling* besides: means of the
patches over a 4 x 4 grid. Heads of side networks see such a grid, too.

A `readout` task is a linear head on the statistics of the last k layers, or on all statistics and
grids. It is solved by L-BFGS, costs one small product and reads nothing of other tasks. As it is
solved, the head is factorised: it sees the pooled token and a few numbers, to which a *projection*
maps all other statistics. That is a head of low rank, with a fraction of the parameters. Heads of
`masked+readout` and its like see the same behind what is their own, a class token or the vectors of
a side network.

A linear head on features of all layers, chosen by validation, comes from Head2Toe (Evci, Dumoulin,
Larochelle, Mozer, "Head2Toe: Utilizing Intermediate Representations for Better Transfer Learning",
ICML 2022), which pools activations and selects some of them; here all statistics of the chosen
layers are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.backbones.shape import BackboneShape
from engram.errors import EngramError
from engram.methods.head import Head
from engram.methods.method import (
    Features,
    HeadInput,
    Initial,
    Method,
    Needs,
    SharedPassMethod,
    TaskInput,
    TaskShape,
)
from engram.util.settings import setting
from engram.util.tensors import to_device
from engram.vit import ViT
from engram.vit.layers import ViTConfig

_SIDE = 4  # grid cells along a side of the picture
GRID_CELLS = _SIDE**2
#: Which layers are pooled over the grid: one low down, one past the middle, the final tokens.
_HEIGHTS = (0.25, 0.6, 1.0)


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


def grid_layers(depth: int) -> tuple[int, ...]:
    """The layers that are pooled over the grid, the last first; `depth` is the final tokens."""
    return tuple(dict.fromkeys(round(height * depth) for height in reversed(_HEIGHTS)))


def grid_count(depth: int) -> int:
    """Grid cells of all these layers."""
    return GRID_CELLS * len(grid_layers(depth))


def statistics_per_layer(class_token: bool) -> int:
    """Statistics of one layer: a backbone without a class token has two."""
    return 3 if class_token else 2


class LayerStatistics:
    """Collects the layer statistics of one pass; `layer` is called with every layer's tokens.

    With the weights of a `grid` (16, n), as `grid_weights` gives them, it pools those, too.
    """

    def __init__(self, backbone: ViT, grid: Tensor | None) -> None:
        self.config, self._grid = backbone.config, grid
        self._pool = backbone.pool if backbone.config.pooler else None
        self._pooled: list[Tensor] = []  # the pooled token, where statistics do not begin with it
        self.layers: list[Tensor] = []  # (b, statistics, D) each
        self._grids: list[Tensor] = []  # (b, 16, D) each

    @classmethod
    def from_layers(cls, layers: Sequence[Tensor], backbone: ViT, grid: Tensor) -> LayerStatistics:
        """Statistics of the normed tokens (b, n, D) of every layer, and the final ones."""
        statistics = cls(backbone, grid)
        for index, tokens in enumerate(layers):
            statistics.layer(index, tokens)
        return statistics

    def layer(self, index: int, tokens: Tensor) -> None:
        """Add the backbone's normed tokens (b, n, D) of a layer, or the final ones."""
        patches = tokens[:, self.config.prefix :]
        mean = patches.mean(1)
        # torch.std does the same, but more slowly along this axis
        deviation = torch.linalg.vector_norm(patches - mean.unsqueeze(1), dim=1)
        deviation = deviation * patches.shape[1] ** -0.5
        own = [tokens[:, 0]] if self.config.class_token else []
        self.layers.append(torch.stack([*own, mean, deviation], dim=1))
        if self._grid is not None and index in grid_layers(self.config.depth):
            self._grids.append(self._grid.to(tokens) @ tokens)
        if self._pool is not None and index == self.config.depth:
            self._pooled.append(self._pool(tokens).unsqueeze(1))

    def all(self) -> Tensor:
        """Every statistic and grid (b, features): the last layer's first, and all grids behind.

        So those of the last layers are a beginning of all, and begin with the pooled token.
        """
        return torch.cat([*self._pooled, *self.layers[::-1], *self._grids[::-1]], dim=1).flatten(1)


@dataclass(frozen=True)
class WithStatistics(SharedPassMethod):
    """A method whose head sees layer statistics, too, behind what its family gives it.

    A subclass has the method of the family as its second base.
    """

    answers_pixels: ClassVar[bool] = False
    half: ClassVar[frozenset[str]] = frozenset({"projection"})
    #: Whether the family gives the head the pooled token first, as the statistics have it.
    pooled_first: ClassVar[bool] = True

    layers: int = setting(
        0, "layers whose statistics the head sees, the last ones; 0: all", most=10_000, flag=False
    )
    grid: bool = setting(
        False, "whether the head sees a 4 x 4 grid of some layers, too", flag=False
    )
    projected: int = setting(
        0,
        "numbers to which all but the pooled token are projected; 0: they are not",
        most=100_000,
        flag=False,
    )

    @property
    def reads_grid(self) -> bool:
        return self.grid

    def fitted(self, task: TaskShape) -> Method:
        own, steps = super().fitted(task), task.backbone.depth + 1
        assert isinstance(own, WithStatistics)
        return replace(own, layers=min(self.layers or steps, steps))

    def check_task(self, task: TaskShape) -> None:
        super().check_task(task)
        if self.grid and self.layers != task.backbone.depth + 1:
            raise EngramError(
                f"a grid belongs to a head on all {task.backbone.depth + 1} layers, and it reads "
                f"{self.layers}."
            )

    def parameters(self, task: TaskShape) -> dict[str, Initial]:
        own, others = super().parameters(task), self._others(task.backbone)
        if not self.projected:
            return own

        def rounded(value: Tensor, backbone: ViT) -> None:
            value.copy_(value.half())  # as its file will be

        shape = (self.projected, others)
        return {**own, "projection": Initial(shape, std=others**-0.5, then=rounded)}

    def features(self, task: TaskShape) -> int:
        pooled = 0 if self.pooled_first else task.backbone.width
        return super().features(task) + pooled + (self.projected or self._others(task.backbone))

    def _others(self, shape: BackboneShape | ViTConfig) -> int:
        """The numbers of the statistics that it reads, all but the pooled token."""
        count = self.layers * statistics_per_layer(shape.class_token)
        count += grid_count(shape.depth) if self.grid else 0
        return (count + shape.pooler - 1) * shape.width

    def macs(self, task: TaskShape, n: int, ancestors: Sequence[Method]) -> tuple[int, int]:
        macs, once = super().macs(task, n, ancestors)
        shape = task.backbone
        pooling = n * shape.width * grid_count(shape.depth) if self.grid else 0
        return macs + pooling + self.projected * self._others(shape), once

    def details(self) -> list[tuple[str, str]]:
        shown = [row for row in super().details() if row[0] not in WithStatistics.setting_names()]
        grid = ", some also as a 4 x 4 grid" if self.grid else ""
        projected = f", projected to {self.projected} numbers" if self.projected else ""
        return [*shown, ("layers its head sees", f"{self.layers}{grid}{projected}")]

    def head_input(self, task: TaskInput, own: HeadInput, features: Features) -> HeadInput:
        config, seen = features.batch.backbone.config, features.statistics
        assert seen is not None
        seen = seen[:, : config.width + self._others(config)]
        if features.batch.route is not None:
            seen = seen[features.batch.rows(task.name)]
        pooled, others = seen[:, : config.width], seen[:, config.width :]
        if self.projected:
            others = F.linear(others, task.tensors["projection"].to(others))
        first = own.own.mean(1) if own.own.ndim == 3 else own.own
        parts = [first, others] if self.pooled_first else [first, pooled, others]
        return HeadInput(torch.cat(parts, dim=1))

    def mean_weight(self, other: Tensor, readout: Tensor, width: int) -> Tensor:
        """The weight of the head whose output is the mean of these two heads' outputs.

        `other` is that of the family's method alone, and `width` that of the pooled token.
        """
        if not self.pooled_first:
            return torch.cat([other, readout], dim=1) / 2
        pooled = other[:, :width] + readout[:, :width]
        return torch.cat([pooled, other[:, width:], readout[:, width:]], dim=1) / 2

    def average(
        self, tasks: Sequence[Mapping[str, Tensor]], shares: Sequence[float]
    ) -> tuple[Method, dict[str, Tensor]]:
        """The mean, in which projections are stacked: their numbers mean different things."""
        _, mean = super().average(tasks, shares)
        if not self.projected:
            return self, mean
        own = [
            share * task["head.weight"][:, -self.projected :]
            for task, share in zip(tasks, shares, strict=True)
        ]
        mean["head.weight"] = torch.cat([mean["head.weight"][:, : -self.projected], *own], dim=1)
        mean["projection"] = torch.cat([task["projection"] for task in tasks])
        return replace(self, projected=len(mean["projection"])), mean


@dataclass(frozen=True)
class Readout(WithStatistics, Head):
    """A linear head on layer statistics, solved instead of trained."""

    name: ClassVar[str] = "readout"
    about: ClassVar[str] = "a linear head on every layer"
    needs: ClassVar[Needs] = Needs.STATISTICS
