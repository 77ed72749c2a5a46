"""The demo's page: what was measured comes first, and a broken promise is not hidden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.html import Checker
from tests.support.reports import answered, noise

from engram.experiments.demo import write_demo_page
from engram.report.task_section import TaskPart


def write(path: Path, identical: bool) -> tuple[str, Checker]:
    model, answers = answered(noise(4, "ab"))
    results: dict[str, Any] = {
        "picture": {
            "answers": {
                "base": {"class": "a & b", "probability": 0.5},
                "count": {"class": "three", "probability": 0.75},
            },
            "truth": {"count": "three"},
        },
        "base_identical": identical,
        "passes": {"one_pass_ms": 5.0, "pass_per_task_ms": 20.0, "plain_backbone_ms": 4.0},
        "without_mask": {
            "task": "digits",
            "steps": [
                {"beside": [], "with_mask": 0.9, "without_mask": 0.9},
                {"beside": ["shape", "count"], "with_mask": 0.9, "without_mask": 0.3},
            ],
            "base_answers_changed": 0.42,
        },
    }
    scene = np.zeros((8, 8, 3), dtype=np.uint8)
    write_demo_page(path, model, [TaskPart(answers)], results, scene)
    html = path.read_text(encoding="utf-8")
    return html, Checker(html)


def test_measurements_come_before_the_tasks(tmp_path: Path) -> None:
    html, page = write(tmp_path / "r.html", identical=True)
    assert [key for key in page.ids if key in ("ask", "proof", "timing", "mask", "task-t")] == [
        "ask", "proof", "timing", "mask", "task-t",
    ]  # fmt: skip
    assert "a &amp; b" in html
    assert "<td class=words>three</td><td class=words>three</td><td>75%</td>" in html
    assert "width:25.0%" in html  # one pass takes a quarter of the longest
    assert "with shape and count, no mask" in html
    assert "base changes 42% of its answers" in html


@pytest.mark.parametrize("identical", [True, False])
def test_a_broken_promise_is_shown(identical: bool, tmp_path: Path) -> None:
    html, _ = write(tmp_path / "r.html", identical)
    assert ("bit for bit" in html) is identical
    assert ("Please report this" in html) is not identical
