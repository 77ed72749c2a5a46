"""Pieces of a page: paragraphs, tables, bars, charts and small pictures, as HTML.

Everything that comes from a user is escaped here; nothing needs a script or another file.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Sequence
from html import escape

from PIL import Image

from engram.images.decode import Pixels

Table = Sequence[Sequence[str]]


def paragraph(text: str, quiet: bool = False) -> str:
    return f'<p class="quiet">{escape(text)}</p>' if quiet else f"<p>{escape(text)}</p>"


def table(
    columns: Sequence[str],
    rows: Table,
    note: str = "",
    chosen: int | None = None,
    words: int = 1,
) -> str:
    """A table whose first `words` columns are words; row `chosen` stands out."""

    def cell(kind: str, i: int, text: str) -> str:
        return f"<{kind}{' class=words' if i < words else ''}>{escape(text)}</{kind}>"

    head = "".join(cell("th", i, text) for i, text in enumerate(columns))
    body = "".join(
        f"<tr{' class=chosen' if r == chosen else ''}>"
        + "".join(cell("td", i, text) for i, text in enumerate(row))
        + "</tr>"
        for r, row in enumerate(rows)
    )
    return (
        f"{paragraph(note, quiet=True) if note else ''}"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def bars(rows: Iterable[tuple[str, float, str]], kinds: Sequence[str] = ()) -> str:
    """Horizontal bars: a label, a share from 0 to 1, and what stands at its end."""
    html = ""
    for i, (label, share, text) in enumerate(rows):
        kind = f' class="{kinds[i]}"' if kinds else ""
        width = 100 * min(1.0, max(0.0, share))
        html += (
            f'<span title="{escape(label)}">{escape(short(label, 40))}</span>'
            f'<i><u{kind} style="width:{width:.1f}%"></u></i><b>{escape(text)}</b>'
        )
    return f'<div class="bars">{html}</div>'


def chart(
    lines: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    title: str,
    from_zero: bool = False,
) -> str:
    """Lines over a common axis, drawn as SVG; what is not finite is left out."""
    points = [
        (x, y) for _, xs, ys in lines for x, y in zip(xs, ys, strict=True) if math.isfinite(y)
    ]
    if not points:
        return ""
    left, right, top, bottom, width, height = 44, 16, 14, 30, 440, 230
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    marks = ticks(0 if from_zero else min(y for _, y in points), max(y for _, y in points))
    low_y, high_y = marks[0], marks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        up = (y - low_y) / (high_y - low_y)
        return left + across * (width - left - right), height - bottom - up * (
            height - top - bottom
        )

    svg = ""
    for tick in marks:
        y = at(low_x, tick)[1]
        svg += f'<path class="axis" d="M{left} {y:.1f}H{width - right}"/>'
        svg += f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
    for x, anchor in ((low_x, "start"), (high_x, "end")):
        place = at(x, low_y)[0]
        svg += f'<text x="{place:.1f}" y="{height - 10}" text-anchor="{anchor}">{x:,g}</text>'
    for i, (label, xs, ys) in enumerate(lines):
        kind = "ab"[i % 2]
        finite = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
        drawn = [at(x, y) for x, y in finite]
        if not drawn:
            continue
        d = "L".join(f"{x:.1f} {y:.1f}" for x, y in drawn)
        svg += f'<path class="line {kind}" d="M{d}"/>'
        if label:
            svg += (
                f'<text class="{kind}" x="{width - right}" y="{top + 14 + 16 * i}" '
                f'text-anchor="end">{escape(label)}</text>'
            )
        else:
            x, y = drawn[-1]
            svg += f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
            svg += (
                f'<text class="{kind}" x="{x - 6:.1f}" y="{y - 9 if y > 40 else y + 20:.1f}" '
                f'text-anchor="end">{finite[-1][1]:.1f}</text>'
            )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{svg}</svg>'
        "</figure>"
    )


def scatter(xs: Sequence[float], ys: Sequence[float], title: str) -> str:
    """A point for each pair over the diagonal where both are equal, drawn as SVG."""
    edge, side = 48, 320
    marks = ticks(min(*xs, *ys), max(*xs, *ys))
    low, high = marks[0], marks[-1]

    def at(value: float) -> float:
        return (value - low) / (high - low) * (side - edge - 10)

    svg = ""
    for mark in marks:
        x, y = edge + at(mark), side - edge - at(mark)
        svg += f'<path class="axis" d="M{edge} {y:.1f}H{side - 10}M{x:.1f} 10V{side - edge}"/>'
        svg += f'<text x="{edge - 6}" y="{y + 4:.1f}" text-anchor="end">{mark:g}</text>'
        svg += f'<text x="{x:.1f}" y="{side - edge + 16}" text-anchor="middle">{mark:g}</text>'
    svg += f'<path class="line b" d="M{edge} {side - edge}L{side - 10} 10"/>'
    for one, other in zip(xs, ys, strict=True):
        svg += (
            f'<circle class="dot" cx="{edge + at(one):.1f}" cy="{side - edge - at(other):.1f}" '
            'r="2.2" opacity=".6"/>'
        )
    svg += f'<text x="{(side + edge) / 2:.0f}" y="{side - 10}" text-anchor="middle">true</text>'
    svg += (
        f'<text x="12" y="{side / 2:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 12 {side / 2:.0f})">answered</text>'
    )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {side} {side}" role="img" aria-label="{escape(title)}">{svg}</svg>'
        "</figure>"
    )


def key(names: Iterable[tuple[str, str]]) -> str:
    """What colours mean: pairs of a name and a CSS colour."""
    rows = "".join(
        f'<li><i style="background:{colour}"></i>{escape(short(name, 40))}</li>'
        for name, colour in names
    )
    return f'<ul class="key">{rows}</ul>'


def picture(pixels: Pixels, alt: str) -> str:
    """A small picture as part of the page: up to 64 pixels as they are, larger ones reduced."""
    image = Image.fromarray(pixels)
    tiny = max(image.size) <= 64
    stream = io.BytesIO()
    if tiny:
        image.save(stream, "PNG")
    else:
        image.thumbnail((160, 160))
        image.save(stream, "JPEG", quality=82)
    data = base64.b64encode(stream.getvalue()).decode()
    kind = "png" if tiny else "jpeg"
    return (
        f'<img{" class=tiny" if tiny else ""} alt="{escape(alt)}" width="{image.width}" '
        f'height="{image.height}" src="data:image/{kind};base64,{data}">'
    )


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd></div>" for a, b in pairs)
    return f'<dl class="facts">{rows}</dl>'


def block(key: str, title: str, html: str) -> str:
    return f'<div id="{escape(key)}"><h3>{escape(title)}</h3>{html}</div>'


def short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def ticks(low: float, high: float) -> list[float]:
    """Four to six round numbers that span a range."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # equal, or as good as
        about = max(0.5, 1e-3 * abs(low))
        low, high = low - about, high + about
    step = 10 ** math.floor(math.log10(high - low))
    for factor in (0.2, 0.25, 0.5, 1, 2):
        if (high - low) / (step * factor) <= 4.5:
            step *= factor
            break
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]
