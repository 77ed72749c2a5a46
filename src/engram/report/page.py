"""A page: one HTML file that needs nothing else, no script, no network, images and style inside.

What grows with the data is cut to a fixed number, and the page says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engram import __version__
from engram.errors import EngramError
from engram.report.contents import Section
from engram.util.charts import STYLE
from engram.util.files import check_writable, write_atomically
from engram.util.templates import render
from engram.util.text import utf8, without_folder
from engram.vit import ViT


def check_page_path(path: Path) -> None:
    """Refuse a path where a page cannot be written, or would replace anything but a page."""
    check_writable(path)
    if path.exists():
        with open(path, "rb") as file:
            if not file.read(15).lower().startswith(b"<!doctype html"):
                raise EngramError(f"{path} exists and is not an HTML page; choose another name.")


def write_sections(
    path: Path, title: str, lead: str, sections: Sequence[Section], backbone: ViT | None = None
) -> Path:
    """Write a page of these sections, without empty ones, and return its path.

    It names the backbone that it is about, if there is one.
    """
    html = render(
        "engram.report",
        "page.html.j2",
        title=title,
        lead=lead,
        sections=[section for section in sections if section.contents],
        chart_style=STYLE,
        version=__version__,
        # without its folder: the page may be sent to other people
        backbone=backbone and without_folder(backbone.source),
        fingerprint=backbone and backbone.fingerprint,
    )
    write_atomically(path, utf8(html), owner_only=True)  # it has images of the data
    return path
