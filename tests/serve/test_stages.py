"""Stages of a request: their time is counted, also if they fail."""

from __future__ import annotations

import pytest

from engram.serve.telemetry import DECODE, PASS, Telemetry


def test_a_stage_that_fails_is_counted_and_time_never_runs_back() -> None:
    telemetry = Telemetry()
    with pytest.raises(RuntimeError), telemetry.stage(DECODE):
        raise RuntimeError
    telemetry.record_stage(PASS, 5, 1)
    text = telemetry.text().decode()
    assert 'engram_stage_seconds_count{stage="decode"} 1.0' in text
    assert 'engram_stage_seconds_sum{stage="pass"} 0.0' in text
