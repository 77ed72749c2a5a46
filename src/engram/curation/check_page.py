"""The page of `engram check`: the most suspicious images, with those that speak for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engram.curation.check import Check, Finding
from engram.curation.findings import name, short_name, summary
from engram.data.overview import Sample, class_counts, label_words
from engram.model import MemoryViT
from engram.report.contents import Content, Facts, ImageRow, ImageTable, Section, Table
from engram.report.images import Thumbnail, backbone_view, thumbnail
from engram.report.page import write_sections
from engram.util.text import without_folder

_MOST = 50  # findings of a kind that the page shows
_ACROSS = 6  # images of a group


@dataclass(frozen=True)
class _Findings:
    """Findings of one kind, and how the page shows them."""

    section: str
    title: str
    columns: Sequence[str]
    note: str
    found: Sequence[Finding]
    words: Callable[[Finding], str]  # about one


def write_page(check: Check, model: MemoryViT, path: Path) -> Path:
    """Write the page and return its path."""
    picture = _pictures(check, model)
    sections = [
        Section("summary", "Summary", [Facts(list(summary(check)))]),
        *(_image_section(check, kind, picture) for kind in _kinds(check)),
        _classes(check),
        _files(check),
    ]
    return write_sections(
        path,
        title=f"{without_folder(check.splits.name)}: what to look at in the data",
        lead="What heads and features of the backbone find suspicious is often right, and not "
        "always: look before you change a label or remove an image.",
        sections=[section for section in sections if section.contents],
        backbone=model.backbone,
    )


def _pictures(check: Check, model: MemoryViT) -> Callable[[Sample], Thumbnail]:
    """Makes the small picture of an image, once."""
    made: dict[str, Thumbnail] = {}

    def picture(sample: Sample) -> Thumbnail:
        called = name(sample)
        if called not in made:
            alt = f"{short_name(check, sample)}: {label_words(*sample)}"
            made[called] = thumbnail(backbone_view(model, *sample), alt)
        return made[called]

    return picture


def _kinds(check: Check) -> Iterator[_Findings]:
    """Everything that is shown with images."""
    yield _Findings(
        "labels", "Labels that look wrong", ["image", "nearest"],
        "The label that an image has, and the one that heads suggest which did not learn from it; "
        "beside it, the nearest images of the suggested class.",
        check.labels,
        lambda one: (
            f"{label_words(*one.sample)}, or {one.suggested}? ({one.score:,.0f} times likelier)"
        ),
    )  # fmt: skip
    yield _Findings(
        "leaks", "Images in two splits", ["image", "in the other split"],
        "Images of one split that show the picture or the scene of an image of an earlier one: "
        "what is measured on them flatters.",
        check.leaks,
        lambda one: f"{one.sample[0].split}, and {one.others[0][0].split} ({one.kind})",
    )  # fmt: skip
    yield _Findings(
        "duplicates", "Near-duplicates", ["images"],
        "Copies are one picture, stored again, resized, cropped or mirrored; frames are images of "
        "one scene. fit keeps both in one fold.",
        check.duplicates,
        lambda one: f"{1 + len(one.others)} {one.kind} ({_labels_of((one.sample, *one.others))})",
    )  # fmt: skip
    yield _Findings(
        "outliers", "Outliers", ["image", "nearest"],
        "Images that are far from all others, and the nearest one.",
        check.outliers,
        lambda one: f"{label_words(*one.sample)} ({one.score:.1f} deviations)",
    )  # fmt: skip


def _labels_of(samples: Sequence[Sample]) -> str:
    return " and ".join(sorted({label_words(*sample) for sample in samples}))


def _image_section(
    check: Check, kind: _Findings, picture: Callable[[Sample], Thumbnail]
) -> Section:
    """A table of the first findings, with their images; nothing where there are none."""
    rows = []
    for one in kind.found[:_MOST]:
        images = [picture(sample) for sample in (one.sample, *one.others)[:_ACROSS]]
        rows.append(ImageRow(kind.words(one), images, short_name(check, one.sample)))
    note, count = kind.note, len(kind.found)
    if count > _MOST:
        note += f" The first {_MOST} of {count:,}; --csv writes all of them."
    table: list[Content] = [ImageTable(kind.columns, rows, note, "findings")]
    return Section(kind.section, kind.title, table if rows else [])


def _classes(check: Check) -> Section:
    """Sizes of classes, and pairs that cannot be told apart."""
    contents: list[Content] = []
    if check.confused:
        pairs = [(f"{a} and {b}", f"{share:.0%}") for a, b, share in check.confused[:_MOST]]
        note = "Share of the images of two classes that were taken for the other one."
        contents.append(Table(["classes that are hard to tell apart", "confused"], pairs, note))
    counts = class_counts(check.splits)
    rows = [
        (one, *(f"{found[c]:,}" for found in counts.values()))
        for c, one in enumerate(check.splits.classes)
    ]
    if counts:
        contents.append(Table(["class", *counts], rows, "Images of each class."))
    return Section("classes", "Classes", contents)


def _files(check: Check) -> Section:
    contents: list[Content] = []
    if check.unreadable:
        contents.append(Table(["cannot be read"], [(one,) for one in check.unreadable[:_MOST]]))
    if check.tiny and not check.mostly_tiny:
        rows = [(short_name(check, one), f"{w} x {h}") for one, (w, h) in check.tiny[:_MOST]]
        contents.append(Table(["tiny images", "pixels"], rows))
    return Section("files", "Files", contents)
