"""The learning rates that suit the regimes, where a recipe gives none."""

from __future__ import annotations

from collections.abc import Mapping

#: By optimiser and regime.
RATES: Mapping[str, Mapping[str, float]] = {
    "adamw": {
        "full": 1e-4,
        "adapter": 1e-3,
        "memory": 1e-3,
        "head": 3e-3,
        "masked": 1e-3,
        "masked+adapter": 5e-4,
        "side": 3e-3,
    },
    "sgd": {
        "full": 1e-2,
        "adapter": 0.1,
        "memory": 0.3,
        "head": 0.3,
        "masked": 0.3,
        "side": 0.1,
    },
}


_SAME = {"mlp-head": "head", "readout": "head", "class": "memory", "memory+adapter": "adapter"}


def default_rate(optimizer: str, regime: str) -> float:
    """The learning rate of a regime when none is given."""
    rates, same = RATES[optimizer], _SAME.get(regime, regime)
    return rates[same if same in rates else same.split("+")[0]]
