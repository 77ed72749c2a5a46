"""Charts as SVG, drawn without a plotting library: lines over an axis, points over a diagonal.

An HTML page inserts a chart as it is and adds `STYLE` to its own style; `side_by_side` makes a
file of several charts. Every text in a chart is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.etree import ElementTree

#: Colours are the page's variables, or those of a white page where there are none.
STYLE = """
.chart { font-size: 12px; }
.chart text { fill: var(--quiet, #5d6877); }
.chart .axis { stroke: var(--line, #dde2e9); fill: none; }
.chart .line { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
.chart .line.a { stroke: var(--accent, #6938c9); }
.chart .line.b { stroke: var(--second, #c2562a); stroke-dasharray: 5 3; }
.chart text.a, .chart text.b { font-weight: 600; }
.chart text.a { fill: var(--accent, #6938c9); }
.chart text.b { fill: var(--second, #c2562a); }
.chart .dot { fill: var(--accent, #6938c9); }
"""

_WIDTH, _HEIGHT = 440, 230  # of a line chart
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 16, 14, 30
_SIDE, _EDGE, _MARGIN = 320, 48, 10  # of a scatter plot: its size, and the space around the points


class Chart(NamedTuple):
    title: str
    svg: str  # empty if there was nothing to draw


class Line(NamedTuple):
    label: str  # if empty, the last value is written at the end of the line
    xs: Sequence[float]
    ys: Sequence[float]


class _Scale(NamedTuple):
    """A linear map from values to positions in the drawing."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + share * (self.end - self.start)


def line_chart(lines: Sequence[Line], title: str, from_zero: bool = False) -> str:
    """Lines over common axes; points that are not finite are left out."""
    lines = [_finite(*line) for line in lines]
    xs = [x for line in lines for x in line.xs]
    ys = [y for line in lines for y in line.ys]
    if not ys:
        return ""
    marks = ticks(0 if from_zero else min(ys), max(ys))
    across = _Scale(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    up = _Scale(marks[0], marks[-1], _HEIGHT - _BOTTOM, _TOP)
    svg = _drawing(_WIDTH, _HEIGHT, title)
    for mark in marks:
        _add(svg, "path", class_="axis", d=f"M{_LEFT} {up(mark):.1f}H{_WIDTH - _RIGHT}")
        _text(svg, f"{mark:g}", _LEFT - 6, up(mark) + 4, "end")
    for x, anchor in ((min(xs), "start"), (max(xs), "end")):
        _text(svg, f"{x:,g}", across(x), _HEIGHT - 10, anchor)
    for i, line in enumerate(lines):
        if line.ys:
            points = [(across(x), up(y)) for x, y in zip(line.xs, line.ys, strict=True)]
            _draw_line(svg, i, line, points)
    return _markup(svg)


def _finite(label: str, xs: Sequence[float], ys: Sequence[float]) -> Line:
    kept = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    return Line(label, [x for x, _ in kept], [y for _, y in kept])


def _draw_line(
    svg: ElementTree.Element, i: int, line: Line, points: Sequence[tuple[float, float]]
) -> None:
    style = "ab"[i % 2]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    _add(svg, "path", class_=f"line {style}", d=f"M{path}")
    if line.label:
        _text(svg, line.label, _WIDTH - _RIGHT, _TOP + 14 + 16 * i, "end", style)
        return
    x, y = points[-1]
    _add(svg, "circle", class_="dot", cx=f"{x:.1f}", cy=f"{y:.1f}", r="3.5")
    below = y <= 40  # above it, the value would leave the drawing
    _text(svg, f"{line.ys[-1]:.1f}", x - 6, y + 20 if below else y - 9, "end", style)


def scatter(xs: Sequence[float], ys: Sequence[float], title: str) -> str:
    """A point for each pair of a true (x) and a predicted (y) value, and the line x = y."""
    marks = ticks(min(*xs, *ys), max(*xs, *ys))
    across = _Scale(marks[0], marks[-1], _EDGE, _SIDE - _MARGIN)
    up = _Scale(marks[0], marks[-1], _SIDE - _EDGE, _MARGIN)
    svg = _drawing(_SIDE, _SIDE, title)
    for mark in marks:
        x, y = across(mark), up(mark)
        grid = f"M{_EDGE} {y:.1f}H{_SIDE - _MARGIN}M{x:.1f} {_MARGIN}V{_SIDE - _EDGE}"
        _add(svg, "path", class_="axis", d=grid)
        _text(svg, f"{mark:g}", _EDGE - 6, y + 4, "end")
        _text(svg, f"{mark:g}", x, _SIDE - _EDGE + 16, "middle")
    diagonal = f"M{_EDGE} {_SIDE - _EDGE}L{_SIDE - _MARGIN} {_MARGIN}"
    _add(svg, "path", class_="line b", d=diagonal)
    for x, y in zip(xs, ys, strict=True):
        at = {"cx": f"{across(x):.1f}", "cy": f"{up(y):.1f}"}
        _add(svg, "circle", class_="dot", **at, r="2.2", opacity=".6")
    _text(svg, "true", (_SIDE + _EDGE) / 2, _SIDE - 10, "middle")
    name = _text(svg, "predicted", 12, _SIDE / 2, "middle")
    name.set("transform", f"rotate(-90 12 {_SIDE / 2:.0f})")
    return _markup(svg)


def side_by_side(charts: Sequence[Chart]) -> str:
    """One SVG file with line charts in a row, each below its title, on white."""
    drawn = [chart for chart in charts if chart.svg]
    width, height = (_WIDTH + 20) * len(drawn), _HEIGHT + 30
    svg = _drawing(width, height, ", ".join(chart.title for chart in drawn))
    svg.set("xmlns", "http://www.w3.org/2000/svg")
    svg.set("font-family", "system-ui, sans-serif")
    _add(svg, "style").text = STYLE
    _add(svg, "rect", width=str(width), height=str(height), fill="white")
    for i, chart in enumerate(drawn):
        left = 10 + (_WIDTH + 20) * i
        _text(svg, chart.title, left + 4, 20, "start")
        inner = ElementTree.fromstring(chart.svg)
        place = {"x": left, "y": 28, "width": _WIDTH, "height": _HEIGHT}
        inner.attrib.update({key: str(value) for key, value in place.items()})
        svg.append(inner)
    return _markup(svg) + "\n"


def ticks(low: float, high: float) -> list[float]:
    """Four to six round numbers that span a range."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # the same number, up to rounding
        margin = max(0.5, 1e-3 * abs(low))
        low, high = low - margin, high + margin
    step = 10 ** math.floor(math.log10(high - low))
    for factor in (0.2, 0.25, 0.5, 1, 2):
        if (high - low) / (step * factor) <= 4.5:
            step *= factor
            break
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


# SVG elements


def _drawing(width: int, height: int, title: str) -> ElementTree.Element:
    attributes = {"class": "chart", "viewBox": f"0 0 {width} {height}"}
    return ElementTree.Element("svg", {**attributes, "role": "img", "aria-label": title})


def _add(
    parent: ElementTree.Element, tag: str, class_: str = "", **attributes: str
) -> ElementTree.Element:
    if class_:
        attributes["class"] = class_
    return ElementTree.SubElement(parent, tag, attributes)


def _text(
    parent: ElementTree.Element, text: str, x: float, y: float, anchor: str, class_: str = ""
) -> ElementTree.Element:
    element = _add(parent, "text", class_, x=f"{x:.1f}", y=f"{y:.1f}")
    element.set("text-anchor", anchor)
    element.text = text
    return element


def _markup(svg: ElementTree.Element) -> str:
    return ElementTree.tostring(svg, encoding="unicode")
