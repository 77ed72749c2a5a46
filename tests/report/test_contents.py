"""Everything a page may consist of is drawn, and its texts are escaped."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.reports import answered, noise, write_page

from engram.report import contents
from engram.report.contents import (
    AttentionShares,
    Bar,
    Bars,
    Charts,
    Content,
    Facts,
    ImageRow,
    ImageTable,
    LayerShares,
    Links,
    Matrix,
    MatrixCell,
    Mistake,
    Mistakes,
    Picture,
    Pictures,
    Section,
    Table,
    Text,
)
from engram.report.images import thumbnail
from engram.util.charts import Chart, Line, line_chart

NASTY = "<b onclick='x'>\"&"
IMAGE = thumbnail(np.zeros((4, 4, 3), dtype=np.uint8), NASTY)
TABLE = Table([NASTY], [[NASTY]], NASTY)
EXAMPLES: list[Content] = [
    Text(NASTY),
    Facts([(NASTY, NASTY)]),
    TABLE,
    Links([(NASTY, NASTY)], NASTY),
    Bars([Bar(NASTY, 2.0, NASTY)], NASTY),
    Charts([Chart(NASTY, line_chart([Line(NASTY, [1, 2], [1, 2])], NASTY))], NASTY),
    Mistakes([Mistake(IMAGE, NASTY, [NASTY] * 9, [], NASTY, NASTY)], NASTY),
    Pictures([Picture(IMAGE, NASTY, NASTY, [NASTY])], NASTY),
    Matrix([NASTY], [[MatrixCell(1, 1.0, "right", NASTY)]], NASTY, tall=True),
    ImageTable([NASTY], [ImageRow(NASTY, [IMAGE], NASTY)], NASTY, "masks", [(NASTY, "red")]),
    AttentionShares([NASTY], [LayerShares(1, [(0, 1.0)], NASTY)], NASTY),
    Section("inner", NASTY, [Text(NASTY)]),
]


def drawn(content: Content, tmp_path: Path) -> tuple[str, set[str]]:
    model, answers = answered(noise(2, "ab"))
    section = Section("first", "First", [content])
    html, found = write_page(tmp_path / "r.html", model, answers, first=[section])
    return html.split('id="first"')[1].split("</section>")[0], found.tags


@pytest.mark.parametrize("content", EXAMPLES, ids=lambda content: content.macro)
def test_contents_are_drawn_and_escaped(content: Content, tmp_path: Path) -> None:
    html, _ = drawn(content, tmp_path)
    assert "&lt;b onclick=" in html
    assert "<b onclick" not in html


def test_every_type_has_an_example() -> None:
    types: set[Any] = {
        one
        for one in vars(contents).values()
        if isinstance(one, type) and issubclass(one, Content) and one is not Content
    }
    assert types == {type(example) for example in EXAMPLES}
    assert all(is_dataclass(one) and fields(one) for one in types)


def test_bars_are_no_longer_than_their_place(tmp_path: Path) -> None:
    bars = Bars([Bar("a", 2.0, "2"), Bar("b", -1.0, "-1", "wrong"), Bar("c", 0.25, "1/4")])
    html, _ = drawn(bars, tmp_path)
    assert html.count("width:100.0%") == html.count("width:0.0%") == html.count("width:25.0%") == 1
    assert 'class="wrong"' in html


def test_long_names_are_shortened(tmp_path: Path) -> None:
    html, _ = drawn(Bars([Bar("n" * 41, 1.0, "")]), tmp_path)
    assert f'title="{"n" * 41}">{"n" * 39}…<' in html
    html, _ = drawn(Bars([Bar("n" * 40, 1.0, "")]), tmp_path)
    assert f">{'n' * 40}<" in html


def test_many_labels_are_cut(tmp_path: Path) -> None:
    mistake = Mistake(IMAGE, "x.png", ["n" * 30, *"abcdefg"], [])
    html, _ = drawn(Mistakes([mistake], "note"), tmp_path)
    assert f"{'n' * 23}…, a, b, c, d, e, …</span>" in html
    assert ">none</span>" in html
