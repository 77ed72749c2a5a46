"""Fewer images than features: a linear head with an L2 penalty, in as many numbers as images.

What gradients make of a weight that starts at zero is a sum of the images' features. So it can be
found in coordinates of the space that the images span: the same head after the same steps, in a
fraction of the time, because products are as wide as there are images, not as features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Block: TypeAlias = tuple[int, int, float]  # first feature, the one behind the last, their scale

_KEPT = 5_000  # images up to which products are kept: 200 MB each
_JITTER = 1e-9  # of the mean square, for images that are there twice: they span less


class DualSolver:
    """The space that the rows of features x (images, features) span, from their products.

    `gram` (images, images) is `x @ x.T` in double precision, and is changed; `x` itself is only
    made for a weight.
    `coordinates` (images, images) are those of the rows in an orthonormal basis, so that weights
    have the same length and outputs in both: `coordinates @ a.T` is `x @ weight(a).T`.
    """

    def __init__(self, gram: Tensor, x: Callable[[], Tensor]) -> None:
        self._x = x
        gram.diagonal().add_((_JITTER * gram.diagonal().mean()).clamp(min=1e-30))
        self._lower = torch.linalg.cholesky(gram)
        self.coordinates = self._lower.float()

    def weight(self, a: Tensor) -> Tensor:
        """The weight (classes, features) whose coordinates are a (classes, images)."""
        sums = torch.linalg.solve_triangular(self._lower, a.double(), upper=False, left=False)
        weight: Tensor = sums.float() @ self._x()
        return weight


class Products:
    """Products of images with each other, by block of their features x (images, features).

    A block that is scaled has the same products but for a factor, so heads that differ in scales or
    in the blocks they see need each of them once.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self._blocks: dict[tuple[int, int], Tensor] = {}

    def solver(self, blocks: Sequence[Block]) -> DualSolver:
        """For features that are these blocks, one behind the other."""

        def scaled() -> Tensor:
            return torch.cat([self.x[:, start:end] * by for start, end, by in blocks], 1)

        gram = torch.zeros(len(self.x), len(self.x), dtype=torch.float64)
        for start, end, by in blocks:
            gram.add_(self._block(start, end), alpha=by**2)
        return DualSolver(gram, scaled)

    def _block(self, start: int, end: int) -> Tensor:
        found = self._blocks.get((start, end))
        if found is None:
            x = self.x[:, start:end].double()
            found = x @ x.T
            if len(x) <= _KEPT:
                self._blocks[start, end] = found
        return found
