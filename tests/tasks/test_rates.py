"""Every regime has a learning rate of its own."""

import pytest

from engram.tasks.rates import RATES, default_rate
from engram.tasks.regimes import REGIMES


@pytest.mark.parametrize("optimizer", RATES)
def test_every_regime_has_a_rate(optimizer: str) -> None:
    assert all(0 < default_rate(optimizer, regime) < 1 for regime in REGIMES)


def test_regimes_that_are_alike_share_a_rate() -> None:
    assert default_rate("adamw", "mlp-head") == default_rate("adamw", "head")
    assert default_rate("sgd", "masked+adapter") == default_rate("sgd", "masked")
