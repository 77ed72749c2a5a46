"""The masks and the IoU of each class of a segmentation."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.reports import answered, noise, write_page

from engram.report.contents import Bars
from engram.report.findings import FINDINGS, MAX_MASKS


def test_masks_are_shown_from_the_worst_to_the_best(tmp_path: Path) -> None:
    model, answers = answered(noise(30, kind="segmentation"))
    html, _ = write_page(tmp_path / "r.html", model, answers)
    shown = [float(part.partition("%")[0]) / 100 for part in html.split("<td>IoU ")[1:]]
    assert len(shown) == MAX_MASKS
    assert shown == sorted(shown)
    right, predicted, true = answers.logits.double().unbind(1)
    each = (right / (predicted + true - right)).nanmean(1)
    assert shown[0] == pytest.approx(float(each.min()), abs=1e-3)
    assert shown[-1] == pytest.approx(float(each.max()), abs=1e-3)


def test_iou_is_over_the_pixels_of_all_images() -> None:
    model, answers = answered(noise(6, kind="segmentation"))
    bars = FINDINGS["segmentation"](model, answers)[1].contents[0]
    assert isinstance(bars, Bars)
    right, predicted, true = answers.logits.sum(0).double()
    for bar, iou in zip(bars.bars, right / (predicted + true - right), strict=True):
        assert bar.share == pytest.approx(float(iou), abs=1e-6)
