"""What a page shows of every kind of task, however strange its names and few its answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.reports import answered, noise, sweep_of, write_page

from engram.report.contents import MAX_CLASSES
from engram.report.findings import FINDINGS
from engram.report.run_page import tried_section
from engram.tasks.kinds import KINDS

SUBSECTIONS = {
    "classification": {"confusion", "classes", "mistakes", "attention", "shares"},
    "multilabel": {"classes", "mistakes", "attention", "shares"},
    "regression": {"scatter", "classes", "mistakes", "attention", "shares"},
    "segmentation": {"masks", "classes", "attention", "shares"},
    "anomaly": {"scores", "maps"},
}
CUT = {  # what a page says of 60 classes
    "classification": f"Only the {MAX_CLASSES} of 60 classes",
    "multilabel": f"The {MAX_CLASSES} worst of 60 classes",
    "regression": "The first 6 of 60 numbers",
    "segmentation": f"The {MAX_CLASSES} worst of 60 classes",
}


def test_every_kind_has_findings() -> None:
    assert FINDINGS.keys() == KINDS.keys() == SUBSECTIONS.keys()


@pytest.mark.parametrize("kind", FINDINGS)
@pytest.mark.parametrize("images", [1, 14])
def test_every_kind_has_its_page(kind: str, images: int, tmp_path: Path) -> None:
    model, answers = answered(noise(images, kind=kind))
    tried = tried_section(sweep_of(kind), KINDS[kind])
    html, found = write_page(tmp_path / "r.html", model, answers, tried)
    expected = {f"{name}-t" for name in (*SUBSECTIONS[kind], "curves", "settings")}
    assert expected | {"task-t", "regimes"} <= set(found.ids)
    assert len(set(found.ids)) == len(found.ids)
    assert found.fetched == []
    assert "script" not in found.tags
    assert KINDS[kind].title in html
    assert html.count("data:image/png") >= images


@pytest.mark.parametrize("kind", CUT)
def test_many_classes_are_cut(kind: str, tmp_path: Path) -> None:
    names = tuple(f"name {i}" for i in range(60))
    model, answers = answered(noise(20, names, kind), cells=1)
    html, _ = write_page(tmp_path / "r.html", model, answers)
    assert CUT[kind] in html
    assert len(html) < 1_500_000
