"""Pieces of a page: paragraphs, tables, bars, charts and small pictures, as HTML.

Everything that comes from a user is escaped here; nothing needs a script or another file.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape

from PIL import Image

from engram.images.decode import Pixels
from engram.util.charts import Chart

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


def charts(drawn: Iterable[Chart]) -> str:
    """Charts in a row, each below its title."""
    figures = "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"
        for title, svg in drawn
        if svg
    )
    return f'<div class="charts">{figures}</div>'


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
