"""Charts as SVG, drawn without a plotting library: lines over an axis, points over a diagonal.

An HTML page inserts a chart as it is and adds `STYLE` to its own style; `side_by_side` makes a
file of several charts. Every text in a chart is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

#: Colours are the page's variables, or those of a white page where there are none.
STYLE = """
.chart { font-size: 12px; }
.chart text { fill: var(--quiet, #5d6877); }
.chart .axis { stroke: var(--line, #dde2e9); fill: none; }
.chart .line { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
.chart .line.a { stroke: var(--accent, #6938c9); }
.chart .line.b { stroke: var(--second, #c2562a); stroke-dasharray: 5 3; }
.chart .line.c { stroke: var(--quiet, #5d6877); stroke-dasharray: 2 3; }
.chart text.a, .chart text.b, .chart text.c { font-weight: 600; }
.chart text.a { fill: var(--accent, #6938c9); }
.chart text.b { fill: var(--second, #c2562a); }
.chart .bar.a { fill: var(--accent, #6938c9); }
.chart .bar.b { fill: var(--second, #c2562a); }
.chart .line.mark { stroke: var(--quiet, #5d6877); stroke-width: 1.4; stroke-dasharray: 4 3; }
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
    drawn = [
        (label, [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)])
        for label, xs, ys in lines
    ]
    xs, ys = ([point[axis] for _, points in drawn for point in points] for axis in (0, 1))
    if not ys:
        return ""
    marks = ticks(0 if from_zero else min(ys), max(ys))
    across = _Scale(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    up = _Scale(marks[0], marks[-1], _HEIGHT - _BOTTOM, _TOP)
    parts = []
    for mark in marks:
        parts.append(f'<path class="axis" d="M{_LEFT} {up(mark):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(_text(f"{mark:g}", _LEFT - 6, up(mark) + 4, "end"))
    for x, anchor in ((min(xs), "start"), (max(xs), "end")):
        parts.append(_text(f"{x:,g}", across(x), _HEIGHT - 10, anchor))
    for i, (label, points) in enumerate(drawn):
        if not points:
            continue
        style, places = "abc"[i % 3], [(across(x), up(y)) for x, y in points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path class="line {style}" d="M{path}"/>')
        if label:
            parts.append(_text(label, _WIDTH - _RIGHT, _TOP + 14 + 16 * i, "end", style))
            continue
        x, y = places[-1]
        parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>')
        below = y <= 40  # above it, the value would leave the drawing
        at = y + 20 if below else y - 9
        parts.append(_text(f"{points[-1][1]:.1f}", x - 6, at, "end", style))
    return _drawing(_WIDTH, _HEIGHT, title, parts)


def scatter(xs: Sequence[float], ys: Sequence[float], title: str) -> str:
    """A point for each pair of a true (x) and a predicted (y) value, and the line x = y."""
    marks = ticks(min(*xs, *ys), max(*xs, *ys))
    across = _Scale(marks[0], marks[-1], _EDGE, _SIDE - _MARGIN)
    up = _Scale(marks[0], marks[-1], _SIDE - _EDGE, _MARGIN)
    parts = []
    for mark in marks:
        x, y = across(mark), up(mark)
        grid = f"M{_EDGE} {y:.1f}H{_SIDE - _MARGIN}M{x:.1f} {_MARGIN}V{_SIDE - _EDGE}"
        parts.append(f'<path class="axis" d="{grid}"/>')
        parts.append(_text(f"{mark:g}", _EDGE - 6, y + 4, "end"))
        parts.append(_text(f"{mark:g}", x, _SIDE - _EDGE + 16, "middle"))
    diagonal = f"M{_EDGE} {_SIDE - _EDGE}L{_SIDE - _MARGIN} {_MARGIN}"
    parts.append(f'<path class="line b" d="{diagonal}"/>')
    for x, y in zip(xs, ys, strict=True):
        at = f'cx="{across(x):.1f}" cy="{up(y):.1f}"'
        parts.append(f'<circle class="dot" {at} r="2.2" opacity=".6"/>')
    parts.append(_text("true", (_SIDE + _EDGE) / 2, _SIDE - 10, "middle"))
    name = _text("predicted", 12, _SIDE / 2, "middle")
    parts.append(f'<g transform="rotate(-90 12 {_SIDE // 2})">{name}</g>')
    return _drawing(_SIDE, _SIDE, title, parts)


def histogram(
    groups: Sequence[tuple[str, Sequence[float]]], title: str, mark: float, bins: int = 30
) -> str:
    """Bars of how many values each group has in every bin, and a dashed line at `mark`."""
    values = [mark, *(value for _, own in groups for value in own)]
    marks = ticks(min(values), max(values))
    across = _Scale(marks[0], marks[-1], _LEFT, _WIDTH - _RIGHT)
    step = (marks[-1] - marks[0]) / bins
    counts = [[0] * bins for _ in groups]
    for own, (_, group) in zip(counts, groups, strict=True):
        for value in group:
            own[min(bins - 1, int((value - marks[0]) / step))] += 1
    most = max(1, *(max(own) for own in counts))
    up = _Scale(0, most, _HEIGHT - _BOTTOM, _TOP)
    parts = [_text(f"{most:,}", _LEFT - 6, up(most) + 4, "end")]
    parts.append(f'<path class="axis" d="M{_LEFT} {up(0):.1f}H{_WIDTH - _RIGHT}"/>')
    parts += [_text(f"{one:g}", across(one), _HEIGHT - 10, "middle") for one in marks]
    width = (across(marks[-1]) - across(marks[0])) / bins / len(groups)
    for i, ((label, _), own) in enumerate(zip(groups, counts, strict=True)):
        style = "ab"[i % 2]
        for place, count in enumerate(own):
            x = across(marks[0] + place * step) + i * width
            box = f'x="{x:.1f}" y="{up(count):.1f}" width="{width:.1f}"'
            parts.append(f'<rect class="bar {style}" {box} height="{up(0) - up(count):.1f}"/>')
        parts.append(_text(label, _WIDTH - _RIGHT, _TOP + 14 + 16 * i, "end", style))
    line = f"M{across(mark):.1f} {_TOP}V{_HEIGHT - _BOTTOM}"
    parts.append(f'<path class="line mark" d="{line}"/>')
    return _drawing(_WIDTH, _HEIGHT, title, parts)


def side_by_side(charts: Sequence[Chart]) -> str:
    """One SVG file with line charts in a row, each below its title, on white."""
    drawn = [chart for chart in charts if chart.svg]
    width, height = (_WIDTH + 20) * len(drawn), _HEIGHT + 30
    parts = [f"<style>{STYLE}</style>", f'<rect width="{width}" height="{height}" fill="white"/>']
    for i, chart in enumerate(drawn):
        left = 10 + (_WIDTH + 20) * i
        parts.append(_text(chart.title, left + 4, 20, "start"))
        place = f'<svg x="{left}" y="28" width="{_WIDTH}" height="{_HEIGHT}" '
        parts.append(chart.svg.replace("<svg ", place, 1))
    titles = ", ".join(chart.title for chart in drawn)
    file = 'xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif"'
    return _drawing(width, height, titles, parts, file) + "\n"


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


def _drawing(width: int, height: int, title: str, parts: Sequence[str], more: str = "") -> str:
    attributes = f'class="chart" viewBox="0 0 {width} {height}" role="img" {more}'
    return f'<svg {attributes.rstrip()} aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _text(text: str, x: float, y: float, anchor: str, style: str = "") -> str:
    style = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'
