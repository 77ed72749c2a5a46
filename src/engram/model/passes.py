"""The passes of a model: which tasks join, and the head inputs that a pass leaves them with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram.methods.forward import run, run_cached
from engram.methods.method import (
    Batch,
    Branch,
    Cached,
    Features,
    HeadInput,
    Joined,
    Method,
    Needs,
    OwnPassMethod,
    SharedPassMethod,
    TaskInput,
)
from engram.methods.readout import LayerStatistics, grid_weights
from engram.methods.routing import Route, is_dense
from engram.tasks.task import Task
from engram.util.tensors import VersionedCache, autocast_dtype
from engram.vit import ViT

if TYPE_CHECKING:
    from engram.model.memory_vit import MemoryViT

_SELECTIONS = 8  # of tasks that are kept, beside one for every task


@dataclass(frozen=True, eq=False)
class HeadInputs:
    """Head inputs by task that a pass gave, and what the heads make of them.

    `rows` are the images that asked for each task, if it was computed for more.
    """

    model: MemoryViT
    by_task: Mapping[str, HeadInput]
    rows: Mapping[str, Sequence[int]] | None = None

    def outputs(self) -> dict[str, Tensor]:
        """Logits, numbers or masks, as a call of the model gives them."""
        return self._each(lambda task, own: task.head.read(own))

    def vectors(self) -> dict[str, Tensor]:
        """One vector for each image, as `MemoryViT.embed` gives them."""
        return self._each(lambda task, own: task.head.embed(own))

    def familiarity(self) -> dict[str, Tensor]:
        """How familiar the images look to the tasks that keep statistics."""

        def compute(task: Task, own: HeadInput) -> Tensor | None:
            known = task.statistics
            return None if known is None else known.familiarity(task.head.embed(own))

        return self._each(compute)

    def _each(self, compute: Callable[[Task, HeadInput], Tensor | None]) -> dict[str, Tensor]:
        found = {}
        for name, own in self.by_task.items():
            value = compute(self.model.task(name), own)
            if value is not None:
                found[name] = value if self.rows is None else value[self.rows[name]]
        return found


class JoinCache:
    """Cache of joined tasks across calls: stacked weights, and keys and values of cells.

    By family and names, as long as no parameter changes. torch.compile cannot ask whether one has
    changed: a compiled pass joins every time. In a copy of a model that is to be traced, `freeze`
    makes constants of what is joined from then on.
    """

    def __init__(self) -> None:
        self._cache: VersionedCache[Joined] = VersionedCache(_SELECTIONS)
        self._frozen: dict[object, Joined] | None = None

    def clear(self, tasks: int | None = None) -> None:
        """Forget everything; with a number of tasks, make room for each of them joined alone."""
        self._cache.clear()
        if tasks is not None:
            self._cache.size = _SELECTIONS + tasks

    def freeze(self) -> None:
        self._frozen = {}

    def join(self, tasks: Sequence[TaskInput], backbone: ViT, trains: bool) -> Joined:
        """Join tasks of one family with all they extend, parents first."""
        family = tasks[0].method.family()
        assert issubclass(family, SharedPassMethod)
        key = (family, *(task.name for task in tasks))
        if self._frozen is not None:
            if key not in self._frozen:
                self._frozen[key] = family.join(tasks, backbone)
            return self._frozen[key]
        if trains:
            self.clear()  # some optimisers write where `version` does not see it
        if trains or torch.compiler.is_compiling():
            return family.join(tasks, backbone)
        read = [part for block in backbone.layers for part in (block.norm1, block.qkv)]
        read += [] if backbone.pre_norm is None else [backbone.pre_norm]
        tensors = [tensor for task in tasks for tensor in task.tensors.values()]
        tensors += [parameter for part in read for parameter in part.parameters()]
        tensors += [] if backbone.prefix_position is None else [backbone.prefix_position]
        return self._cache.get(
            (autocast_dtype(backbone.device), *key), tensors, lambda: family.join(tasks, backbone)
        )


def task_inputs(model: MemoryViT, names: Sequence[str]) -> list[TaskInput]:
    """Tasks and all they extend as they join a pass, parents first."""
    return [model.task(name).input() for name in model.registry.closure(names)]


def head_inputs(
    model: MemoryViT,
    names: Sequence[str],
    pixels: Tensor,
    exact: bool = False,
    route: Route | None = None,
) -> dict[str, HeadInput]:
    """Head inputs by task: one shared pass, and one more for each task that changes the backbone.

    With a `route`, those of the images that ask for a task, in their order.
    """
    backbone = model.backbone
    shared = [name for name in names if model.task(name).method.shares_pass]
    found: dict[str, HeadInput] = {}
    with backbone.autocast():
        tasks = [] if len(shared) == len(names) else [one.input() for one in model.tasks.values()]
        for own in tasks:
            if own.name in names and isinstance(own.method, OwnPassMethod):
                vit = model.task(own.name).backbone or backbone
                found[own.name] = own.method.own_pass(tasks, own, vit, pixels)
        if shared:
            x = backbone.embed(pixels)
            if route is not None:
                route.check(len(x))
            batch = Batch(backbone, (pixels.shape[-2], pixels.shape[-1]), pixels.device, route)
            branches, statistics = _start(model, shared, batch, x, exact)
            found |= _finish(branches, run(batch, x, branches, statistics, exact))
    return {name: found[name].map(backbone.to_fp32) for name in names}


def head_inputs_from_cache(
    model: MemoryViT, names: Sequence[str], cached: Cached, size: tuple[int, int] | None
) -> dict[str, HeadInput]:
    """`head_inputs` of tasks that leave the backbone unchanged, from features that are there."""
    x = cached.raw if cached.pooled is None else cached.pooled
    assert x is not None
    batch = Batch(model.backbone, size or model.preprocessing.size, x.device)
    with model.backbone.autocast():
        branches, statistics = _start(model, names, batch, x)
        found = _finish(branches, run_cached(batch, cached, branches, statistics))
    return {name: found[name].map(model.backbone.to_fp32) for name in names}


def _start(
    model: MemoryViT, names: Sequence[str], batch: Batch, x: Tensor, exact: bool = False
) -> tuple[list[Branch], LayerStatistics | None]:
    """The branches of a pass over tokens x, and statistics if one needs them.

    Families are together; with `exact`, each task is alone.
    """
    families: dict[type[Method], list[str]] = {}
    for name in names:
        families.setdefault(model.task(name).method.family(), []).append(name)
    branches = []
    for family, members in families.items():
        trains, own = _train(model, members, x), batch
        groups = joined = [[name] for name in members] if exact else [members]
        if batch.route is not None:
            asked = batch.route.only(set(members).__contains__)
            if not family.routes or is_dense([model.registry.closure(each) for each in asked]):
                own = replace(batch, route=None)
            else:  # routes differ from batch to batch: join all that are attached, which is cached
                every = [n for n, task in model.tasks.items() if task.method.family() is family]
                joined = [members if _train(model, every, x) else every]
        for group, together in zip(groups, joined, strict=True):
            tasks = task_inputs(model, together)
            branch = model.joined.join(tasks, model.backbone, trains)(own)
            branch.trains, branch.asked, branch.routed = trains, group, own.route is not None
            branches.append(branch)
    methods = [model.task(name).method for name in names]
    if not any(Needs.STATISTICS in method.needs for method in methods):
        return branches, None
    grid = any(method.reads_grid for method in methods)
    weights = grid_weights(batch.backbone, batch.size, batch.device) if grid else None
    return branches, LayerStatistics(batch.backbone, weights)


def _train(model: MemoryViT, names: Sequence[str], x: Tensor) -> bool:
    """Whether autograd records a pass of these tasks over the backbone's tokens x."""
    if not torch.is_grad_enabled():
        return False
    tasks = [model.task(name) for name in model.registry.closure(names)]
    return x.requires_grad or any(p.requires_grad for task in tasks for p in task.parameters())


def _finish(branches: Sequence[Branch], features: Features) -> dict[str, HeadInput]:
    """The head inputs that were asked for, of the images that asked."""
    found: dict[str, HeadInput] = {}
    for branch in branches:
        every = branch.head_inputs(features)
        for task in branch.tasks:
            if task.name in every and (branch.asked is None or task.name in branch.asked):
                own = every[task.name]
                if features.batch.route is not None and not branch.routed:
                    rows = features.batch.rows(task.name)
                    own = own.map(lambda t, rows=rows: t[rows])  # type: ignore[misc]
                assert isinstance(task.method, SharedPassMethod)
                found[task.name] = task.method.head_input(task, own, features)
    return found
