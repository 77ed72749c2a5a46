"""The demo's sections: what was measured, and a broken promise is not hidden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engram.experiments.demo import answers_section, mask_section, proof_section, timing_section
from engram.report.contents import Section
from engram.report.page import write_sections


def html_of(section: Section, folder: Path) -> str:
    page = write_sections(folder / "r.html", "Demo", "", [section])
    return page.read_text(encoding="utf-8")


def test_answers_stand_next_to_the_truth(tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "answers": {
            "base": {"class": "a & b", "probability": 0.5},
            "count": {"class": "three", "probability": 0.75},
        },
        "truth": {"count": "three"},
    }
    html = html_of(answers_section(asked, np.zeros((8, 8, 3), dtype=np.uint8)), tmp_path)
    assert "a &amp; b" in html
    assert "<td class=words>three</td><td class=words>three</td><td>75%</td><td>right" in html
    assert "data:image/png" in html


def test_times_and_the_missing_mask_are_bars(tmp_path: Path) -> None:
    passes = {"one_pass_ms": 5.0, "pass_per_task_ms": 20.0, "plain_backbone_ms": 4.0, "ratio": 4.0}
    html = html_of(timing_section(passes), tmp_path)
    assert "width:25.0%" in html  # one pass takes a quarter of the longest
    assert "4.0 times as long" in html
    unmasked = {
        "task": "digits",
        "steps": [
            {"beside": [], "with_mask": 0.9, "without_mask": 0.9},
            {"beside": ["shape", "count"], "with_mask": 0.9, "without_mask": 0.3},
        ],
        "base_answers_changed": 0.42,
    }
    html = html_of(mask_section(unmasked), tmp_path)
    assert "with shape and count, no mask" in html
    assert "base changes 42% of its answers" in html


@pytest.mark.parametrize("identical", [True, False])
def test_a_broken_promise_is_shown(identical: bool, tmp_path: Path) -> None:
    html = html_of(proof_section(identical, 200), tmp_path)
    assert ("bit for bit" in html) is identical
    assert ("Please report this" in html) is not identical
