"""Columns of all layer statistics that a solved head may read of an image, and their scales."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engram.methods import Readout
from engram.methods.method import Needs
from engram.methods.readout import grid_count, statistics_per_layer
from engram.tasks.task import Task
from engram.train.heads.dual_solver import Block
from engram.vit import ViT

_GRID_SCALE = 0.5  # times alpha: a layer has sixteen grid cells and three statistics

#: What a head reads: the statistics of a readout; None: the pooled token, as a plain linear head.
Reads = Readout | None


def whole_readout(backbone: ViT) -> Readout:
    """The readout of all layers, the final tokens and the grid."""
    return Readout(backbone.config.depth + 1, grid=True)


@dataclass(frozen=True)
class Columns:
    """Places of the statistics: the pooled token, the layers from the last to the first, grids."""

    width: int  # of the pooled token
    layers: int = 0  # the final tokens among them; 0: the pooled token is all there is
    per_layer: int = 0
    layers_end: int = 0  # behind all layers, from here on, are the grids
    grid: int = 0

    @classmethod
    def for_task(cls, task: Task, backbone: ViT) -> Columns:
        """Columns of the head input of a task: a readout of everything, or the pooled token."""
        if Needs.STATISTICS not in task.method.needs:
            return cls(task.head.in_features)
        config = backbone.config
        layers, width = config.depth + 1, config.width
        per_layer = statistics_per_layer(config.class_token) * width
        end = layers * per_layer + config.pooler * width
        return cls(width, layers, per_layer, end, grid_count(config.depth) * width)

    @property
    def all(self) -> int:
        return max(self.width, self.layers_end + self.grid)

    @property
    def choices(self) -> tuple[Reads, ...]:
        """Inputs to try: a third of the layers, and all of them with the grid."""
        if not self.layers:
            return (None,)
        return Readout(-(-self.layers // 3)), Readout(self.layers, grid=True)

    def count(self, reads: Reads) -> int:
        """The columns that a head reads, which are the first."""
        if reads is None:
            return self.width
        end = self.layers_end - (self.layers - reads.layers) * self.per_layer
        return end + reads.grid * self.grid

    def blocks(self, reads: Reads, alpha: float) -> list[Block]:
        """Blocks of the standardised features, with their scales: the pooled token has 1."""
        found = [(0, self.width, 1.0)]
        if reads is not None:
            found.append((self.width, self.count(replace(reads, grid=False)), alpha))
            if reads.grid:
                found.append((self.layers_end, self.all, alpha * _GRID_SCALE))
        return found
