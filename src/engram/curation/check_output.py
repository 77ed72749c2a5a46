"""Findings of `engram check` as a document, as rows and a table, as CSV, and as a page."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from engram.curation.check import Check, Finding
from engram.data.overview import Sample, class_counts, class_list, class_rows, label_words
from engram.inference.bulk.table_formats import safe_text
from engram.model import MemoryViT
from engram.report.contents import Content, Facts, ImageRow, ImageTable, Section, Table
from engram.report.images import Thumbnail, backbone_view, thumbnail
from engram.report.page import write_sections
from engram.util.files import write_atomically
from engram.util.text import Description, counted, utf8, without_folder

_SHOWN = 5  # findings of each kind that a terminal shows
_ON_PAGE = 50  # findings of a kind that the page shows
_ACROSS = 6  # images of a group

_LEGEND = (
    "score: how many times likelier the suggested label is; the cosine of the features of two "
    "images; how far an outlier is, in deviations"
)
_LEAD = (
    "What heads and features of the backbone find suspicious is often right, and not always: look "
    "before you change a label or remove an image."
)
_COLUMNS = ("finding", "path", "split", "label", "suggested", "other", "score")


def name(sample: Sample) -> str:
    """The path of an image, or its row."""
    return sample[0].sample_name(sample[1])


def short_name(check: Check, sample: Sample) -> str:
    """The path of an image below the folder of the data."""
    called, folder = name(sample), check.splits.name
    return os.path.relpath(called, folder) if os.path.isdir(folder) else called


def document(check: Check) -> dict[str, Any]:
    """All findings, for machines; the most suspicious first in every list."""
    return {
        "data": check.splits.name,
        "images": check.images,
        "labels": [
            _about(one.sample)
            | {"suggested": one.suggested, "odds": round(one.score, 1)}
            | {"nearest": [name(witness) for witness in one.others]}
            for one in check.labels
        ],
        "duplicates": [
            {
                "path": name(one.sample),
                "paths": [name(sample) for sample in (one.sample, *one.others)],
                "splits": [sample[0].split for sample in (one.sample, *one.others)],
                "labels": [label_words(*sample) for sample in (one.sample, *one.others)],
                "kind": one.kind,
                "similarity": round(one.score, 4),
            }
            for one in check.duplicates
        ],
        "leaks": [
            _about(one.sample)
            | {
                "of": name(one.others[0]),
                "of_split": one.others[0][0].split,
                "of_label": label_words(*one.others[0]),
                "kind": one.kind,
                "similarity": round(one.score, 4),
            }
            for one in check.leaks
        ],
        "outliers": [
            _about(one.sample) | {"nearest": name(one.others[0]), "deviations": round(one.score, 2)}
            for one in check.outliers
        ],
        "confused": [
            {"classes": classes, "share": round(share, 4)} for *classes, share in check.confused
        ],
        "unreadable": list(check.unreadable),
        "tiny": [_about(sample) | {"size": list(size)} for sample, size in check.tiny],
        "classes": class_list(check.splits),
        "unchecked": check.unchecked,
    }


def _about(sample: Sample) -> dict[str, str]:
    return {"path": name(sample), "split": sample[0].split, "label": label_words(*sample)}


# For people


def describe(check: Check) -> Description:
    """Counts of all findings, and a table of the most suspicious."""
    rows = [("data", f"{check.splits.name}: {counted(check.images, 'image')}"), *summary(check)]
    table = [
        tuple(row)
        for kind, found in _findings(check, partial(short_name, check))
        for row in islice(found, 0 if kind == "tiny" and check.mostly_tiny else _SHOWN)
    ]
    return Description(document(check), rows, _COLUMNS, tuple(table), (_LEGEND,) if table else ())


def summary(check: Check) -> Iterator[tuple[str, str]]:
    """A sentence about every kind of finding."""
    yield "labels", check.unchecked or _count(check.labels, "look wrong", "looks wrong")
    copies = [one for one in check.duplicates if one.kind == "copies"]
    frames = [one for one in check.duplicates if one.kind == "frames"]
    groups = f"{_groups(copies)} of one picture; {_groups(frames)} of one scene"
    yield "duplicates", groups if check.duplicates else "none"
    if len(check.splits.datasets) > 1:
        yield "leaks", leak_words(check) or "none"
    yield "outliers", _count(check.outliers, "are far from all others", "is far from all others")
    if check.confused:
        first, second, share = check.confused[0]
        pairs = f"{counted(len(check.confused), 'pair')} of classes"
        yield "confused", f"{pairs}, most {first} and {second} ({share:.0%})"
    if check.unreadable:
        yield "unreadable", counted(len(check.unreadable), "image")
    if check.tiny:
        width, height = check.tiny[0][1]
        images = counted(len(check.tiny), "image")
        yield "tiny", f"{images}, the smallest of {width}x{height} pixels"


def leak_words(check: Check) -> str:
    """Say how many images of which split are in another one, too."""
    found = []
    for split in check.splits.datasets:
        own = [one for one in check.leaks if one.sample[0].split == split]
        copies = sum(one.kind == "copies" for one in own)
        if copies:
            others = " and ".join(sorted({one.others[0][0].split for one in own}))
            are = "is" if copies == 1 else "are"
            found.append(f"{counted(copies, 'image')} of {split} {are} also in {others}")
        if len(own) > copies:
            many = len(own) - copies
            found.append(
                f"{counted(many, 'image')} of {split} {'show' if many > 1 else 'shows'} "
                "a scene of an earlier split"
            )
    return "; ".join(found)


def _count(found: Sequence[object], many: str, one: str) -> str:
    return f"{len(found):,} {one if len(found) == 1 else many}" if found else "none"


def _groups(groups: Sequence[Finding]) -> str:
    images = sum(1 + len(one.others) for one in groups)
    return f"{counted(len(groups), 'group')} ({counted(images, 'image')})"


def _findings(
    check: Check, called: Callable[[Sample], str] = name
) -> Iterator[tuple[str, Iterator[Sequence[str]]]]:
    """Rows of the table of all findings, by kind; images are called as the function says."""

    def row(
        kind: str, sample: Sample, score: str, other: str = "", suggested: str = ""
    ) -> list[str]:
        about = [called(sample), sample[0].split, label_words(*sample)]
        return [kind, *about, suggested, other, score]

    def rows(kind: str, found: Sequence[Finding], digits: int) -> Iterator[Sequence[str]]:
        for one in found:
            score, other = f"{one.score:.{digits}f}", called(one.others[0])
            yield row(kind, one.sample, score, other, one.suggested)

    yield "labels", rows("label", check.labels, 0)
    yield (
        "duplicates",
        (
            row(one.kind, sample, f"{one.score:.3f}", called(one.sample))
            for one in check.duplicates
            for sample in one.others
        ),
    )
    yield "leaks", rows("leak", check.leaks, 3)
    yield "outliers", rows("outlier", check.outliers, 1)
    yield "tiny", (row("tiny", sample, f"{size[0]}x{size[1]}") for sample, size in check.tiny)
    parts = (one.partition(": ") for one in check.unreadable)
    yield "unreadable", (["unreadable", path, "", "", "", why, ""] for path, _, why in parts)


def write_csv(check: Check, path: Path) -> None:
    """Write all findings as one table."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(_COLUMNS)
    for _, rows in _findings(check):
        writer.writerows([safe_text(cell) for cell in row] for row in rows)
    write_atomically(path, utf8(text.getvalue()), owner_only=True)


# The page


def write_page(check: Check, model: MemoryViT, path: Path) -> Path:
    """Write the page: the most suspicious images first, next to what speaks for it."""

    @cache
    def picture(sample: Sample) -> Thumbnail:
        alt = f"{short_name(check, sample)}: {label_words(*sample)}"
        return thumbnail(backbone_view(model, *sample), alt)

    def images(
        found: Sequence[Finding], columns: Sequence[str], words: Callable[[Finding], str], note: str
    ) -> list[Content]:
        """A table of the first findings, with their images; nothing where there are none."""
        rows = []
        for one in found[:_ON_PAGE]:
            shown = [picture(sample) for sample in (one.sample, *one.others)[:_ACROSS]]
            rows.append(ImageRow(words(one), shown, short_name(check, one.sample)))
        if len(found) > _ON_PAGE:
            note += f" The first {_ON_PAGE} of {len(found):,}; --csv writes all of them."
        return [ImageTable(columns, rows, note, "findings")] if rows else []

    labels = images(
        check.labels,
        ["image", "nearest"],
        lambda one: (
            f"{label_words(*one.sample)}, or {one.suggested}? ({one.score:,.0f} times likelier)"
        ),
        "The label that an image has, and the one that heads suggest which did not learn from it; "
        "beside it, the nearest images of the suggested class.",
    )
    leaks = images(
        check.leaks,
        ["image", "in the other split"],
        lambda one: f"{one.sample[0].split}, and {one.others[0][0].split} ({one.kind})",
        "Images of one split that show the picture or the scene of an image of an earlier one: "
        "what is measured on them flatters.",
    )
    duplicates = images(
        check.duplicates,
        ["images"],
        lambda one: f"{1 + len(one.others)} {one.kind} ({_labels_of((one.sample, *one.others))})",
        "Copies are one picture, stored again, resized, cropped or mirrored; frames are images of "
        "one scene. fit keeps both in one fold.",
    )
    outliers = images(
        check.outliers,
        ["image", "nearest"],
        lambda one: f"{label_words(*one.sample)} ({one.score:.1f} deviations)",
        "Images that are far from all others, and the nearest one.",
    )
    sections = [
        Section("summary", "Summary", [Facts(list(summary(check)))]),
        Section("labels", "Labels that look wrong", labels),
        Section("leaks", "Images in two splits", leaks),
        Section("duplicates", "Near-duplicates", duplicates),
        Section("outliers", "Outliers", outliers),
        _classes(check),
        _files(check),
    ]
    title = f"{without_folder(check.splits.name)}: what to look at in the data"
    return write_sections(path, title, _LEAD, sections, model.backbone)


def _labels_of(samples: Sequence[Sample]) -> str:
    return " and ".join(sorted({label_words(*sample) for sample in samples}))


def _classes(check: Check) -> Section:
    """Sizes of classes, and pairs that cannot be told apart."""
    contents: list[Content] = []
    if check.confused:
        pairs = [(f"{a} and {b}", f"{share:.0%}") for a, b, share in check.confused[:_ON_PAGE]]
        note = "Share of the images of two classes that were taken for the other one."
        contents.append(Table(["classes that are hard to tell apart", "confused"], pairs, note))
    counts = class_counts(check.splits)
    if counts:
        rows = class_rows(check.splits)
        contents.append(Table(["class", *counts], rows, "Images of each class."))
    return Section("classes", "Classes", contents)


def _files(check: Check) -> Section:
    contents: list[Content] = []
    if check.unreadable:
        contents.append(Table(["cannot be read"], [(one,) for one in check.unreadable[:_ON_PAGE]]))
    if check.tiny and not check.mostly_tiny:
        rows = [(short_name(check, one), f"{w} x {h}") for one, (w, h) in check.tiny[:_ON_PAGE]]
        contents.append(Table(["tiny images", "pixels"], rows))
    return Section("files", "Files", contents)
