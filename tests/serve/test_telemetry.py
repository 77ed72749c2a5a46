"""Every service counts for itself, and times the stages of a request, also if they fail."""

from __future__ import annotations

import pytest

from engram.serve import telemetry as module
from engram.serve.telemetry import DECODE, PASS, Telemetry


def test_a_stage_that_fails_is_counted_and_time_never_runs_back() -> None:
    telemetry = Telemetry()
    with pytest.raises(RuntimeError), telemetry.stage(DECODE):
        raise RuntimeError
    telemetry.record_stage(PASS, 5, 1)
    text = telemetry.text().decode()
    assert 'engram_stage_seconds_count{stage="decode"} 1.0' in text
    assert 'engram_stage_seconds_sum{stage="pass"} 0.0' in text


def test_two_services_in_one_process_share_no_metrics() -> None:
    one, other = Telemetry(), Telemetry()
    one.answers.labels("flowers").inc(3)
    one.batch_images.observe(2)
    assert b'engram_answers_total{task="flowers"} 3.0' in one.text()
    assert b"engram_pass_images_sum 2.0" in one.text()
    assert b"flowers" not in other.text()
    assert b"engram_pass_images_sum 0.0" in other.text()


def test_classes_are_counted_until_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_SERIES", 3)
    telemetry = Telemetry()
    for name in ("rose", "tulip", "lily", "rose", "daisy"):
        telemetry.record_answer("flowers", [name], 0.9, None)
    text = telemetry.text().decode()
    assert 'engram_answer_classes_total{class="rose",task="flowers"} 2.0' in text
    assert 'engram_answer_classes_total{class="other",task="flowers"} 2.0' in text
    assert "daisy" not in text
    assert 'engram_answer_confidence_count{task="flowers"} 5.0' in text
