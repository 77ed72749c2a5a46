"""The settings of a cluster say what is wrong with them."""

from __future__ import annotations

import pytest

from engram import EngramError
from engram.cluster.settings import ClusterSettings


@pytest.mark.parametrize(
    "wrong", [{"actors": -1}, {"gpus_per_actor": -0.5}, {"timeout": 0.0}, {"retries": -1}]
)
def test_a_number_out_of_range_is_named(wrong: dict[str, int]) -> None:
    with pytest.raises(EngramError, match=next(iter(wrong))):
        ClusterSettings(**wrong)
