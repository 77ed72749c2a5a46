"""Readout: a linear head on statistics of every layer, not on the last tokens alone.

Of each layer's normed tokens, and of the final ones, there are three *layer statistics*: the class
token, and the mean and the standard deviation of the patches (D numbers each). A backbone without a
class token has two, and its pooled token comes first where it has a pooling of its own. They do not
say where in the picture something is, so some layers have *grid pooling* besides: means of the
patches over a 4 x 4 grid. Heads of side networks see such a grid, too.

A `readout` task is a linear head on the statistics of the last k layers, or on all statistics and
grids. It is solved by L-BFGS, costs one small product and reads nothing of other tasks. As it is
solved, the head is factorised: it sees the pooled token and a few numbers, to which a *projection*
maps all other statistics. That is a head of low rank, with a fraction of the parameters.

A linear head on features of all layers, chosen by validation, comes from Head2Toe (Evci, Dumoulin,
Larochelle, Mozer, "Head2Toe: Utilizing Intermediate Representations for Better Transfer Learning",
ICML 2022), which pools activations and selects some of them; here all statistics of the chosen
layers are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.backbones.shape import BackboneShape
from engram.errors import EngramError
from engram.methods.method import (
    Batch,
    Branch,
    Features,
    HeadInput,
    Initial,
    Joined,
    Method,
    Needs,
    SharedPassMethod,
    TaskInput,
    TaskShape,
)
from engram.methods.method_flags import shared_setting
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


def statistics_count(shape: BackboneShape | ViTConfig, layers: int, grid: bool) -> int:
    """The numbers of the statistics of the last layers, and maybe all grids.

    The pooled token is among them.
    """
    count = layers * statistics_per_layer(shape.class_token)
    count += grid_count(shape.depth) if grid else 0
    return (count + shape.pooler) * shape.width


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
class Readout(SharedPassMethod):
    """A linear head on layer statistics, solved instead of trained."""

    name: ClassVar[str] = "readout"
    about: ClassVar[str] = "a linear head on every layer"
    solved: ClassVar[bool] = True
    answers_pixels: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs.STATISTICS
    rates: ClassVar[Mapping[str, float]] = {"adamw": 3e-3, "sgd": 0.3}

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
    half: ClassVar[frozenset[str]] = frozenset({"projection"})

    @property
    def reads_grid(self) -> bool:
        return self.grid

    def fitted(self, task: TaskShape) -> Method:
        steps = task.backbone.depth + 1
        return replace(self, layers=min(self.layers or steps, steps))

    def check_task(self, task: TaskShape) -> None:
        super().check_task(task)
        if self.grid and self.layers != task.backbone.depth + 1:
            raise EngramError(
                f"a grid belongs to a head on all {task.backbone.depth + 1} layers, and it reads "
                f"{self.layers}."
            )

    def parameters(self, task: TaskShape) -> dict[str, Initial]:
        others = self._statistics(task.backbone) - task.backbone.width
        if not self.projected:
            return {}

        def rounded(value: Tensor, backbone: ViT) -> None:
            value.copy_(value.half())  # as its file will be

        shape = (self.projected, others)
        return {"projection": Initial(shape, std=others**-0.5, then=rounded)}

    def features(self, task: TaskShape) -> int:
        shape = task.backbone
        return shape.width + self.projected if self.projected else self._statistics(shape)

    def _statistics(self, shape: BackboneShape) -> int:
        return statistics_count(shape, self.layers, self.grid)

    def macs(self, task: TaskShape, n: int, ancestors: Sequence[Method]) -> tuple[int, int]:
        shape = task.backbone
        pooling = n * shape.width * grid_count(shape.depth) if self.grid else 0
        return pooling + self.projected * (self._statistics(shape) - shape.width), 0

    def details(self) -> list[tuple[str, str]]:
        grid = ", some also as a 4 x 4 grid" if self.grid else ""
        projected = f", projected to {self.projected} numbers" if self.projected else ""
        return [("layers its head sees", f"{self.layers}{grid}{projected}")]

    def average(
        self, tasks: Sequence[Mapping[str, Tensor]], shares: Sequence[float]
    ) -> tuple[Method, dict[str, Tensor]]:
        _, mean = super().average(tasks, shares)
        projected, tensors = stack_projections(mean, tasks, shares)
        return replace(self, projected=projected), tensors

    @classmethod
    def join(cls, tasks: Sequence[TaskInput], backbone: ViT) -> Joined:
        return partial(ReadoutBranch, tasks)


@dataclass(frozen=True)
class WithReadout(SharedPassMethod):
    """A method and a readout as one: its head sees what both heads see, the readout's behind.

    `auto` makes such a task of two that it has trained and solved. Its output is the mean of
    theirs, which is again linear. A subclass has the other method as its second base.
    """

    composed: ClassVar[bool] = True
    answers_pixels: ClassVar[bool] = False
    half: ClassVar[frozenset[str]] = Readout.half
    #: Whether the other head sees the pooled token first, as a readout's does: it is there once.
    pooled_first: ClassVar[bool] = False

    layers: int = shared_setting("layers", Readout)
    grid: bool = shared_setting("grid", Readout)
    projected: int = shared_setting("projected", Readout)

    @property
    def reads_grid(self) -> bool:
        return self.grid

    @property
    def readout(self) -> Readout:
        return Readout(self.layers, self.grid, self.projected)

    def parameters(self, task: TaskShape) -> dict[str, Initial]:
        return super().parameters(task) | self.readout.parameters(task)

    def fitted(self, task: TaskShape) -> Method:
        return replace(super().fitted(task), **self.readout.fitted(task).settings())

    def check_task(self, task: TaskShape) -> None:
        super().check_task(task)
        self.readout.check_task(replace(task, parents=0))

    def features(self, task: TaskShape) -> int:
        twice = task.backbone.width if self.pooled_first else 0
        return super().features(task) + self.readout.features(task) - twice

    def macs(self, task: TaskShape, n: int, ancestors: Sequence[Method]) -> tuple[int, int]:
        macs, once = super().macs(task, n, ancestors)
        return macs + self.readout.macs(task, n, ())[0], once

    def details(self) -> list[tuple[str, str]]:
        shown = super().details()
        own = [row for row in shown if row[0] not in Readout.setting_names()]
        return [*own, *self.readout.details()]

    def head_input(self, task: TaskInput, own: HeadInput, features: Features) -> HeadInput:
        read = read_statistics(task, features)
        if features.batch.route is not None:
            read = read[features.batch.rows(task.name)]
        vector = own.own.mean(1) if own.own.ndim == 3 else own.own
        twice = features.batch.backbone.config.width if self.pooled_first else 0
        return HeadInput(torch.cat([vector, read[:, twice:].to(vector)], dim=1))

    def mean_weight(self, other: Tensor, readout: Tensor, width: int) -> Tensor:
        """The weight of the head whose output is the mean of these two heads' outputs.

        `width` is that of the pooled token.
        """
        if not self.pooled_first:
            return torch.cat([other, readout], dim=1) / 2
        pooled = other[:, :width] + readout[:, :width]
        return torch.cat([pooled, other[:, width:], readout[:, width:]], dim=1) / 2

    def average(
        self, tasks: Sequence[Mapping[str, Tensor]], shares: Sequence[float]
    ) -> tuple[Method, dict[str, Tensor]]:
        _, mean = super().average(tasks, shares)
        projected, tensors = stack_projections(mean, tasks, shares)
        return replace(self, projected=projected), tensors


def read_statistics(task: TaskInput, features: Features) -> Tensor:
    """The input of a readout's head (b, features): statistics, or what they are projected to."""
    method, statistics = task.method, features.statistics
    assert isinstance(method, (Readout, WithReadout))
    assert statistics is not None
    config = features.batch.backbone.config
    seen = statistics[:, : statistics_count(config, method.layers, method.grid)]
    if not method.projected:
        return seen
    projection = task.tensors["projection"]
    pooled, others = seen.tensor_split([seen.shape[1] - projection.shape[1]], dim=1)
    return torch.cat([pooled, F.linear(others, projection.to(others))], dim=1)


def stack_projections(
    mean: Mapping[str, Tensor], tasks: Sequence[Mapping[str, Tensor]], shares: Sequence[float]
) -> tuple[int, dict[str, Tensor]]:
    """The mean of tasks, in which projections are stacked: their numbers mean different things.

    The projected numbers are the last that a head sees.
    """
    if "projection" not in mean:
        return 0, dict(mean)
    projection = torch.cat([task["projection"] for task in tasks])
    own = [
        share * task["head.weight"][:, -len(task["projection"]) :]
        for task, share in zip(tasks, shares, strict=True)
    ]
    others = mean["head.weight"][:, : -own[0].shape[1]]
    weight = torch.cat([others, *own], dim=1)
    return len(projection), {**mean, "projection": projection, "head.weight": weight}


class ReadoutBranch(Branch):
    """The statistics of the pass, as many layers as each task reads."""

    def __init__(self, tasks: Sequence[TaskInput], batch: Batch) -> None:
        self.tasks = tasks

    def head_inputs(self, features: Features) -> dict[str, HeadInput]:
        return {task.name: HeadInput(read_statistics(task, features)) for task in self.tasks}
