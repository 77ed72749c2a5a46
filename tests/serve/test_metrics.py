"""Every service counts for itself."""

from __future__ import annotations

from engram.serve.telemetry import Telemetry


def test_two_services_in_one_process_share_no_metrics() -> None:
    one, other = Telemetry(), Telemetry()
    one.answers.labels("flowers").inc(3)
    one.batch_images.observe(2)
    assert b'engram_answers_total{task="flowers"} 3.0' in one.text()
    assert b"engram_pass_images_sum 2.0" in one.text()
    assert b"flowers" not in other.text()
    assert b"engram_pass_images_sum 0.0" in other.text()
