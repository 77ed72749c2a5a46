"""The page of `engram check`: the most suspicious images, with those that speak for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from engram.curation.check import Check
from engram.curation.findings import name, short_name, summary
from engram.data.overview import Sample, class_counts, label_words
from engram.model import MemoryViT
from engram.report.contents import Content, Facts, ImageRow, ImageTable, Section, Table
from engram.report.images import Thumbnail, backbone_view, thumbnail
from engram.report.page import write_sections
from engram.util.text import without_folder

_MOST = 50  # findings of a kind that the page shows
_ACROSS = 6  # images of a group

F = TypeVar("F")


def write_page(check: Check, model: MemoryViT, path: Path) -> Path:
    """Write the page and return its path."""
    picture = _pictures(check, model)
    sections = [
        Section("summary", "Summary", [Facts(list(summary(check)))]),
        _labels(check, picture),
        _leaks(check, picture),
        _duplicates(check, picture),
        _outliers(check, picture),
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


def _shown(found: Sequence[F], note: str) -> tuple[Sequence[F], str]:
    """The first findings, and a note that says if there are more."""
    if len(found) <= _MOST:
        return found, note
    return found[:_MOST], f"{note} The first {_MOST} of {len(found):,}; --csv writes all of them."


def _labels(check: Check, picture: Callable[[Sample], Thumbnail]) -> Section:
    found, note = _shown(
        check.labels,
        "The label that an image has, and the one that heads suggest which did not learn from it; "
        "beside it, the nearest images of the suggested class.",
    )
    rows = [
        ImageRow(
            f"{label_words(*one.sample)}, or {one.suggested}? ({one.odds:,.0f} times likelier)",
            [picture(sample) for sample in (one.sample, *one.witnesses)],
            short_name(check, one.sample),
        )
        for one in found
    ]
    contents: list[Content] = [ImageTable(["image", "nearest"], rows, note, "findings")]
    return Section("labels", "Labels that look wrong", contents if rows else [])


def _leaks(check: Check, picture: Callable[[Sample], Thumbnail]) -> Section:
    found, note = _shown(
        check.leaks,
        "Images of one split that show the picture or the scene of an image of an earlier one: "
        "what is measured on them flatters.",
    )
    rows = [
        ImageRow(
            f"{one.sample[0].split}, and {one.other[0].split} ({one.kind})",
            [picture(one.sample), picture(one.other)],
            short_name(check, one.sample),
        )
        for one in found
    ]
    contents: list[Content] = [ImageTable(["image", "in the other split"], rows, note, "findings")]
    return Section("leaks", "Images in two splits", contents if rows else [])


def _duplicates(check: Check, picture: Callable[[Sample], Thumbnail]) -> Section:
    found, note = _shown(
        check.duplicates,
        "Copies are one picture, stored again, resized, cropped or mirrored; frames are images of "
        "one scene. fit keeps both in one fold.",
    )
    rows = [
        ImageRow(
            f"{len(one.samples)} {one.kind} ({_labels_of(one.samples)})",
            [picture(sample) for sample in one.samples[:_ACROSS]],
            short_name(check, one.samples[0]),
        )
        for one in found
    ]
    contents: list[Content] = [ImageTable(["images"], rows, note, "findings")]
    return Section("duplicates", "Near-duplicates", contents if rows else [])


def _labels_of(samples: Sequence[Sample]) -> str:
    return " and ".join(sorted({label_words(*sample) for sample in samples}))


def _outliers(check: Check, picture: Callable[[Sample], Thumbnail]) -> Section:
    found, note = _shown(
        check.outliers, "Images that are far from all others, and the nearest one."
    )
    rows = [
        ImageRow(
            f"{label_words(*one.sample)} ({one.distance:.1f} deviations)",
            [picture(one.sample), picture(one.nearest)],
            short_name(check, one.sample),
        )
        for one in found
    ]
    contents: list[Content] = [ImageTable(["image", "nearest"], rows, note, "findings")]
    return Section("outliers", "Outliers", contents if rows else [])


def _classes(check: Check) -> Section:
    """Sizes of classes, and pairs that cannot be told apart."""
    contents: list[Content] = []
    if check.confused:
        pairs = [(" and ".join(one.classes), f"{one.share:.0%}") for one in check.confused[:_MOST]]
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
