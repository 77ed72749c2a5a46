"""The passes of a model: which tasks join, and the head inputs that a pass leaves them with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram.errors import EngramError
from engram.methods.forward import Cached, finish, run, run_cached
from engram.methods.grid_pooling import grid_weights
from engram.methods.method import Batch, Branch, Features, HeadInput, Method, Needs, TaskInput
from engram.methods.readout import LayerStatistics
from engram.methods.routing import Route, is_dense
from engram.util.devices import to_device

if TYPE_CHECKING:
    from engram.model.memory_vit import MemoryViT

HeadInputs = dict[str, HeadInput]


def head_inputs(
    model: MemoryViT,
    names: Sequence[str],
    pixels: Tensor,
    exact: bool = False,
    route: Route | None = None,
) -> HeadInputs:
    """Head inputs by task: one shared pass, and one more for each task that changes the backbone.

    With a `route`, those of the images that ask for a task, in their order.
    """
    backbone = model.backbone
    found: HeadInputs = {}
    with backbone.autocast():
        for name in names:
            task = model.task(name)
            if not task.method.shares_pass:
                tasks = [one.input() for one in model.tasks.values()]
                own = next(one for one in tasks if one.name == name)
                found[name] = task.method.own_pass(tasks, own, task.backbone or backbone, pixels)
        shared = [name for name in names if name not in found]
        if shared:
            x = backbone.embed(pixels)
            if route is not None:
                route.check(len(x))
            found.update(_shared_pass(model, shared, x, _batch(model, pixels, route), exact))
    return {name: found[name].map(backbone.to_fp32) for name in names}


def _batch(model: MemoryViT, pixels: Tensor, route: Route | None) -> Batch:
    return Batch(model.backbone, (pixels.shape[-2], pixels.shape[-1]), pixels.device, route)


def _shared_pass(
    model: MemoryViT, names: Sequence[str], x: Tensor, batch: Batch, exact: bool
) -> HeadInputs:
    """All tasks that leave the backbone unchanged, from its embedded tokens x (b, n, D)."""
    branches = _branches(model, names, batch, x, exact)
    statistics = _statistics(model, names, batch)
    whole = exact or statistics is not None or any(branch.reads_layers for branch in branches)
    n = x.shape[1]
    keep = n if whole else max(branch.last_tokens(n) for branch in branches)
    features = run(batch, x, branches, statistics, keep=keep, exact=exact)
    return _finished(branches, features)


def _branches(
    model: MemoryViT, names: Sequence[str], batch: Batch, x: Tensor, exact: bool = False
) -> list[Branch]:
    """The branches of a pass over tokens x: families together; with `exact`, each task alone."""
    families: dict[type[Method], list[str]] = {}
    for name in names:
        families.setdefault(model.task(name).method.family(), []).append(name)
    branches = []
    for family, members in families.items():
        trains = model.trains(members, x)
        joined = []
        if batch.route is not None:
            routed = _routed(model, family, members, batch, trains)
            joined += [routed] if routed is not None else []
        groups = [[name] for name in members] if exact else [members]
        joined = joined or [model.join(group, trains)(batch) for group in groups]
        for branch, group in zip(joined, groups, strict=True):
            branch.trains, branch.asked = trains, group
        branches += joined
    return branches


def _routed(
    model: MemoryViT, family: type[Method], names: Sequence[str], batch: Batch, trains: bool
) -> Branch | None:
    """A branch of what each image asks for; None if nearly every image asks for nearly all."""
    assert batch.route is not None
    if not family.routes:
        return None
    own = set(names)
    if is_dense([model.registry.closure(each) for each in batch.route.only(own.__contains__)]):
        return None
    # Each joined by itself, parents first: routes differ from batch to batch.
    alone = {name: model.join([name], trains) for name in model.registry.closure(names)}
    return family.join_routed(alone, batch)


def _statistics(model: MemoryViT, names: Sequence[str], batch: Batch) -> LayerStatistics | None:
    needing = [name for name in names if Needs.STATISTICS in model.task(name).method.needs]
    if not needing:
        return None
    grid = any(model.task(name).method.reads_grid for name in needing)
    weights = grid_weights(batch.backbone, batch.size, batch.device) if grid else None
    return LayerStatistics(batch.backbone, weights)


def _finished(branches: Sequence[Branch], features: Features) -> HeadInputs:
    """The head inputs that were asked for, of the images that asked."""
    route = features.batch.route
    found: HeadInputs = {}
    for branch in branches:
        for name, given in branch.head_inputs(features).items():
            if branch.asked is None or name in branch.asked:
                if route is not None and not branch.routed:
                    rows = to_device(torch.tensor(route.rows[name]), given.own.device)
                    given = given.map(lambda t, rows=rows: t[rows])  # type: ignore[misc]
                found[name] = given
    return found


def head_inputs_from_pass(
    model: MemoryViT,
    names: Sequence[str],
    size: tuple[int, int],
    raw: Tensor,
    streams: Mapping[str, Tensor],
    layers: Sequence[Tensor],
) -> HeadInputs:
    """From a pass that another engine ran: tokens before the final norm, and normed layers."""
    batch = Batch(model.backbone, size, raw.device)
    branches = _branches(model, names, batch, raw)
    statistics = _statistics(model, names, batch)
    features = finish(batch, branches, statistics, raw, streams, layers)
    return _finished(branches, features)


def head_inputs_from_cache(
    model: MemoryViT, names: Sequence[str], cached: Cached, size: tuple[int, int] | None
) -> HeadInputs:
    """From what a cache keeps of the backbone, of tasks that leave it unchanged."""
    batch = Batch(model.backbone, size or model.preprocessing.size, cached.pooled.device)
    with model.backbone.autocast():
        branches = _branches(model, names, batch, cached.pooled)
        statistics = None if cached.statistics is not None else _statistics(model, names, batch)
        features = run_cached(batch, cached, branches, statistics)
        found = _finished(branches, features)
    return {name: found[name].map(model.backbone.to_fp32) for name in names}


def check_route(model: MemoryViT, names: Sequence[str]) -> None:
    """Refuse a route with a task that cannot share a pass with others."""
    for name in names:
        if not model.task(name).method.shares_pass:
            raise EngramError(
                f"{name!r} has the regime {model.task(name).spec.regime!r}, which changes the "
                "backbone's own tokens, so it cannot be in a route; ask for it without one."
            )


def task_inputs(model: MemoryViT, names: Sequence[str]) -> list[TaskInput]:
    """Tasks and all they extend as they join a pass, parents first."""
    return [model.task(name).input() for name in model.registry.closure(names)]
