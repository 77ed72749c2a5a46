"""What the head of a task is given of images, and the passes that compute it.

One pass of the trunk is shared by all tasks that leave it alone: `passes.py` runs the streams of
the masked ones beside it, `side.py` and `readout.py` read its normed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engram.adapters import Bank
from engram.composition import Composition
from engram.errors import EngramError
from engram.layers import See
from engram.memory import Memory
from engram.passes import (
    CachedLayers,
    TrunkPass,
    WatchFirst,
    forward_fast,
    forward_tasks,
    from_cached,
    full_attention,
    reads_lean,
)
from engram.positions import Rotation
from engram.prepared import builds_graph, sides_of
from engram.readout import Moments, Readers
from engram.routing import Route, RoutedGroups, RoutedMemory, asks_most, buckets, merged
from engram.side import Seats
from engram.squares import squares_of
from engram.tasks.heads import Patches
from engram.tasks.task import Task
from engram.util.devices import to_device
from engram.vit import ViT


@dataclass(frozen=True)
class Pass:
    """What the layers make of images, before any head."""

    raw: Tensor  # the trunk's last tokens before the final norm, (b, n, D)
    streams: Mapping[str, Tensor]  # the same of the masked tasks, (b, k, D)
    layers: Sequence[Tensor] = ()  # the trunk's normed tokens of every layer, (b, n, D)

    def image(self, i: int) -> Pass:
        """The same of one image."""
        streams = {name: tokens[i : i + 1] for name, tokens in self.streams.items()}
        layers = [tokens[i : i + 1] for tokens in self.layers]
        return Pass(self.raw[i : i + 1], streams, layers)


@dataclass(frozen=True)
class Sight:
    """What the head of a task is given of images."""

    own: Tensor  # the task's own tokens (b, k, D), or one vector (b, features)
    patches: Patches | None

    def of(self, rows: Tensor | None) -> Sight:
        """The same of some of the images; None: of all."""
        patches = None if self.patches is None else self.patches.of(rows)
        return self if rows is None else Sight(self.own[rows], patches)


@dataclass(frozen=True)
class BaseSight:
    """What the trunk's own head is given: its last tokens (b, n, D) before and after the norm."""

    raw: Tensor
    tokens: Tensor

    def of(self, rows: Tensor | None) -> BaseSight:
        """The same of some of the images; None: of all."""
        return self if rows is None else BaseSight(self.raw[rows], self.tokens[rows])


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


def check_regimes(model: Composition, names: Sequence[str]) -> None:
    """Refuse a route with a task that cannot share a pass with others."""
    for name in names:
        if name != "base" and model.task(name).spec.parts.changes_trunk:
            raise EngramError(
                f"{name!r} has the regime {model.task(name).spec.regime!r}, which changes the "
                "trunk's own tokens, so it cannot be in a route; ask for it without one."
            )


def routed_sights(model: Composition, route: Route, pixels: Tensor) -> dict[str, Sight | BaseSight]:
    """The same of each task for the images that ask for it, in their order."""
    streams = route.only(lambda n: n != "base" and model.task(n).spec.parts.extends)
    most = asks_most([model.registry.closure(asked) for asked in streams])
    with model.trunk.products():
        x, names = model.trunk.embed(pixels), list(route.rows)
        route.check(len(x))
        size = (pixels.shape[-2], pixels.shape[-1])
        given = None if most else route
        seen = _sights_together(model, names, x, size, False, given) if names else {}
        if most:
            rows = _rows(route, x)
            seen = {name: sight.of(rows[name]) for name, sight in seen.items()}
    return {name: _unrounded(model.trunk, sight) for name, sight in seen.items()}


def _sights_together(
    model: Composition,
    names: Sequence[str],
    x: Tensor,
    size: tuple[int, int],
    exact: bool,
    route: Route | None = None,
) -> dict[str, Sight | BaseSight]:
    """Base, heads and masked tasks, all from the trunk's embedded tokens x (b, n, D)."""
    masked = [n for n in names if n != "base" and model.task(n).spec.parts.masked]
    others = [n for n in names if n not in masked]
    per_pixel = any(model.task(n).kind.per_pixel for n in names if n != "base")
    readers = _readers(model, names, x, size, exact, route)
    see = readers.see if readers else None
    whole = exact or per_pixel or see is not None
    keep = x.shape[1] if whole else _trunk_tokens_needed(model.trunk, others, x.shape[1])
    rotation = model.trunk.rotation(size, x.shape[1])
    streams: dict[str, Tensor] = {}  # (b, k, D)
    if not masked:
        raw = model.trunk.encode(x, size, see)
    elif route is not None:
        raw, streams = _routed_streams(model, route, x, keep, see, rotation)
    elif exact or builds_graph(model.registry, masked, x):
        groups = [[name] for name in masked] if exact else [masked]
        memories = _memories(model, groups, x)
        lean = not exact and reads_lean(model.trunk, x.shape[1], memories[0])
        trunk = TrunkPass(model.trunk, x, keep, lean, see, rotation)
        views = list(trunk) if len(groups) > 1 else trunk
        for group, memory in zip(groups, memories, strict=True):
            computed = memory.split(forward_tasks(model.trunk, views, memory, len(x)))
            streams.update({name: computed[name] for name in group})
        raw = trunk.tokens
    else:
        (memory,) = _memories(model, [masked], x)
        raw, y = forward_fast(model.trunk, x, memory, keep, None, see, rotation)
        streams = memory.split(y)
    return _finished(model, names, raw, streams, readers, size, route)


def _finished(
    model: Composition,
    names: Sequence[str],
    raw: Tensor,
    streams: Mapping[str, Tensor],
    readers: Readers,
    size: tuple[int, int],
    route: Route | None = None,
) -> dict[str, Sight | BaseSight]:
    """From the last tokens of the trunk and of the masked tasks, before the final norm."""
    others = [name for name in names if name not in streams]
    per_pixel = any(model.task(n).kind.per_pixel for n in names if n != "base")
    tokens = model.trunk.norm(raw) if others or per_pixel else raw
    if readers:
        readers.see(model.trunk.config.depth, tokens)
    patches = _patches(model.trunk, tokens, size) if per_pixel else None
    pooled = model.trunk.pool(tokens) if set(others) - {"base"} else raw
    rows = dict.fromkeys(names) if route is None else _rows(route, raw)
    seen: dict[str, Sight | BaseSight] = {}
    for name in names:
        own = rows[name]
        if name == "base":
            seen[name] = BaseSight(raw, tokens).of(own)
        else:
            stream = model.trunk.norm(streams[name]) if name in streams else None
            seen[name] = _sight(model, name, stream, pooled, patches, readers, own)
    return seen


def _rows(route: Route, x: Tensor) -> dict[str, Tensor | None]:
    """By task, which of the images x ask for it; None: all of them."""
    return {
        name: None if len(images) == len(x) else to_device(torch.tensor(images), x.device)
        for name, images in route.rows.items()
    }


def _routed_streams(
    model: Composition,
    route: Route,
    x: Tensor,
    keep: int,
    see: See | None,
    rotation: Rotation | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The trunk's last tokens, and each masked task's own for the images that ask for it."""
    tasks, trunk = model.registry, model.trunk
    masked = route.only(lambda n: n != "base" and tasks[n].spec.parts.masked)
    asked = [tasks.closure(names) for names in masked]
    names = list(dict.fromkeys(name for own in asked for name in own))
    memories = dict(zip(names, _memories(model, [[n] for n in names], x), strict=True))
    adapters = {name: own for name in names if (own := tasks[name].adapters) is not None}
    slots = [sum(tasks[name].spec.tokens for name in own) for own in asked]
    groups = [
        RoutedMemory(trunk, memories, adapters, asked, images)
        for images in buckets(slots, x.shape[1])
    ]
    if len(groups[0].images) == len(x) and not builds_graph(tasks, names, x):
        raw, y = forward_fast(trunk, x, groups[0], keep, see=see, rotation=rotation)
        return raw, merged(groups[0].split(y, route.rows))
    plain = TrunkPass(trunk, x, keep, False, see, rotation)
    beside = RoutedGroups(groups)
    y = forward_tasks(trunk, plain, beside, len(x))
    return plain.tokens, merged(beside.split(y, route.rows))


def sights_from_pass(
    model: Composition, passed: Pass, names: Sequence[str], size: tuple[int, int]
) -> dict[str, Sight | BaseSight]:
    """The same of "base" and of tasks that leave the trunk alone, from a pass made elsewhere."""
    readers = _readers(model, names, passed.raw, size)
    if readers:
        for step, tokens in enumerate(passed.layers):
            readers.see(step, tokens)
    streams = {name: passed.streams[name] for name in names if name in passed.streams}
    return _finished(model, names, passed.raw, streams, readers, size)


def sights_from_cache(
    model: Composition,
    layers: CachedLayers,
    pooled: Tensor,
    tasks: Sequence[str],
    final: Tensor | None,
    size: tuple[int, int] | None,
) -> dict[str, Sight]:
    """The same of tasks that leave the trunk alone; `MemoryViT.from_cache` says from what."""
    masked = [name for name in tasks if model.task(name).spec.parts.masked]
    streams: dict[str, Tensor] = {}
    images = size or model.preprocessing.size
    normed = [layer for layer in layers if isinstance(layer, Tensor)]
    if masked:
        rotation = model.trunk.rotation(images, normed[0].shape[1]) if normed else None
        with model.trunk.products():
            (memory,) = _memories(model, [masked], pooled)
            own = model.trunk.norm(from_cached(model.trunk, layers, memory, rotation))
        streams = memory.split(model.trunk.unrounded(own))
    readers = _readers(model, tasks, pooled, images)
    if readers:
        assert final is not None
        for step, tokens in enumerate([*normed, final]):
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
    rows: Tensor | None = None,
) -> Sight:
    """What the head of a task that leaves the trunk alone is given; `rows` are its images."""
    task = model.task(name)
    patches = None if patches is None else patches.of(rows)
    spec = task.spec
    if stream is not None:
        return Sight(stream, patches)
    if patches is not None and task.kind.per_pixel:
        tokens = readers.patches(name, patches.tokens)
        return Sight(pooled if rows is None else pooled[rows], replace(patches, tokens=tokens))
    layers = spec.layers if spec.parts.moments else 0
    return Sight(readers.features(name, layers, pooled, rows, spec.squares), patches)


def _memories(model: Composition, groups: Sequence[Sequence[str]], x: Tensor) -> list[Memory]:
    return model.prepared.memories(model.trunk, model.registry, groups, x)


def _readers(
    model: Composition,
    names: Sequence[str],
    x: Tensor,
    size: tuple[int, int],
    exact: bool = False,
    route: Route | None = None,
) -> Readers:
    """What reads the trunk's normed tokens for these tasks; with `exact`, each by itself."""
    parts = {name: model.task(name).spec.parts for name in names if name != "base"}
    side = [name for name, has in parts.items() if has.side]
    reads = [name for name, has in parts.items() if has.moments]
    if not side and not reads:
        return Readers({}, None)
    squares = squares_of(model.trunk, size, x.device)
    seen = squares if any(model.task(name).spec.squares for name in reads) else None
    moments = Moments(model.trunk, seen) if reads else None
    if not side:
        return Readers({}, moments)
    if route is not None:
        climb = sides_of(model.registry, side).begin(squares, _seats(model, route))
        return Readers(dict.fromkeys(side, climb), moments)
    groups = [[name] for name in side] if exact else [side]
    sides = model.prepared.sides(model.trunk, model.registry, groups, x)
    climbs = [one.begin(squares) for one in sides]
    pairs = zip(groups, climbs, strict=True)
    return Readers({name: climb for group, climb in pairs for name in group}, moments)


def _seats(model: Composition, route: Route) -> Seats:
    tasks = model.registry
    side = route.only(lambda n: n != "base" and tasks[n].spec.parts.side)
    computed: dict[str, list[int]] = {}
    for image, names in enumerate(side):
        for name in tasks.closure(names):
            computed.setdefault(name, []).append(image)
    return Seats(route.rows, computed)


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
