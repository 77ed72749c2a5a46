"""What the head of a task is given of images, and the passes that compute it.

One pass of the trunk is shared by all tasks that leave it alone: `memory.py` runs the streams of
the masked ones beside it, `side.py` and `readout.py` read its normed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engram.adapters import Bank
from engram.composition import Composition
from engram.memory import (
    Memory,
    TrunkPass,
    WatchFirst,
    forward_fast,
    forward_tasks,
    from_normed,
    full_attention,
    reads_lean,
)
from engram.prepared import builds_graph
from engram.readout import Moments, Readers
from engram.tasks.heads import Patches
from engram.tasks.task import Task
from engram.vit import ViT


@dataclass(frozen=True)
class Sight:
    """What the head of a task is given of images."""

    own: Tensor  # the task's own tokens (b, k, D), or one vector (b, features)
    patches: Patches | None


@dataclass(frozen=True)
class BaseSight:
    """What the trunk's own head is given: its last tokens (b, n, D) before and after the norm."""

    raw: Tensor
    tokens: Tensor


def sights(
    model: Composition, names: Sequence[str], pixels: Tensor, exact: bool
) -> dict[str, Sight | BaseSight]:
    """What the head of each of these tasks, and of "base", is given of the images."""
    alone = [n for n in names if n != "base" and model.task(n).spec.parts.changes_trunk]
    with model.trunk.products():
        seen: dict[str, Sight | BaseSight] = {n: _sight_alone(model, n, pixels) for n in alone}
        shared = [name for name in names if name not in seen]
        if shared:
            size = (pixels.shape[-2], pixels.shape[-1])
            seen.update(_sights_together(model, shared, model.trunk.embed(pixels), size, exact))
    return {name: _unrounded(model.trunk, seen[name]) for name in names}


def _unrounded(trunk: ViT, seen: Sight | BaseSight) -> Sight | BaseSight:
    """The same as heads take it, which are in fp32 where a trunk's weights are not."""
    if trunk.stored == "fp32":
        return seen
    if isinstance(seen, BaseSight):
        return replace(seen, raw=trunk.unrounded(seen.raw), tokens=trunk.unrounded(seen.tokens))
    patches = seen.patches
    if patches is not None:
        patches = replace(patches, tokens=trunk.unrounded(patches.tokens))
    return replace(seen, own=trunk.unrounded(seen.own), patches=patches)


def _sights_together(
    model: Composition, names: Sequence[str], x: Tensor, size: tuple[int, int], exact: bool
) -> dict[str, Sight | BaseSight]:
    """Base, heads and masked tasks, all from the trunk's embedded tokens x (b, n, D)."""
    masked = [n for n in names if n != "base" and model.task(n).spec.parts.masked]
    others = [n for n in names if n not in masked]
    per_pixel = any(model.task(n).kind.per_pixel for n in names if n != "base")
    readers = _readers(model, names, x, exact)
    see = readers.see if readers else None
    whole = exact or per_pixel or see is not None
    keep = x.shape[1] if whole else _trunk_tokens_needed(model.trunk, others, x.shape[1])
    rotation = model.trunk.rotation(size, x.shape[1])
    streams: dict[str, Tensor] = {}  # (b, k, D)
    if not masked:
        raw = model.trunk.encode(x, size, see)
    elif exact or builds_graph(model.registry, masked, x):
        groups = [[name] for name in masked] if exact else [masked]
        memories = [_memory(model, group, x) for group in groups]
        lean = not exact and reads_lean(model.trunk, x.shape[1], memories[0])
        trunk = TrunkPass(model.trunk, x, keep, lean, see, rotation)
        views = list(trunk) if len(groups) > 1 else trunk
        for group, memory in zip(groups, memories, strict=True):
            computed = memory.split(forward_tasks(model.trunk, views, memory, len(x)))
            streams.update({name: computed[name] for name in group})
        raw = trunk.tokens
    else:
        memory = _memory(model, masked, x)
        raw, y = forward_fast(model.trunk, x, memory, keep, None, see, rotation)
        streams = memory.split(y)
    tokens = model.trunk.norm(raw) if others or per_pixel else raw
    if readers:
        readers.see(model.trunk.config.depth, tokens)
    patches = _patches(model.trunk, tokens, size) if per_pixel else None
    pooled = model.trunk.pool(tokens) if set(others) - {"base"} else raw
    seen: dict[str, Sight | BaseSight] = {}
    for name in names:
        if name == "base":
            seen[name] = BaseSight(raw, tokens)
        else:
            stream = model.trunk.norm(streams[name]) if name in streams else None
            seen[name] = _sight(model, name, stream, pooled, patches, readers)
    return seen


def sights_from_cache(
    model: Composition,
    layers: Sequence[Tensor],
    pooled: Tensor,
    tasks: Sequence[str],
    final: Tensor | None,
    size: tuple[int, int] | None,
) -> dict[str, Sight]:
    """The same of tasks that leave the trunk alone; `MemoryViT.from_cache` says from what."""
    masked = [name for name in tasks if model.task(name).spec.parts.masked]
    streams: dict[str, Tensor] = {}
    if masked:
        rotation = model.trunk.rotation(size or model.preprocessing.size, layers[0].shape[1])
        with model.trunk.products():
            memory = _memory(model, masked, pooled)
            own = model.trunk.norm(from_normed(model.trunk, layers, memory, rotation))
        streams = memory.split(model.trunk.unrounded(own))
    readers = _readers(model, tasks, pooled)
    if readers:
        assert final is not None
        for step, tokens in enumerate([*layers, final]):
            readers.see(step, tokens)
    patches = None
    if final is not None and size is not None:
        patches = _patches(model.trunk, final, size)
    return {n: _sight(model, n, streams.get(n), pooled, patches, readers) for n in tasks}


def _sight(
    model: Composition,
    name: str,
    stream: Tensor | None,
    pooled: Tensor,
    patches: Patches | None,
    readers: Readers,
) -> Sight:
    """What the head of a task that leaves the trunk alone is given."""
    task = model.task(name)
    spec = task.spec
    if stream is not None:
        return Sight(stream, patches)
    if patches is not None and task.kind.per_pixel:
        tokens = readers.patches(name, patches.tokens)
        return Sight(pooled, replace(patches, tokens=tokens))
    layers = spec.layers if spec.parts.moments else 0
    return Sight(readers.features(name, layers, pooled), patches)


def _memory(model: Composition, names: Sequence[str], x: Tensor) -> Memory:
    return model.prepared.memory(model.trunk, model.registry, names, x)


def _readers(model: Composition, names: Sequence[str], x: Tensor, exact: bool = False) -> Readers:
    """What reads the trunk's normed tokens for these tasks; with `exact`, each by itself."""
    parts = {name: model.task(name).spec.parts for name in names if name != "base"}
    side = [name for name, has in parts.items() if has.side]
    groups = [[name] for name in side] if exact else [side] if side else []
    sides = [model.prepared.sides(model.trunk, model.registry, group, x) for group in groups]
    moments = any(has.moments for has in parts.values())
    climbs = [one.begin() for one in sides]
    return Readers(climbs, Moments(model.trunk) if moments else None)


def _patches(trunk: ViT, tokens: Tensor, size: tuple[int, int]) -> Patches:
    """The patches among the last tokens (b, n, D), which come behind all others."""
    rows, columns = (side // trunk.config.patch for side in size)
    return Patches(tokens[:, tokens.shape[1] - rows * columns :], (rows, columns), size)


def _sight_alone(model: Composition, name: str, pixels: Tensor) -> Sight:
    """A task that changes the trunk's own tokens."""
    task = model.task(name)
    trunk = model.trunk if task.trunk is None else task.trunk
    tokens = trunk.norm(tokens_alone(model, task, pixels))
    pooled = tokens[:, 0] if task.class_token is not None else trunk.pool(tokens)
    size = (pixels.shape[-2], pixels.shape[-1])
    patches = _patches(trunk, tokens, size) if task.kind.per_pixel else None
    return Sight(pooled, patches)


def tokens_alone(
    model: Composition, task: Task | None, pixels: Tensor, watch: WatchFirst | None = None
) -> Tensor:
    """The last layer's tokens where all tokens read each other: of such a task, or of none.

    `watch` is called as by `full_attention`.
    """
    trunk = model.trunk if task is None or task.trunk is None else task.trunk
    x = trunk.embed(pixels, None if task is None else task.class_token)
    rotation = trunk.rotation(pixels.shape[-2:], x.shape[1])
    cells = x.new_empty(trunk.config.depth, 0, trunk.config.width)
    if task is None:
        return full_attention(trunk, x, cells, watch=watch, rotation=rotation)
    bank = Bank([(range(1), task.adapters)], 1) if task.adapters is not None else None
    if task.cells is not None:
        others = [t.cells for t in model.registry.values() if t is not task]
        cells = torch.cat([task.cells, *(o for o in others if o is not None)], 1)
    return full_attention(trunk, x, cells, task.spec.update, bank, watch, rotation)


def _trunk_tokens_needed(trunk: ViT, names: Sequence[str], n: int) -> int:
    """How many of the trunk's last tokens the answers of base and heads are made from."""
    needed = 0
    for name in names:
        head, prefix = trunk.config.head, trunk.config.prefix
        if not trunk.config.class_token:
            needed = n
        elif name != "base" or head is None:
            needed = max(needed, 1)
        else:
            needed = max(needed, prefix if head.pooling in ("class", "distilled") else n)
    return needed
