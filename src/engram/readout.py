"""Readout: what a linear head sees of every layer of the trunk, not of the last alone.

Of each layer's normed tokens, and of the final ones, three *moments*: the class token, and the
mean and the standard deviation of the patches (D numbers each). They do not say where in the
picture something is. So there are also the *squares* of three layers, the means of the patches in
each square of a 4 x 4 grid (16 D numbers a layer).

A `readout` task is a linear head on the moments of the last k layers, or on all moments and
squares, solved by L-BFGS (`train.solve`). It has no parameters but its head, costs one small
product and reads nothing of other tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engram.side import Climb
from engram.squares import SQUARES
from engram.vit import ViT

#: Whose squares are seen: a layer low down, one past the middle, and the final tokens.
_HEIGHTS = (0.25, 0.6, 1.0)


def steps_with_squares(depth: int) -> tuple[int, ...]:
    """The steps whose squares are seen, the last one first; a step is a layer, or the final one."""
    return tuple(dict.fromkeys(round(height * depth) for height in reversed(_HEIGHTS)))


def squares_count(depth: int) -> int:
    """All squares of a trunk of this depth."""
    return SQUARES * len(steps_with_squares(depth))


def moments_per_layer(class_token: bool) -> int:
    """The moments of one layer: a trunk without a class token has two."""
    return 3 if class_token else 2


class Moments:
    """The moments of all layers in one pass; `see` is called with every step's tokens.

    With the weights of `squares` (16, n), as `squares_of` gives them, these are seen, too.
    """

    def __init__(self, trunk: ViT, squares: Tensor | None) -> None:
        self.config, self._pool = trunk.config, squares
        self._pooled_steps = steps_with_squares(trunk.config.depth)
        self.layers: list[Tensor] = []  # (b, moments, D) each
        self.squares: dict[int, Tensor] = {}  # (b, 16, D) each, by step
        self._last: dict[tuple[int, bool], Tensor] = {}  # while no other is seen

    def see(self, step: int, tokens: Tensor) -> None:
        """Take in the trunk's normed tokens (b, n, D) of a layer, or the final ones."""
        patches = tokens[:, self.config.prefix :]
        mean = patches.mean(1)
        # torch.std does the same, but more slowly along this axis
        spread = torch.linalg.vector_norm(patches - mean.unsqueeze(1), dim=1)
        spread = spread * patches.shape[1] ** -0.5
        own = [tokens[:, 0]] if self.config.class_token else []
        self.layers.append(torch.stack([*own, mean, spread], dim=1))
        if self._pool is not None and step in self._pooled_steps:
            self.squares[step] = self._pool.to(tokens) @ tokens
        self._last.clear()

    def last(self, layers: int, squares: bool = False) -> Tensor:
        """The moments of the last layers, the final tokens' first: (b, layers * moments * D).

        So the first D numbers are the pooled token, which all that is left of no layer is. The
        squares come behind the moments.
        """
        if not layers:
            return self.layers[-1][:, 0]
        if (layers, squares) not in self._last:
            seen = self.layers[: -layers - 1 : -1]
            seen += [self.squares[step] for step in self._pooled_steps] if squares else []
            self._last[layers, squares] = torch.cat(seen, dim=1).flatten(1)
        return self._last[layers, squares]


def moments_of(layers: Sequence[Tensor], trunk: ViT, squares: Tensor) -> Tensor:
    """All moments and squares of normed tokens (b, n, D) of every layer, and of the final ones."""
    moments = Moments(trunk, squares)
    for step, tokens in enumerate(layers):
        moments.see(step, tokens)
    return moments.last(len(layers), squares=True)


class Readers:
    """All that reads the trunk's normed tokens in one pass: side patches, and moments.

    `climbs` has the climb that answers for each task with side patches; tasks may share one.
    """

    def __init__(self, climbs: Mapping[str, Climb], moments: Moments | None) -> None:
        self.of, self.moments = climbs, moments
        self.climbs = list(dict.fromkeys(climbs.values()))

    def __bool__(self) -> bool:
        return bool(self.climbs) or self.moments is not None

    def see(self, step: int, tokens: Tensor) -> None:
        """Take in the trunk's normed tokens (b, n, D) of a layer, or the final ones."""
        for climb in self.climbs:
            climb.see(step, tokens)
        if self.moments is not None:
            self.moments.see(step, tokens)

    def features(
        self,
        name: str,
        layers: int,
        pooled: Tensor,
        rows: Tensor | None = None,
        squares: bool = False,
    ) -> Tensor:
        """What the head of a task sees of the image: moments or the pooled token, and its side.

        In a routed pass `rows` are the images that asked for it.
        """
        seen = pooled if self.moments is None or not layers else self.moments.last(layers, squares)
        seen = seen if rows is None else seen[rows]
        climb = self.of.get(name)
        return seen if climb is None else torch.cat([seen, climb.features[name]], dim=-1)

    def patches(self, name: str, patches: Tensor) -> Tensor:
        """What the head of a task sees of every patch (b, patches, D): its side's row, too."""
        climb = self.of.get(name)
        if climb is None:
            return patches
        return torch.cat([patches, climb.patches(name)[:, -patches.shape[1] :]], dim=-1)
