"""Which of several trained tasks is the best on validation, and which differences are noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from engram.tasks.kinds import Kind


def noise(kind: Kind, metrics: Mapping[str, Any]) -> float:
    """Half a standard error of the score: what a smaller difference is worth nobody knows.

    As for a share of the validation images, which every score is or is like.
    """
    share = min(1.0, max(0.0, _number(metrics, kind.score, 0.0)))
    return 0.5 * math.sqrt(share * (1 - share) / max(1, int(metrics["images"])))


def best_of(kind: Kind, tried: Sequence[Mapping[str, Any]]) -> int:
    """The one with the lowest loss among the best, but for noise."""
    return min(_best(kind, tried), key=lambda i: _number(tried[i], "loss", math.inf))


def smallest_of(kind: Kind, tried: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> int:
    """The smallest file among the best, but for noise."""
    return min(_best(kind, tried), key=lambda i: sizes[i])


def _best(kind: Kind, tried: Sequence[Mapping[str, Any]]) -> list[int]:
    scores = [_number(metrics, kind.score, -math.inf) for metrics in tried]
    best = scores.index(max(scores))
    least = scores[best] - noise(kind, tried[best])
    return [i for i, score in enumerate(scores) if score >= least]


def _number(metrics: Mapping[str, Any], name: str, worst: float) -> float:
    """A metric; the worst there is where it is not a number, or nothing could be measured."""
    value = float(metrics.get(name, worst))
    return worst if math.isnan(value) else value
