"""Stages of a request: their time is counted, also if they fail."""

from __future__ import annotations

import pytest

from engram.serve.metrics import Metrics
from engram.serve.stages import DECODE, PASS, Stages
from engram.serve.tracing import Tracing


def test_a_stage_that_fails_is_counted_and_time_never_runs_back() -> None:
    metrics = Metrics()
    stages = Stages(metrics, Tracing())
    with pytest.raises(RuntimeError), stages.stage(DECODE):
        raise RuntimeError
    stages.record(PASS, 5, 1)
    text = metrics.text().decode()
    assert 'engram_stage_seconds_count{stage="decode"} 1.0' in text
    assert 'engram_stage_seconds_sum{stage="pass"} 0.0' in text
