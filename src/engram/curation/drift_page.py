"""The page about two tables of answers: distributions, and the images that changed most."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engram.curation.drift import COLUMNS, Comparison, Drift, changed_answers, least_familiar
from engram.images.decode import BadImage, read_image
from engram.report.contents import (
    MAX_CLASSES,
    Charts,
    Content,
    Facts,
    Picture,
    Pictures,
    Section,
    Table,
    Text,
)
from engram.report.images import thumbnail
from engram.report.page import write_sections
from engram.util.charts import Chart, Line, line_chart
from engram.util.text import counted

MAX_PICTURES = 12
_BINS = 24
_TRIED = 4  # times as many images are looked for as are shown


def write_drift_page(path: Path, drift: Drift) -> None:
    """Write the page: a section about all tasks, and one for each."""
    lead = f"Drift in {', '.join(drift.tasks)}." if drift.tasks else "No drift."
    facts = [
        (title, f"{table.path.name}: {counted(table.rows, 'row')}, {table.unreadable:,} unreadable")
        for title, table in (("reference", drift.reference), ("new", drift.new))
    ]
    note = (
        "Drift is a difference that is significant among all of these tests and has a size of at "
        f"least {drift.least:g}. The size is the largest difference between the two cumulative "
        "distributions, or the share of answers that would have to change."
    )
    table = Table(COLUMNS, drift.table, note, text_columns=4)
    sections = [Section("all", "All tasks", [Facts(facts), table])]
    for name in dict.fromkeys(one.task for one in drift.comparisons):
        sections.append(Section(f"task-{name}", name, list(_contents(name, drift))))
    write_sections(path, "Drift", lead, sections)


def _contents(name: str, drift: Drift) -> Iterator[Content]:
    comparisons = [one for one in drift.comparisons if one.task == name]
    charts = [Chart(one.name, _histogram(one)) for one in comparisons if not one.classes]
    if charts:
        yield Charts(charts, "Shares of the images. Solid: reference; dashed: new.")
    for one in comparisons:
        if one.classes:
            yield Section(f"answers-{name}", "Answers", [_answers(one)])
    reference, new = drift.reference.tasks[name], drift.new.tasks[name]
    changed = changed_answers(reference, new)
    both = len(reference.keys() & new.keys())
    if both:
        about = f"{len(changed):,} of {counted(both, 'image')} in both tables"
        shown = (
            (image, now.words, [f"before: {before.words}"])
            for image, before, now in changed[: _TRIED * MAX_PICTURES]
        )
        pictures = _pictures(shown, f"{about}, those with the surest answers first.")
        yield Section(f"changed-{name}", "Other answers than before", [pictures])
    least = least_familiar(new)
    if least:
        shown = (
            (image, f"familiarity {one.familiarity:.2f}", [one.words])
            for image, one in least[: _TRIED * MAX_PICTURES]
        )
        below = sum((one.familiarity or 0) < 0 for _, one in least)
        note = f"{below:,} of {counted(len(least), 'image')} have a familiarity below 0."
        yield Section(f"unfamiliar-{name}", "Least familiar now", [_pictures(shown, note)])


def _histogram(one: Comparison) -> str:
    """Shares of both tables in bins; of the outermost values, 1 % are in the last bins."""
    every = np.concatenate([one.reference, one.new])
    low, high = (float(f"{x:.2g}") for x in np.quantile(every, [0.01, 0.99]))  # as axes show it
    high = high if high > low else low + 1
    edges, places = np.linspace(low, high, _BINS + 1), np.linspace(low, high, _BINS).tolist()
    lines = []
    for label, values in (("reference", one.reference), ("new", one.new)):
        counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
        lines.append(Line(label, places, (counts / len(values)).tolist()))
    return line_chart(lines, one.name, from_zero=True)


def _answers(one: Comparison) -> Table:
    rows = sorted(one.shares(), key=lambda share: -abs(share[2] - share[1]))
    note = "Shares of the images, the largest change first."
    if len(rows) > MAX_CLASSES:
        note = f"The {MAX_CLASSES} of {len(rows):,} classes that changed most. {note}"
    cells = [
        (name, f"{before:.1%}", f"{now:.1%}", f"{100 * (now - before):+.1f}")
        for name, before, now in rows[:MAX_CLASSES]
    ]
    return Table(("class", "reference", "new", "points"), cells, note)


def _pictures(rows: Iterator[tuple[str, str, list[str]]], note: str) -> Content:
    """Images with a title and lines; those that are not files on this machine are listed."""
    found, missing = list[Picture](), list[str]()
    for image, title, lines in rows:
        if len(found) == MAX_PICTURES:
            break
        try:
            small = read_image(image, name=image)
        except BadImage:
            missing.append(f"{image}: {title}")
            continue
        small.thumbnail((320, 320))
        found.append(Picture(thumbnail(np.asarray(small), title), image, title, lines))
    if found:
        return Pictures(found, note)
    listed = "; ".join(missing[:MAX_PICTURES])
    return Text(f"{note} None of them is a file here: {listed}." if missing else note)
