"""One page that shows how good tasks are and why: tables, curves, mistakes, attention.

`write_report` makes one HTML file that needs nothing else: no script, no network, images and
style inside. What grows with the data is cut to a fixed number, and the page says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engram import __version__
from engram.model import MemoryViT
from engram.report.contents import Section
from engram.report.costs_section import costs_section
from engram.report.task_section import TaskPart, task_section
from engram.util.charts import STYLE
from engram.util.files import write_atomically
from engram.util.templates import render
from engram.util.text import utf8, without_folder
from engram.vit import ViT


def write_report(
    path: str | Path,
    model: MemoryViT,
    parts: Sequence[TaskPart],
    *,
    title: str,
    lead: str = "",
    first: Sequence[Section] = (),
) -> Path:
    """Write the page about these tasks, after the sections `first`, and return its path."""
    specs = [model.task(part.answers.task).spec for part in parts]
    tasks = [task_section(model, part) for part in parts]
    return write_sections(
        path,
        title=title,
        lead=lead,
        sections=[*first, *tasks, costs_section(model, specs)],
        backbone=model.backbone,
    )


def write_sections(
    path: str | Path,
    *,
    title: str,
    lead: str,
    sections: Sequence[Section],
    backbone: ViT | None = None,
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
    return Path(path)
