"""Side patches: a thin copy of the picture that climbs beside the trunk and learns to see.

A masked task reads the frozen trunk with one token, through the trunk's own projections. A *side*
task has eyes of its own: a row of r numbers for every token of the trunk, h (n, r), which starts
at zero. At every layer it takes in the trunk's normed tokens x, reads its own memory cells and the
mean of its rows, and thinks:

    h += x P                                   P (D, r): what the task wants to know of x
    h += 0.3 attention(y, mean(y) and cells)   y = norm(h), cells normed; one head, four maps (r, r)
    h += 0.3 mlp(norm(h))                      of width 2 r

and once more after the last layer, with the trunk's final normed tokens. Then the rows are pooled
twice: by eight learned queries, which find what is there wherever it is, and over the sixteen
squares of a 4 x 4 grid, which keep where it is. The head sees these 24 r numbers beside the trunk's
pooled token. In segmentation it sees the row of every patch instead. Nothing of this reaches the
trunk or another task.

A task that extends others takes in their rows, as they were before the layer, by a map of (r, r).

Tasks of version 0.1.0 have the form 1, and are computed as before: every row reads all rows, which
costs n^2 and made no visible difference (docs/results.md), and there are no squares.

Axes, beside those of layers.py (b images, n trunk tokens, D, l layers, and here one step more):

    t tasks of one shape   r rank   m cells   p parents   c images that one task is computed for

The tasks of a pass share each product: no loop over tasks. In a routed pass a task is computed only
for the images that asked for it, or for one that extends it; b is c then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.squares import SQUARES
from engram.util.devices import to_device

QUERIES = 8
FORM = 2  # of new tasks
_SHARE = 0.3  # of what is read and thought, so that the rows stay near to what they took in
_SQUARES = 0.5  # scale of the squares in the head: at 1, small sets of photographs overfit
_TASKS = 128  # of a group at most: more do not make its products faster
_NUMBERS = 2**17  # of rows that are worked on at once, which is half a megabyte
_SHORT = 128  # keys, up to which two products are faster than torch's attention kernel


class Side(nn.Module):
    """What one side task learns, apart from its cells and its head.

    Maps start from a normal distribution that keeps the size of what they map; `parents` start at
    zero. A segmentation, whose head sees every row, has no queries.
    """

    def __init__(
        self, steps: int, width: int, rank: int, parents: int = 0, queries: int = QUERIES
    ) -> None:
        super().__init__()

        def drawn(*shape: int, over: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(steps, *shape) * over**-0.5)

        self.project = drawn(width, rank, over=width)
        self.attention = drawn(4, rank, rank, over=rank)  # query, key, value, output
        self.up = drawn(rank, 2 * rank, over=rank)
        self.down = drawn(2 * rank, rank, over=2 * rank)
        self.queries = nn.Parameter(torch.randn(queries, rank)) if queries else None
        self.parents = nn.Parameter(torch.zeros(parents, steps, rank, rank)) if parents else None


def side_shapes(
    steps: int, width: int, rank: int, parents: int = 0, queries: int = QUERIES
) -> dict[str, tuple[int, ...]]:
    """The tensors of a `Side`, by name."""
    shapes: dict[str, tuple[int, ...]] = {
        "project": (steps, width, rank),
        "attention": (steps, 4, rank, rank),
        "up": (steps, rank, 2 * rank),
        "down": (steps, 2 * rank, rank),
    }
    if queries:
        shapes["queries"] = (queries, rank)
    if parents:
        shapes["parents"] = (parents, steps, rank, rank)
    return shapes


@dataclass(frozen=True)
class Member:
    """What one task brings into a pass."""

    name: str
    side: Side
    cells: Tensor  # (steps, m, r)
    extends: tuple[str, ...] = ()  # other members
    form: int = FORM


def squares_seen(form: int, queries: int) -> int:
    """How many squares a head sees beside so many queries."""
    return SQUARES if queries and form > 1 else 0


class _Group:
    """The tasks of one shape, with their weights stacked."""

    def __init__(self, members: Sequence[Member]) -> None:
        def stacked(name: str, dim: int = 1) -> Tensor:
            return torch.stack([getattr(member.side, name) for member in members], dim)

        self.names = [member.name for member in members]
        project = stacked("project", 2)  # (steps, D, t, r)
        self.rank = project.shape[-1]
        # By step, so that a graph that is traced has them as constants and slices nothing.
        self.project = project.flatten(2).unbind()
        query, key, value, output = stacked("attention").unbind(2)  # each (steps, t, r, r)
        # With one head, two maps do the work of four: (y Q)(y K)' = (y Q K') y', and so on.
        ask, give = query @ key.mT * self.rank**-0.5, value @ output * _SHARE
        cells = _norm(torch.stack([member.cells for member in members], 1))  # (steps, t, m, r)
        form = members[0].form
        self.read: _ReadMean | _ReadRows = (_ReadRows if form == 1 else _ReadMean)(ask, give, cells)
        self.up, self.down = stacked("up").unbind(), (stacked("down") * _SHARE).unbind()
        self.queries: Tensor | None = None
        if members[0].side.queries is not None:
            self.queries = stacked("queries", 0).mT * self.rank**-0.5  # (t, r, queries)
        self.squares = squares_seen(form, 0 if self.queries is None else QUERIES)

    def climb(
        self, step: int, h: Tensor, x: Tensor, taken: Tensor | None, images: Tensor | None
    ) -> Tensor:
        """One step of h (t, b, n, r) beside the trunk's normed tokens x (b, n, D).

        With `images` (t, c), each task has its own of these images.
        """
        t, b, n, r = h.shape
        if images is None:
            h = h + (x @ self.project[step]).view(b, n, t, r).permute(2, 0, 1, 3)
        else:
            project = self.project[step].view(-1, t, r).transpose(0, 1)
            h = h + (x[images].flatten(1, 2) @ project).view_as(h)
        if taken is not None:
            h = h + taken
        few = t  # of a training step everything is kept, and a traced graph has no parts
        if h.is_cpu and not h.requires_grad and not torch.compiler.is_compiling():
            few = max(_NUMBERS // h[0].numel(), 1)
        if few >= t:
            return self._think(step, h)
        parts = [slice(i, i + few) for i in range(0, t, few)]
        return torch.cat([self._think(step, h[part], part) for part in parts])

    def _think(self, step: int, h: Tensor, part: slice | None = None) -> Tensor:
        """The rows h of some tasks, after they have read themselves and their cells, and the MLP.

        Few at a time, so that a processor's cache holds what is made of them on the way.
        """
        h = h + self.read(step, _norm(h), part)
        thought = F.gelu(_norm(h).flatten(1, 2) @ _of(self.up, step, part))
        return torch.baddbmm(h.flatten(1, 2), thought, _of(self.down, step, part)).view_as(h)

    def weights(self, h: Tensor) -> Tensor:
        """How much of every row of h (t, b, n, r) the queries pool: (t, b, queries, n)."""
        assert self.queries is not None
        weights: Tensor = (h @ self.queries.unsqueeze(1)).softmax(2)
        return weights.mT

    def pool(self, h: Tensor, squares: Tensor) -> Tensor:
        """What the heads see of h (t, b, n, r), with squares (16, n): (t, b, features)."""
        pooled = _norm((self.weights(h) @ h).flatten(2))
        if not self.squares:
            return pooled
        return torch.cat([pooled, _SQUARES * _norm((squares.to(h) @ h).flatten(2))], dim=2)


class _ReadMean:
    """What normed rows y (t, b, n, r) read of their mean and of the cells: (t, b, n, r).

    From the maps of every step: `ask` and `give` (steps, t, r, r), normed cells (steps, t, m, r).
    Cells are the same for all images, and so are the maps to their scores and their values. Scores
    have the rows last, not the few that are read: a softmax over six neighbours is slow.
    """

    def __init__(self, ask: Tensor, give: Tensor, cells: Tensor) -> None:
        self.ask, self.give = ask.mT.unbind(), give.unbind()
        self.keys, self.values = (cells @ ask.mT).unbind(), (cells @ give).unbind()

    def __call__(self, step: int, y: Tensor, part: slice | None) -> Tensor:
        t, b, n, _ = y.shape
        mean, rows = y.mean(2), y.flatten(1, 2).mT  # (t, b, r), (t, r, b n)
        key = (mean @ _of(self.ask, step, part)).unsqueeze(2)  # (t, b, 1, r)
        value = (mean @ _of(self.give, step, part)).unsqueeze(2)
        of_mean = (key @ y.mT).view(t, 1, b * n)
        of_cells = _of(self.keys, step, part) @ rows  # (t, m, b n)
        weights = torch.cat([of_mean, of_cells], dim=1).softmax(1)
        read = (weights[:, 1:].mT @ _of(self.values, step, part)).view_as(y)
        return read + weights[:, 0].view(t, b, n, 1) * value


class _ReadRows:
    """The same of all rows and of the cells: form 1."""

    def __init__(self, ask: Tensor, give: Tensor, cells: Tensor) -> None:
        self.ask, self.give = ask.unbind(), give.unbind()
        self.cells = cells.unsqueeze(2).unbind()

    def __call__(self, step: int, y: Tensor, part: slice | None) -> Tensor:
        ask = (y.flatten(1, 2) @ _of(self.ask, step, part)).view_as(y)
        cells = _of(self.cells, step, part).expand(-1, y.shape[1], -1, -1)
        read = _attention(ask, torch.cat([y, cells], dim=2))
        return (read.flatten(1, 2) @ _of(self.give, step, part)).view_as(y)


def _of(maps: Sequence[Tensor], step: int, part: slice | None) -> Tensor:
    """The maps of a step, of all tasks or of some."""
    return maps[step] if part is None else maps[step][part]


def _attention(ask: Tensor, seen: Tensor) -> Tensor:
    """What rows (t, b, n, r) read of the rows (t, b, n + m, r) that they see."""
    short = seen.shape[2] <= _SHORT and not torch.compiler.is_compiling()
    if not short or ask.requires_grad or not ask.is_cpu:
        return F.scaled_dot_product_attention(ask, seen, seen, scale=1.0)
    read: Tensor = (ask @ seen.mT).softmax(-1) @ seen
    return read


def _norm(h: Tensor) -> Tensor:
    return F.layer_norm(h, h.shape[-1:])


@dataclass(frozen=True)
class _Family:
    """The tasks of a group that extend others."""

    pairs: list[tuple[str, str]]  # child and parent
    places: Tensor  # of the children in their group
    maps: tuple[Tensor, ...]  # of every step: (pairs, r, r)


@dataclass(frozen=True)
class Seats:
    """The images of a routed pass, by task."""

    asked: Mapping[str, Sequence[int]]
    computed: Mapping[str, Sequence[int]]  # also for the tasks that extend it, in order


class Sides:
    """The side tasks of a pass, parents before children."""

    def __init__(self, members: Sequence[Member]) -> None:
        shapes: dict[tuple[int, int, bool, int], list[Member]] = {}
        for member in members:
            _, cells, rank = member.cells.shape
            shape = (rank, cells, member.side.queries is not None, member.form)
            shapes.setdefault(shape, []).append(member)
        groups = [
            alike[i : i + _TASKS] for alike in shapes.values() for i in range(0, len(alike), _TASKS)
        ]
        self.groups = [_Group(group) for group in groups]
        self.places = {
            name: (g, i)
            for g, group in enumerate(self.groups)
            for i, name in enumerate(group.names)
        }
        #: By group: who takes in whose rows, and the maps (pairs, r, r) of every step.
        self.families = [self._family(group) for group in groups]

    def _family(self, members: Sequence[Member]) -> _Family | None:
        places, pairs, maps = [], [], []
        for i, member in enumerate(members):
            for parent, weight in zip(member.extends, _rows(member.side.parents), strict=True):
                places.append(i)
                pairs.append((member.name, parent))
                maps.append(weight)
        if not maps:
            return None
        index = to_device(torch.tensor(places), maps[0].device)
        return _Family(pairs, index, torch.stack(maps, 1).unbind())

    def begin(self, squares: Tensor, seats: Seats | None = None) -> Climb:
        """The climb of one pass, over images with these squares: all tasks for all, or by seats."""
        return Climb(self, squares, None if seats is None else _Places(self, seats))


def _rows(parents: Tensor | None) -> Sequence[Tensor]:
    return () if parents is None else parents.unbind(0)


class _Places:
    """Where the images of a routed climb are, as indices."""

    def __init__(self, sides: Sides, seats: Seats) -> None:
        device = sides.groups[0].project[0].device

        def index(places: object) -> Tensor:
            return to_device(torch.tensor(places), device)

        found = {
            name: {image: i for i, image in enumerate(images)}
            for name, images in seats.computed.items()
        }
        tables: dict[str, list[int]] = {}  # the last image again where a task has fewer
        for group in sides.groups:
            most = max(len(found[name]) for name in group.names)
            for name in group.names:
                own = list(found[name])
                tables[name] = own + own[-1:] * (most - len(own))
        #: By group: the images of its tasks, (t, c).
        self.images = [index([tables[name] for name in group.names]) for group in sides.groups]
        #: By group, for every child and parent: where the parent has the child's images, (c).
        self.of_parents = [
            [index([found[parent][i] for i in tables[child]]) for child, parent in family.pairs]
            if family is not None
            else []
            for family in sides.families
        ]
        self.asked = {
            name: index([found[name][i] for i in images])
            for name, images in seats.asked.items()
            if name in found
        }


class Climb:
    """The rows of all side tasks in one pass; `see` is called with every step's tokens."""

    def __init__(self, sides: Sides, squares: Tensor, places: _Places | None = None) -> None:
        self.sides, self.squares, self.places = sides, squares, places
        self._images = [None] * len(sides.groups) if places is None else places.images
        self.rows: list[Tensor] = []  # by group: h (t, b, n, r)
        self._features: dict[str, Tensor] = {}

    def see(self, step: int, tokens: Tensor) -> None:
        """Take in the trunk's normed tokens (b, n, D) of a layer, or the final ones."""
        sides, (b, n, _) = self.sides, tokens.shape
        if not step:
            self.rows = [
                tokens.new_zeros(len(group.names), b if of is None else of.shape[1], n, group.rank)
                for group, of in zip(sides.groups, self._images, strict=True)
            ]
        taken = [self._taken(g, step) for g in range(len(sides.groups))]
        parts = zip(sides.groups, self.rows, taken, self._images, strict=True)
        self.rows = [
            group.climb(step, h, tokens, of_parents, images)
            for group, h, of_parents, images in parts
        ]

    def _taken(self, g: int, step: int) -> Tensor | None:
        """What the tasks of a group take in of their parents' rows: (t, b, n, r)."""
        family = self.sides.families[g]
        if family is None or not step:  # the first rows are zero
            return None
        parents = [self.of(parent) for _, parent in family.pairs]
        if self.places is not None:
            of_parents = self.places.of_parents[g]
            parents = [rows[images] for rows, images in zip(parents, of_parents, strict=True)]
        rows = torch.stack(parents)  # (pairs, b, n, r)
        read = (rows.flatten(1, 2) @ family.maps[step]).view_as(rows)
        own = self.rows[g]
        return torch.zeros_like(own).index_add(0, family.places, read.to(own.dtype))

    def of(self, name: str) -> Tensor:
        """The rows of one task: (b, n, r)."""
        group, place = self.sides.places[name]
        return self.rows[group][place]

    def weights(self, name: str) -> Tensor:
        """How much of every row one task pools at the end of the climb: (b, queries, n)."""
        group, place = self.sides.places[name]
        return self.sides.groups[group].weights(self.rows[group])[place]

    def patches(self, name: str) -> Tensor:
        """The normed rows of one task, for a head that answers for every patch."""
        return _norm(self._asked(name, self.of(name)))

    def _asked(self, name: str, rows: Tensor) -> Tensor:
        """Those of the rows (b, …) of a task whose images asked for it."""
        if self.places is None or name not in self.places.asked:
            return rows
        return rows[self.places.asked[name]]

    @property
    def features(self) -> Mapping[str, Tensor]:
        """What the heads see at the end of the climb, by task: (b, features)."""
        if not self._features:  # a cached_property has a lock, which torch.compile cannot trace
            for group, h in zip(self.sides.groups, self.rows, strict=True):
                if group.queries is not None:
                    for name, pooled in zip(group.names, group.pool(h, self.squares), strict=True):
                        self._features[name] = self._asked(name, pooled)
        return self._features
