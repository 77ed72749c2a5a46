"""Charts: round axes, every finite point, no markup from names, and files that stand alone."""

import math
from xml.etree import ElementTree

import pytest

from engram.util.charts import Chart, Line, line_chart, scatter, side_by_side, ticks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.953, 0.961), (12, 97), (3, 3), (-2, 1e6)])
def test_ticks_are_few_and_span_the_range(low: float, high: float) -> None:
    marks = ticks(low, high)
    assert 2 <= len(marks) <= 7
    assert marks[0] <= low
    assert marks[-1] >= high
    assert marks == sorted(set(marks))


def test_a_curve_leaves_out_what_is_not_finite() -> None:
    drawn = line_chart([Line("x", [1, 2, 3], [0.5, float("nan"), 0.7])], "title")
    assert "nan" not in drawn
    assert line_chart([Line("x", [1], [float("inf")])], "title") == ""


def test_a_line_without_a_label_ends_with_its_last_finite_value() -> None:
    drawn = line_chart([Line("", [1, 2, 3], [1.0, 2.0, math.nan])], "loss")
    assert ">2.0</text>" in drawn
    assert "nan" not in drawn


def test_a_line_goes_through_its_points() -> None:
    drawn = line_chart([Line("up", [0, 10], [0, 1])], "title", from_zero=True)
    assert 'd="M44.0 200.0L424.0 14.0"' in drawn


def test_points_of_equal_numbers_lie_on_the_line() -> None:
    assert scatter([3.0], [3.0], "one").count("<circle") == 1
    drawn = ElementTree.fromstring(scatter([1.0, 2.0], [1.0, 2.0], "<b>"))
    points = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in drawn.iter("circle")]
    assert points == [(48, 272), (310, 10)]  # the ends of the diagonal
    assert "<b>" not in scatter([1.0], [2.0], "<b>")


@pytest.mark.parametrize("size", [1e-30, 1e-11, 1.0, 1e17, 1e30])
def test_numbers_of_any_size_are_drawn(size: float) -> None:
    assert scatter([size, 3 * size], [size, 2 * size], "far apart").count("<circle") == 2
    assert scatter([size, size], [size, size], "equal").count("<circle") == 2
    assert scatter([-size], [size], "both sides").count("<circle") == 1
    marks = ticks(size, 2 * size)
    assert 4 <= len(marks) <= 6
    assert marks[0] <= size < 2 * size <= marks[-1]


def test_a_file_holds_the_charts_that_have_something_to_show() -> None:
    one = Chart("loss & <score>", line_chart([Line("x", [1, 2], [1, 2])], "one"))
    file = ElementTree.fromstring(side_by_side([one, Chart("none", ""), one]))
    assert file.tag == f"{SVG}svg"
    assert len(file.findall(f"{SVG}svg")) == 2
    assert [text.text for text in file.findall(f"{SVG}text")] == ["loss & <score>"] * 2
    assert file.attrib["viewBox"] == "0 0 920 260"
