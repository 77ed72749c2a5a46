"""Which of several trained tasks is the best on validation, and which differences are noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def noise(score: str, metrics: Mapping[str, Any]) -> float:
    """Half a standard error of the score: what a smaller difference is worth nobody knows.

    As for a share of the validation images, which every score is or is like.
    """
    share = min(1.0, max(0.0, _number(metrics, score, 0.0)))
    return 0.5 * math.sqrt(share * (1 - share) / max(1, int(metrics["images"])))


def best_of(score: str, tried: Sequence[Mapping[str, Any]]) -> int:
    """The one with the lowest loss among the best by a metric, but for noise."""
    return min(_best(score, tried), key=lambda i: _number(tried[i], "loss", math.inf))


def smallest_of(score: str, tried: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> int:
    """The smallest file among the best by a metric, but for noise."""
    return min(_best(score, tried), key=lambda i: sizes[i])


def _best(score: str, tried: Sequence[Mapping[str, Any]]) -> list[int]:
    scores = [_number(metrics, score, -math.inf) for metrics in tried]
    best = scores.index(max(scores))
    least = scores[best] - noise(score, tried[best])
    return [i for i, value in enumerate(scores) if value >= least]


def _number(metrics: Mapping[str, Any], name: str, worst: float) -> float:
    """A metric; the worst there is where it is not a number, or nothing could be measured."""
    value = float(metrics.get(name, worst))
    return worst if math.isnan(value) else value
