"""Whether two images are the same picture: small, grey, one laid over a crop of the other.

Features alone cannot say it. They are nearly the same for two photographs of one scene, and differ
for a copy of half the size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import product
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

COMPARED = 24  # pixels of a side of the pictures that are laid over each other
_PIXELS = 4 * COMPARED  # of a side, before a crop is made
_SIZES = (1.0, 0.95, 0.9, 0.85)  # shares of a side that a crop may have left
_STEP = 0.0125  # by which a crop is moved and resized to fit better
_ROUNDS = 2
_PROMISING = 0.75  # correlation from which it is worth while to fit a crop better

Grey: TypeAlias = npt.NDArray[np.float32]


class Span(NamedTuple):
    """A part of a side, in shares of it."""

    start: float
    size: float


def small_grey(image: Image.Image) -> Grey:
    """A picture as `overlays` takes it: small, grey and square."""
    size = (_PIXELS, _PIXELS)
    return np.asarray(image.convert("L").resize(size, Image.Resampling.BOX), dtype=np.float32)


def overlays(greys: Mapping[int, Grey], pairs: Iterable[tuple[int, int]]) -> list[float]:
    """Highest correlation of one picture of each pair with a crop of the other.

    The whole picture is a crop, too, and each may be mirrored.
    """
    asked = list(pairs)
    partners: dict[int, list[int]] = defaultdict(list)
    for first, second in asked:
        partners[first].append(second)
        partners[second].append(first)
    found: dict[tuple[int, int], float] = {}
    for i, others in partners.items():
        crops = _crops(greys[i], _spans(), _spans())
        found |= {(i, j): _overlay(greys[i], crops, greys[j]) for j in others}
    return [max(found[first, second], found[second, first]) for first, second in asked]


def _overlay(grey: Grey, crops: Grey, other: Grey) -> float:
    """The highest correlation of a crop of a picture with another one, or with its mirror image.

    `crops` are some of its crops. The best is moved and resized a little, to fit better.
    """
    spans, best = _spans(), 0.0
    whole = _crops(other, spans[:1], spans[:1])[0, 0]
    for target in (whole, whole[:, ::-1]):
        scores = np.tensordot(crops, target, 2)
        row, column = divmod(int(scores.argmax()), len(spans))
        rows, columns, score = spans[row], spans[column], float(scores.max())
        for _ in range(_ROUNDS if score >= _PROMISING else 0):
            near = _near(rows)
            rows = near[int(np.tensordot(_crops(grey, near, [columns]), target, 2).argmax())]
            near = _near(columns)
            scores = np.tensordot(_crops(grey, [rows], near), target, 2)
            columns, score = near[int(scores.argmax())], max(score, float(scores.max()))
        best = max(best, score)
    return best


@cache
def _spans() -> list[Span]:
    """Parts of a side to begin with; the whole side is the first."""
    found = {Span(at * (1 - size), size) for size, at in product(_SIZES, (0.0, 0.5, 1.0))}
    return sorted(found, key=lambda span: (-span.size, span.start))


def _near(span: Span) -> list[Span]:
    """The span and others that are moved and resized a little."""
    sizes = [min(1.0, span.size + _STEP * i) for i in range(-2, 3)]
    moves = [_STEP * i for i in range(-3, 4)]
    found = {Span(min(max(0.0, span.start + x), 1 - size), size) for size in sizes for x in moves}
    return sorted(found)


def _crops(grey: Grey, rows: Sequence[Span], columns: Sequence[Span]) -> Grey:
    """Crops of a picture around their mean, with norm 1: (rows, columns, side, side)."""
    down, across = _weights(tuple(rows)), _weights(tuple(columns))
    x: Grey = np.matmul((down @ grey)[:, None], across.transpose(0, 2, 1))
    x -= x.mean((-2, -1), keepdims=True)
    x /= np.maximum(np.sqrt(np.square(x).sum((-2, -1), keepdims=True)), 1e-6)
    return x


@lru_cache(64)
def _weights(spans: tuple[Span, ...]) -> Grey:
    """Weights of the pixels of a side in those of each span of it: (spans, side, pixels)."""
    shares = np.arange(COMPARED + 1) / COMPARED
    edges = np.stack([span.start + span.size * shares for span in spans])[..., None] * _PIXELS
    pixels = np.arange(_PIXELS)
    low, high = np.maximum(edges[:, :-1], pixels), np.minimum(edges[:, 1:], pixels + 1)
    weights: Grey = (np.maximum(high - low, 0) / (edges[:, 1:] - edges[:, :-1])).astype(np.float32)
    return weights
