"""The best of several trained tasks on validation, and which differences are ties."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def tie_margin(share: Tensor | float, images: int) -> Any:
    """Half a standard error of a share of so many images: smaller differences are ties."""
    return 0.5 * (share * (1 - share) / max(1, images)) ** 0.5


def noise(score: str, metrics: Mapping[str, Any]) -> float:
    """Differences of the score below this are ties; every score is, or is like, a share."""
    share = min(1.0, max(0.0, _number(metrics, score, 0.0)))
    return float(tie_margin(share, int(metrics["images"])))


def ties(score: str, tried: Sequence[Mapping[str, Any]]) -> list[int]:
    """The best by a metric, and those that it is not clearly better than."""
    scores = [_number(metrics, score, -math.inf) for metrics in tried]
    best = scores.index(max(scores))
    least = scores[best] - noise(score, tried[best])
    return [i for i, value in enumerate(scores) if value >= least]


def best_of(score: str, tried: Sequence[Mapping[str, Any]]) -> int:
    """The one with the lowest loss among those that tie for the best."""
    return min(ties(score, tried), key=lambda i: _number(tried[i], "loss", math.inf))


def _number(metrics: Mapping[str, Any], name: str, worst: float) -> float:
    """A metric; the worst there is where it is not a number, or nothing could be measured."""
    value = float(metrics.get(name, worst))
    return worst if math.isnan(value) else value
