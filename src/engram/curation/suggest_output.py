"""Files of suggestions: a list or table of paths, a contact sheet, and folders to sort into."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

from engram.curation.suggest import Suggestion, Suggestions, images_again
from engram.data.folders import SUFFIXES
from engram.errors import EngramError
from engram.images.views import evaluation_view
from engram.inference.bulk.addresses import is_address
from engram.inference.bulk.bulk_settings import PoolSettings
from engram.inference.bulk.table_formats import Csv
from engram.model import MemoryViT
from engram.report.contents import Facts, Picture, Pictures, Section
from engram.report.images import Thumbnail, thumbnail
from engram.report.page import check_page_path, write_sections
from engram.tasks.spec import TaskSpec
from engram.util.files import check_writable, make_folder, write_atomically
from engram.util.text import Description, counted, utf8

MOST_SHOWN = 500  # images of a contact sheet
_COLUMNS = ("image", "answer", "uncertainty", "familiarity", "copies")


def check_out(path: Path) -> None:
    """Refuse a file of another type, and one that cannot be written, before the work."""
    if path.suffix.lower() not in (".csv", ".txt", ".html"):
        raise EngramError(
            f"{path} is no file for suggestions; give one that ends in .csv (a table), .txt (a "
            "list of paths) or .html (a contact sheet)."
        )
    check_page_path(path) if path.suffix.lower() == ".html" else check_writable(path, "file")


def suggestion_row(one: Suggestion) -> dict[str, object]:
    """A suggestion as a row of a table and as JSON has it."""
    uncertainty = None if one.uncertainty is None else round(one.uncertainty, 4)
    values = one.item.name, one.answer or None, uncertainty, one.familiarity, one.copies
    return dict(zip(_COLUMNS, values, strict=True))


def describe(found: Suggestions, out: Sequence[Path], folders: Path | None) -> Description:
    """The suggestions as a document, rows and a table, with the files that were written."""
    suggested = [suggestion_row(one) for one in found.chosen]
    document = {
        "images": found.images,
        "unreadable": found.failed,
        "labelled_already": found.known,
        "task": found.task,
        "suggested": suggested,
    }
    rows = [("pool", counted(found.images, "image"))]
    if found.failed:
        reason = next(iter(found.failed.values()))
        rows.append(("unreadable", f"{len(found.failed):,}, left out, such as {reason}"))
    if found.known:
        rows.append(("labelled already", f"{counted(found.known, 'image')}, left out"))
    rows.append(("to label", counted(len(found.chosen), "image")))
    rows += [("written", str(path)) for path in out]
    if folders is not None:
        rows.append(("to sort", f"{folders}: move every image into the folder of its class"))
    columns = [name for name in _COLUMNS if any(row[name] not in (None, 0) for row in suggested)]
    table = [[_cell(row[name]) for name in columns] for row in suggested]
    return Description(document, rows, columns, table, [found.note] if found.note else [])


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def write_suggestions(
    found: Suggestions,
    model: MemoryViT,
    sources: Sequence[str],
    settings: PoolSettings,
    out: Sequence[Path] = (),
    folders: Path | None = None,
) -> None:
    """Write lists, contact sheets and folders; the chosen images are read again for these."""
    sheets = [path for path in out if path.suffix.lower() == ".html"]
    shown = {one.number for one in found.chosen[:MOST_SHOWN]} if sheets else set()
    thumbnails: dict[int, Thumbnail] = {}
    if folders is not None:
        classes = model.task(found.task).spec.classes if found.task else ()
        for name in classes:
            make_folder(folders / name)
    for one, encoded in images_again(found, sources, settings) if sheets or folders else ():
        if one.number in shown:
            view = evaluation_view(encoded, model.preprocessing, name=one.item.name)
            thumbnails[one.number] = thumbnail(view, one.answer or one.item.name)
        if folders is not None:
            _put_image(folders, one, encoded)
    for path in out:
        if path in sheets:
            _write_sheet(path, found, thumbnails)
        else:
            _write_list(path, found)


def _write_list(path: Path, suggestions: Suggestions) -> None:
    """Write a table (.csv), or the paths alone (.txt), as `predict` and `fit` read them."""
    places = [_beside(path, one.item.place) for one in suggestions.chosen]
    if path.suffix.lower() == ".csv":
        rows = zip(map(suggestion_row, suggestions.chosen), places, strict=True)
        table = [{**row, "image": utf8(place).decode()} for row, place in rows]
        Csv(dict.fromkeys(_COLUMNS, "text")).write(path, table)
    else:
        write_atomically(path, b"".join(os.fsencode(place) + b"\n" for place in places))


def _beside(file: Path, place: str) -> str:
    """A path or address as a list or table names it: relative to its own folder."""
    if is_address(place) or os.path.isabs(place):
        return place
    return os.path.relpath(place, file.parent)


# The contact sheet


def _write_sheet(path: Path, suggestions: Suggestions, thumbnails: Mapping[int, Thumbnail]) -> None:
    """Write the page with all images to label, or the first of them, in their order."""
    chosen = suggestions.chosen
    shown = [one for one in chosen if one.number in thumbnails]
    note = "The first one is worth most. Uncertainty is 1 where two classes are equally likely."
    if len(shown) < len(chosen):
        note = f"The first {len(shown):,} of {counted(len(chosen), 'image')}. {note}"
    pictures = [
        Picture(thumbnails[one.number], one.item.name, f"{i}. {one.answer}", _lines(one))
        for i, one in enumerate(shown, start=1)
    ]
    facts = [
        ("to label", f"{len(chosen):,}"),
        ("images in the pool", f"{suggestions.images:,}"),
        ("near-copies left out", f"{sum(one.copies for one in chosen):,}"),
        ("labelled already", f"{suggestions.known:,}"),
        ("unreadable", f"{len(suggestions.failed):,}"),
    ]
    section = Section("images", "Images to label next", [Facts(facts), Pictures(pictures, note)])
    title = f"{suggestions.task}: what to label next" if suggestions.task else "What to label first"
    lead = suggestions.note[:1].upper() + suggestions.note[1:]
    write_sections(path, title, lead and f"{lead}.", [section])


def _lines(one: Suggestion) -> list[str]:
    lines = []
    if one.uncertainty is not None:
        lines.append(f"uncertainty {one.uncertainty:.2f}")
    if one.familiarity is not None:
        lines.append(f"familiarity {one.familiarity:.2f}")
    if one.copies:
        lines.append(f"and {counted(one.copies, 'near-copy', 'near-copies')}")
    return lines


# Folders to sort into


def check_folders(folder: Path, task: TaskSpec | None) -> None:
    """Refuse what folders cannot express, before the work."""
    if task is not None and task.kind != "classification":
        raise EngramError(
            f"--folders makes a folder per class, which gives each image one class, and "
            f"{task.name!r} is of the kind {task.kind}; use -o FILE.csv, and add columns of labels."
        )
    for name in task.classes if task is not None else ():
        if name.startswith((".", "__")) or "/" in name or "\0" in name:
            raise EngramError(f"The class {name!r} cannot be a folder; use -o FILE.csv.")
    check_writable(folder / "image", "folder", parents=True)


def _put_image(folder: Path, one: Suggestion, encoded: bytes) -> None:
    """Copy an image into a folder under its own name, or a new one if that is taken."""
    name = os.path.basename(one.item.place)
    stem, suffix = os.path.splitext(name)
    if suffix.lower() not in SUFFIXES:  # a row of a table
        stem, suffix = name.replace("#", "-"), _suffix(encoded)
    path, number = folder / f"{stem}{suffix}", 2
    while path.exists():
        path, number = folder / f"{stem}-{number}{suffix}", number + 1
    write_atomically(path, encoded)


def _suffix(encoded: bytes) -> str:
    with Image.open(io.BytesIO(encoded)) as image:
        return f".{str(image.format).lower()}"
