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

    r rank   m cells

The tasks of a pass share each product: no loop over tasks. A routed pass computes pairs of a task
and an image that asked for it, or for a task that extends it: h is (pairs, 1, n, r) then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.errors import EngramError
from engram.methods.attention_maps import AttentionMaps, pooling_maps
from engram.methods.forward import run
from engram.methods.memory import spans
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
from engram.methods.readout import GRID_CELLS, WithStatistics, grid_weights
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
        return partial(SideBranch, tasks, _groups(tasks))

    def attention_maps(
        self, tasks: Sequence[TaskInput], task: TaskInput, backbone: ViT, pixels: Tensor
    ) -> AttentionMaps:
        """Maps of the pooling queries; in segmentation, of the backbone's class token."""
        if task.per_pixel:
            return super().attention_maps(tasks, task, backbone, pixels)
        batch = Batch(backbone, (pixels.shape[-2], pixels.shape[-1]), pixels.device)
        branch = SideBranch(tasks, _groups(tasks), batch)
        run(batch, backbone.embed(pixels), [branch], None)
        return pooling_maps(branch.pooling(task.name), branch.vectors(task.name), backbone, pixels)


@dataclass(frozen=True)
class SideReadout(WithStatistics, Side):
    """A side task and a readout as one, which see one pooled token."""

    name: ClassVar[str] = "side+readout"
    about: ClassVar[str] = "side network + cells + a head on every layer"
    composed: ClassVar[bool] = True
    needs: ClassVar[Needs] = Needs.LAYERS | Needs.FINAL | Needs.STATISTICS


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
        #: Who extends whom: child and parent, and the maps of every step (extensions, r, r).
        self.extensions = [(task.name, parent) for task in tasks for parent in task.extends]
        maps = [one for task in tasks for one in task.tensors.get("side.parents", ())]
        self.parents = torch.stack(maps, 1).unbind() if maps else ()
        children = [self.names.index(child) for child, _ in self.extensions]
        self.children = to_device(torch.tensor(children, dtype=torch.long), project.device)

    def step(
        self, step: int, h: Tensor, x: Tensor, inherited: Tensor | None, route: _GroupRoute | None
    ) -> Tensor:
        """One step of h (t, b, n, r) beside the backbone's normed tokens x (b, n, D)."""
        t, b, n, r = h.shape
        if route is None:
            h = h + (x @ self.project[step]).view(b, n, t, r).permute(2, 0, 1, 3)
        else:
            project = self.project[step].view(-1, len(self.names), r).transpose(0, 1)
            h = h + (x[route.images] @ project[route.tasks]).unsqueeze(1)
        if inherited is not None:
            h = h + inherited
        few = t  # a training step keeps everything, and a traced graph has no chunks
        if h.is_cpu and not h.requires_grad and not torch.compiler.is_compiling():
            few = max(_CHUNK // (b * n * r), 1)
        tasks = None if route is None else route.tasks
        if few >= t:
            return self._attend_and_mlp(step, h, tasks)
        # Few tasks at a time, so that a processor's cache holds what is made of them on the way.
        chunks = [slice(i, i + few) for i in range(0, t, few)]
        done = [
            self._attend_and_mlp(step, h[chunk], chunk if tasks is None else tasks[chunk])
            for chunk in chunks
        ]
        return torch.cat(done)

    def _attend_and_mlp(self, step: int, h: Tensor, tasks: slice | Tensor | None) -> Tensor:
        def weights(maps: Sequence[Tensor]) -> Tensor:
            return maps[step] if tasks is None else maps[step][tasks]

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

    def pooling(self, h: Tensor, route: _GroupRoute | None) -> Tensor:
        """The weight of every vector of h (t, b, n, r) in each query: (t, b, queries, n)."""
        assert self.queries is not None
        queries = self.queries if route is None else self.queries[route.tasks]
        weights: Tensor = (h @ queries.unsqueeze(1)).softmax(2)
        return weights.mT

    def pool(self, h: Tensor, grid: Tensor, route: _GroupRoute | None) -> Tensor:
        """The head's features of h (t, b, n, r), with a grid (16, n): (t, b, 24 r)."""
        pooled = _norm((self.pooling(h, route) @ h).flatten(2))
        return torch.cat([pooled, _GRID_SCALE * _norm((grid.to(h) @ h).flatten(2))], dim=2)


def _norm(h: Tensor) -> Tensor:
    return F.layer_norm(h, h.shape[-1:])


def _groups(tasks: Sequence[TaskInput]) -> list[_SideGroup]:
    """Tasks in groups of one shape."""
    shapes: dict[object, list[TaskInput]] = {}
    for task in tasks:
        shape = (*task.tensors["cells"].shape[1:], "side.queries" in task.tensors)
        shapes.setdefault(shape, []).append(task)
    return [
        _SideGroup(alike[i : i + _GROUP])
        for alike in shapes.values()
        for i in range(0, len(alike), _GROUP)
    ]


class _GroupRoute:
    """The pairs of a task of a group and an image that a routed pass computes, task by task.

    `images` are those that each task is computed for, for itself or for its children, and `asked`
    those that asked for it.
    """

    def __init__(
        self,
        group: _SideGroup,
        images: Mapping[str, Sequence[int]],
        asked: Mapping[str, Sequence[int]],
    ) -> None:
        device = group.project[0].device

        def index(numbers: Iterable[int]) -> Tensor:
            return to_device(torch.tensor([*numbers], dtype=torch.long), device)

        names = group.names
        rows = dict(zip(names, spans([len(images[name]) for name in names]), strict=True))
        self.rows = {name: slice(own.start, own.stop) for name, own in rows.items()}
        self.tasks = index(i for i, name in enumerate(names) for _ in images[name])
        self.images = index(image for name in names for image in images[name])
        #: By task: the pairs, among its own, of the images that asked.
        self.asked = {n: index(map(images[n].index, asked[n])) for n in names if n in asked}
        inherits = [(i, *pair) for i, pair in enumerate(group.extensions) if images[pair[0]]]
        #: Parents, and where each has the child's images among its own pairs.
        self.parents = [
            (parent, index(map(images[parent].index, images[child])))
            for _, child, parent in inherits
        ]
        #: Of all these, one after the other: the child's pairs, and which extension it is.
        self.children = index(row for _, child, _ in inherits for row in rows[child])
        self.extensions = index(i for i, child, _ in inherits for _ in images[child])


class SideBranch(Branch):
    """The vectors of all side tasks in one pass."""

    def __init__(
        self, tasks: Sequence[TaskInput], groups: Sequence[_SideGroup], batch: Batch
    ) -> None:
        self.tasks, self.groups = tasks, groups
        self.routes: Sequence[_GroupRoute | None] = [None] * len(groups)
        if batch.route is not None:
            asked = batch.route.rows
            wanted = {task.name: {*asked.get(task.name, ())} for task in tasks}
            for task in reversed(tasks):
                for parent in task.extends:
                    wanted[parent] |= wanted[task.name]
            images = {name: sorted(own) for name, own in wanted.items()}
            self.groups = [one for one in groups if any(images[name] for name in one.names)]
            self.routes = [_GroupRoute(group, images, asked) for group in self.groups]
        self.grid = grid_weights(batch.backbone, batch.size, batch.device)
        self.h: list[Tensor] = []  # by group: (t, b, n, r)
        self._places = {
            name: (g, i) for g, one in enumerate(self.groups) for i, name in enumerate(one.names)
        }

    def layer(self, index: int, tokens: Tensor) -> None:
        b, n, _ = tokens.shape
        pairs = list(zip(self.groups, self.routes, strict=True))
        if not index:
            shapes = [(len(g.names), b) if r is None else (len(r.tasks), 1) for g, r in pairs]
            ranks = [group.rank for group in self.groups]
            self.h = [
                tokens.new_zeros(*shape, n, rank) for shape, rank in zip(shapes, ranks, strict=True)
            ]
        inherited = [self._inherited(g, index) for g in range(len(self.groups))]
        self.h = [
            group.step(index, h, tokens, more, route)
            for (group, route), h, more in zip(pairs, self.h, inherited, strict=True)
        ]

    def _inherited(self, g: int, step: int) -> Tensor | None:
        """Parents' vectors, mapped for the tasks of a group: (t, b, n, r)."""
        group, route, h = self.groups[g], self.routes[g], self.h[g]
        if not (group.extensions if route is None else route.parents) or not step:
            return None  # the first vectors are zero
        if route is None:
            rows = torch.stack([self.vectors(parent) for _, parent in group.extensions])
            maps, children = group.parents[step], group.children
        else:
            own = [self.vectors(parent)[pairs] for parent, pairs in route.parents]
            rows, maps = torch.cat(own).unsqueeze(1), group.parents[step][route.extensions]
            children = route.children
        read = (rows.flatten(1, 2) @ maps).view_as(rows)
        return torch.zeros_like(h).index_add(0, children, read.to(h.dtype))

    def _own(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """One task's part of what its group has: (b, …)."""
        g, i = self._places[name]
        route = self.routes[g]
        return parts[g][i] if route is None else parts[g][route.rows[name], 0]

    def vectors(self, name: str) -> Tensor:
        """The vectors of one task: (b, n, r)."""
        return self._own(name, self.h)

    def pooling(self, name: str) -> Tensor:
        """The weights by which one task pools its vectors at the end: (b, queries, n)."""
        group, place = self._places[name]
        return self.groups[group].pooling(self.h[group], None)[place]

    def head_inputs(self, features: Features) -> dict[str, HeadInput]:
        pooled = [
            h if group.queries is None else group.pool(h, self.grid, route)
            for group, h, route in zip(self.groups, self.h, self.routes, strict=True)
        ]
        inputs = {}
        for task in self.tasks:
            if self.asked is not None and task.name not in self.asked:
                continue  # computed for a child alone
            rows: slice | Tensor = slice(None)  # of the images that asked: in the batch,
            own: slice | Tensor = slice(None)  # and among those that it was computed for
            route = self.routes[self._places[task.name][0]]
            if route is not None:
                rows, own = features.batch.rows(task.name), route.asked[task.name]
            pooled_token = features.pooled[rows]
            if task.per_pixel:
                patches = features.patches
                vectors = _norm(self.vectors(task.name)[own])[:, -patches.tokens.shape[1] :]
                tokens = torch.cat([patches.tokens[rows], vectors], dim=-1)
                inputs[task.name] = HeadInput(pooled_token, replace(patches, tokens=tokens))
            else:
                numbers = self._own(task.name, pooled)[own]
                inputs[task.name] = HeadInput(torch.cat([pooled_token, numbers], dim=-1))
        return inputs
