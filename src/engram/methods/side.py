"""The side network: a thin network of a task's own that reads the backbone at every layer.

A masked task reads the frozen backbone with one token, through the backbone's own projections. A
*side* task has a vector of r numbers for every token of the backbone, h (n, r), which starts at
zero. At every layer it takes in the backbone's normed tokens x, reads its own memory cells and the
mean of its vectors, and passes an MLP:

    h += x P                                   P (D, r): a projection of its own at every layer
    h += 0.3 attention(y, mean(y) and cells)   y = norm(h), cells normed; one head, four maps (r, r)
    h += 0.3 mlp(norm(h))                      of width 2 r

and once more after the last layer, with the backbone's final normed tokens. Then h is pooled twice:
by eight learned queries, which find what is there wherever it is, and over a 4 x 4 grid, which
keeps where it is. The head sees these 24 r numbers beside the backbone's pooled token. In
segmentation it sees the vector of every patch instead. Nothing of this reaches the backbone or
another task, and no gradient passes through the backbone: the idea is that of ladder side-tuning
(Sung, Cho, Bansal, "LST: Ladder Side-Tuning for Parameter and Memory Efficient Transfer Learning",
NeurIPS 2022), whose side network is a small transformer with gated connections at every layer.

A task that extends others takes in their vectors, as they were before the layer, by a map (r, r).

Axes, beside those of method.py, with one step more than layers:

    r rank   m cells   p parents   c images that one task is computed for

The tasks of a pass share each product: no loop over tasks. In a routed pass a task is computed only
for the images that asked for it, or for one that extends it; b is c then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.errors import EngramError
from engram.methods.attention_maps import AttentionMaps, pooling_maps
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
from engram.methods.readout import GRID_CELLS, Projections, Readout, grid_weights, stack_projections
from engram.methods.routing import Route
from engram.util.tensors import to_device
from engram.vit import ViT

QUERIES = 8
_RESIDUAL_SCALE = 0.3  # of attention and MLP, so that h stays near to what it took in
_GRID_SCALE = 0.5  # of the grid in the head: at 1, small sets of photographs overfit
_GROUP = 128  # tasks of a group at most: more do not make its products faster
_CHUNK = 2**17  # numbers of h that are worked on at once, which is half a megabyte


@dataclass(frozen=True)
class Side(SharedPassMethod):
    """A side network, its cells and a head."""

    name: ClassVar[str] = "side"
    about: ClassVar[str] = "side network + cells + head"
    extendable: ClassVar[bool] = True
    routes: ClassVar[bool] = True
    needs: ClassVar[Needs] = Needs.LAYERS | Needs.FINAL
    rates: ClassVar[Mapping[str, float]] = {"adamw": 3e-3, "sgd": 0.1}

    cells: int = shared_setting("cells")
    rank: int = shared_setting("rank")

    @classmethod
    def family(cls) -> type[Method]:
        return Side

    def check_parent(self, parent: Method) -> None:
        super().check_parent(parent)
        assert isinstance(parent, Side)
        if self.rank != parent.rank:
            raise EngramError(
                f"its side network has the rank {self.rank} and that of the other {parent.rank}; "
                f"choose rank {parent.rank}"
            )

    def parameters(self, task: TaskShape) -> dict[str, Initial]:
        """Maps keep the size of what they map; those of `parents` start at zero."""
        steps, width, rank = task.backbone.depth + 1, task.backbone.width, self.rank
        parameters = {
            "cells": Initial((steps, self.cells, rank), std=1.0),
            "side.project": Initial((steps, width, rank), std=width**-0.5),
            # query, key, value, output
            "side.attention": Initial((steps, 4, rank, rank), std=rank**-0.5),
            "side.up": Initial((steps, rank, 2 * rank), std=rank**-0.5),
            "side.down": Initial((steps, 2 * rank, rank), std=(2 * rank) ** -0.5),
        }
        if not task.per_pixel:
            parameters["side.queries"] = Initial((QUERIES, rank), std=1.0)
        if task.parents:
            parameters["side.parents"] = Initial((task.parents, steps, rank, rank))
        return parameters

    def features(self, task: TaskShape) -> int:
        pooled = 1 if task.per_pixel else QUERIES + GRID_CELLS
        return task.backbone.width + pooled * self.rank

    def macs(self, task: TaskShape, n: int, ancestors: Sequence[Method]) -> tuple[int, int]:
        """One step a layer, and one for the final tokens."""
        r, steps = self.rank, task.backbone.depth + 1
        project, mlp = n * task.backbone.width * r, 4 * n * r**2
        attention = n * (1 + 2 * self.cells) * r + 2 * r**2  # the mean has a key and a value
        once = 2 * r**3 + 2 * self.cells * r**2  # four maps into two, and the cells'
        pool = 0 if task.per_pixel else n * (2 * QUERIES + GRID_CELLS) * r
        parents = task.parents * n * r**2 * task.backbone.depth  # their first vectors are zero
        return steps * (project + attention + mlp) + parents + pool, steps * once

    @classmethod
    def join(cls, tasks: Sequence[TaskInput], backbone: ViT) -> Joined:
        return SideNetworks(tasks)

    def attention_maps(
        self, tasks: Sequence[TaskInput], task: TaskInput, backbone: ViT, pixels: Tensor
    ) -> AttentionMaps:
        """Maps of the pooling queries; in segmentation, of the backbone's class token."""
        if task.per_pixel:
            return super().attention_maps(tasks, task, backbone, pixels)
        size = (pixels.shape[-2], pixels.shape[-1])
        branch = SideNetworks(tasks)(Batch(backbone, size, pixels.device))
        raw = backbone.encode(backbone.embed(pixels), size, branch.layer)
        branch.layer(backbone.config.depth, backbone.norm(raw))
        return pooling_maps(branch.pooling(task.name), branch.vectors(task.name), backbone, pixels)


@dataclass(frozen=True)
class SideReadout(Side):
    """A side task and a readout as one: `auto` averages them, and the mean is again linear."""

    name: ClassVar[str] = "side+readout"
    about: ClassVar[str] = "side network + cells + a head on every layer"
    composed: ClassVar[bool] = True
    answers_pixels: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs.LAYERS | Needs.FINAL | Needs.STATISTICS

    layers: int = shared_setting("layers", Readout)
    grid: bool = shared_setting("grid", Readout)
    projected: int = shared_setting("projected", Readout)
    half: ClassVar[frozenset[str]] = Readout.half

    @property
    def reads_grid(self) -> bool:
        return self.grid

    @property
    def readout(self) -> Readout:
        return Readout(self.layers, self.grid, self.projected)

    def parameters(self, task: TaskShape) -> dict[str, Initial]:
        return super().parameters(task) | self.readout.parameters(task)

    def fitted(self, task: TaskShape) -> Method:
        readout = self.readout.fitted(task)
        return replace(self, **readout.settings())

    def check_task(self, task: TaskShape) -> None:
        super().check_task(task)
        self.readout.check_task(replace(task, parents=0))

    def features(self, task: TaskShape) -> int:
        own = super().features(task) - task.backbone.width
        return own + self.readout.features(task)

    def macs(self, task: TaskShape, n: int, ancestors: Sequence[Method]) -> tuple[int, int]:
        macs, once = super().macs(task, n, ancestors)
        return macs + self.readout.macs(task, n, ())[0], once

    def details(self) -> list[tuple[str, str]]:
        return [*Side(self.cells, self.rank).details(), *self.readout.details()]

    def average(
        self, tasks: Sequence[Mapping[str, Tensor]], shares: Sequence[float]
    ) -> tuple[Method, dict[str, Tensor]]:
        _, mean = super().average(tasks, shares)
        behind = (QUERIES + GRID_CELLS) * self.rank
        projected, tensors = stack_projections(mean, tasks, shares, behind)
        return replace(self, projected=projected), tensors


class _SideGroup:
    """The tasks of one shape, with their weights stacked."""

    def __init__(self, tasks: Sequence[TaskInput]) -> None:
        def stacked(name: str, dim: int = 1) -> Tensor:
            return torch.stack([task.tensors[f"side.{name}"] for task in tasks], dim)

        self.names = [task.name for task in tasks]
        project = stacked("project", 2)  # (steps, D, t, r)
        self.rank = project.shape[-1]
        # By step, so that a graph that is traced has them as constants and slices nothing.
        self.project = project.flatten(2).unbind()
        query, key, value, output = stacked("attention").unbind(2)  # each (steps, t, r, r)
        # With one head, two maps do the work of four: (y Q)(y K)' = (y Q K') y', and so on.
        qk, vo = query @ key.mT * self.rank**-0.5, value @ output * _RESIDUAL_SCALE
        cells = _norm(torch.stack([task.tensors["cells"] for task in tasks], 1))  # (steps, t, m, r)
        self.qk, self.vo = qk.mT.unbind(), vo.unbind()
        # Cells are the same for all images, and so are their keys and values.
        self.keys, self.values = (cells @ qk.mT).unbind(), (cells @ vo).unbind()
        self.up = stacked("up").unbind()
        self.down = (stacked("down") * _RESIDUAL_SCALE).unbind()
        self.queries: Tensor | None = None
        if "side.queries" in tasks[0].tensors:
            self.queries = stacked("queries", 0).mT * self.rank**-0.5  # (t, r, queries)
        # Who extends whom: places of the children, the pairs' maps of every step (pairs, r, r).
        self.pairs: list[tuple[str, str]] = []  # child and parent
        children: list[int] = []
        maps: list[Tensor] = []
        for i, task in enumerate(tasks):
            for j, parent in enumerate(task.extends):
                children.append(i)
                self.pairs.append((task.name, parent))
                maps.append(task.tensors["side.parents"][j])
        if maps:
            self.children = to_device(torch.tensor(children), maps[0].device)
            self.parents = torch.stack(maps, 1).unbind()

    def step(
        self, step: int, h: Tensor, x: Tensor, inherited: Tensor | None, images: Tensor | None
    ) -> Tensor:
        """One step of h (t, b, n, r) beside the backbone's normed tokens x (b, n, D).

        With `images` (t, c), each task has its own of these images.
        """
        t, b, n, r = h.shape
        if images is None:
            h = h + (x @ self.project[step]).view(b, n, t, r).permute(2, 0, 1, 3)
        else:
            project = self.project[step].view(-1, t, r).transpose(0, 1)
            h = h + (x[images].flatten(1, 2) @ project).view_as(h)
        if inherited is not None:
            h = h + inherited
        few = t  # a training step keeps everything, and a traced graph has no chunks
        if h.is_cpu and not h.requires_grad and not torch.compiler.is_compiling():
            few = max(_CHUNK // h[0].numel(), 1)
        if few >= t:
            return self._attend_and_mlp(step, h)
        # Few tasks at a time, so that a processor's cache holds what is made of them on the way.
        chunks = [slice(i, i + few) for i in range(0, t, few)]
        return torch.cat([self._attend_and_mlp(step, h[chunk], chunk) for chunk in chunks])

    def _attend_and_mlp(self, step: int, h: Tensor, chunk: slice | None = None) -> Tensor:
        def weights(maps: Sequence[Tensor]) -> Tensor:
            return maps[step] if chunk is None else maps[step][chunk]

        h = h + self._attend(_norm(h), *map(weights, (self.qk, self.vo, self.keys, self.values)))
        hidden = F.gelu(_norm(h).flatten(1, 2) @ weights(self.up))
        return torch.baddbmm(h.flatten(1, 2), hidden, weights(self.down)).view_as(h)

    def _attend(self, y: Tensor, qk: Tensor, vo: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of normed vectors y (t, b, n, r) over their mean and the cells: (t, b, n, r).

        Scores have the n vectors last, not the few that are read: a softmax over six neighbours is
        slow.
        """
        t, b, n, _ = y.shape
        mean, rows = y.mean(2), y.flatten(1, 2).mT  # (t, b, r), (t, r, b n)
        key, value = (mean @ qk).unsqueeze(2), (mean @ vo).unsqueeze(2)  # (t, b, 1, r)
        of_mean = (key @ y.mT).view(t, 1, b * n)
        weights = torch.cat([of_mean, keys @ rows], dim=1).softmax(1)  # (t, 1 + m, b n)
        read = (weights[:, 1:].mT @ values).view_as(y)
        return read + weights[:, 0].view(t, b, n, 1) * value

    def pooling(self, h: Tensor) -> Tensor:
        """The weight of every vector of h (t, b, n, r) in each query: (t, b, queries, n)."""
        assert self.queries is not None
        weights: Tensor = (h @ self.queries.unsqueeze(1)).softmax(2)
        return weights.mT

    def pool(self, h: Tensor, grid: Tensor) -> Tensor:
        """The head's features of h (t, b, n, r), with a grid (16, n): (t, b, 24 r)."""
        pooled = _norm((self.pooling(h) @ h).flatten(2))
        return torch.cat([pooled, _GRID_SCALE * _norm((grid.to(h) @ h).flatten(2))], dim=2)


def _norm(h: Tensor) -> Tensor:
    return F.layer_norm(h, h.shape[-1:])


class SideNetworks:
    """The side networks of a pass, parents before children, in groups of one shape."""

    def __init__(self, tasks: Sequence[TaskInput]) -> None:
        self.tasks = tasks
        shapes: dict[object, list[TaskInput]] = {}
        for task in tasks:
            shape = (*task.tensors["cells"].shape[1:], "side.queries" in task.tensors)
            shapes.setdefault(shape, []).append(task)
        both = [(t, t.method.readout) for t in tasks if isinstance(t.method, SideReadout)]
        self.projections = Projections(both) if both else None
        self.groups = [
            _SideGroup(alike[i : i + _GROUP])
            for alike in shapes.values()
            for i in range(0, len(alike), _GROUP)
        ]

    def __call__(self, batch: Batch) -> SideBranch:
        if batch.route is None:
            return SideBranch(self, batch)
        wanted = {name for name, images in batch.route.rows.items() if images}
        for task in reversed(self.tasks):
            if task.name in wanted:
                wanted.update(task.extends)
        asked = [task for task in self.tasks if task.name in wanted]
        return SideBranch(self if len(asked) == len(self.tasks) else SideNetworks(asked), batch)


class _RouteIndex:
    """Indices of the images of a routed pass."""

    def __init__(self, networks: SideNetworks, route: Route) -> None:
        device = networks.groups[0].project[0].device
        parents = {task.name: task.extends for task in networks.tasks}

        def index(places: object) -> Tensor:
            return to_device(torch.tensor(places), device)

        # By task, the images that it is computed for: those of its children, too.
        computed: dict[str, dict[int, int]] = {name: {} for name in parents}
        for name in reversed(list(parents)):
            wanted = {*computed[name], *route.rows.get(name, ())}
            computed[name] = {image: i for i, image in enumerate(sorted(wanted))}
            for parent in parents[name]:
                computed[parent].update(dict.fromkeys(wanted, 0))
        tables: dict[str, list[int]] = {}  # the last image again where a task has fewer
        for group in networks.groups:
            most = max(len(computed[name]) for name in group.names)
            for name in group.names:
                own = list(computed[name])
                tables[name] = own + own[-1:] * (most - len(own))
        #: By group: the images of its tasks, (t, c).
        self.images = [index([tables[name] for name in group.names]) for group in networks.groups]
        #: By group, for every child and parent: where the parent has the child's images, (c).
        self.in_parent = [
            [index([computed[parent][i] for i in tables[child]]) for child, parent in group.pairs]
            for group in networks.groups
        ]
        self.asked = {
            name: index([computed[name][i] for i in images])
            for name, images in route.rows.items()
            if name in computed
        }


class SideBranch(Branch):
    """The vectors of all side tasks in one pass."""

    def __init__(self, networks: SideNetworks, batch: Batch) -> None:
        self.tasks, self.groups = networks.tasks, networks.groups
        self.projections = networks.projections
        self.grid = grid_weights(batch.backbone, batch.size, batch.device)
        self.index = None if batch.route is None else _RouteIndex(networks, batch.route)
        self.routed = batch.route is not None
        self.h: list[Tensor] = []  # by group: (t, b, n, r)
        self._places = {
            name: (g, i)
            for g, group in enumerate(self.groups)
            for i, name in enumerate(group.names)
        }

    def layer(self, index: int, tokens: Tensor) -> None:
        b, n, _ = tokens.shape
        images = [None] * len(self.groups) if self.index is None else self.index.images
        if not index:
            counts = [b if own is None else own.shape[1] for own in images]
            self.h = [
                tokens.new_zeros(len(group.names), count, n, group.rank)
                for group, count in zip(self.groups, counts, strict=True)
            ]
        inherited = [self._inherited(g, index) for g in range(len(self.groups))]
        self.h = [
            group.step(index, h, tokens, more, own)
            for group, h, more, own in zip(self.groups, self.h, inherited, images, strict=True)
        ]

    def _inherited(self, g: int, step: int) -> Tensor | None:
        """Parents' vectors, mapped for the tasks of a group: (t, b, n, r)."""
        group = self.groups[g]
        if not group.pairs or not step:  # the first vectors are zero
            return None
        parents = [self.vectors(parent) for _, parent in group.pairs]
        if self.index is not None:
            places = self.index.in_parent[g]
            parents = [rows[images] for rows, images in zip(parents, places, strict=True)]
        rows = torch.stack(parents)  # (pairs, b, n, r)
        read = (rows.flatten(1, 2) @ group.parents[step]).view_as(rows)
        own = self.h[g]
        return torch.zeros_like(own).index_add(0, group.children, read.to(own.dtype))

    def vectors(self, name: str) -> Tensor:
        """The vectors of one task: (b, n, r)."""
        group, place = self._places[name]
        return self.h[group][place]

    def pooling(self, name: str) -> Tensor:
        """The weights by which one task pools its vectors at the end: (b, queries, n)."""
        group, place = self._places[name]
        return self.groups[group].pooling(self.h[group])[place]

    def head_inputs(self, features: Features) -> dict[str, HeadInput]:
        pooled: dict[str, Tensor] = {}
        for group, h in zip(self.groups, self.h, strict=True):
            if group.queries is not None:
                pooled.update(zip(group.names, group.pool(h, self.grid), strict=True))
        read: dict[str, Tensor] = {}
        if self.projections is not None and features.statistics is not None:  # else none is asked
            read = self.projections(features.statistics)
        inputs = {}
        for task in self.tasks:
            if self.asked is not None and task.name not in self.asked:
                continue  # computed for a child alone
            rows: slice | Tensor = slice(None)  # of the images that asked: in the batch,
            own: slice | Tensor = slice(None)  # and among those that it was computed for
            if self.index is not None:
                rows, own = features.batch.rows(task.name), self.index.asked[task.name]
            seen = read.get(task.name, features.pooled)
            if task.per_pixel:
                patches = features.patches
                vectors = _norm(self.vectors(task.name)[own])[:, -patches.tokens.shape[1] :]
                tokens = torch.cat([patches.tokens[rows], vectors], dim=-1)
                inputs[task.name] = HeadInput(seen[rows], replace(patches, tokens=tokens))
                continue
            own_features = torch.cat([seen[rows], pooled[task.name][own]], dim=-1)
            inputs[task.name] = HeadInput(own_features)
        return inputs
