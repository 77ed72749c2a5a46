"""`engram suggest`: which images to label next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engram.cli.application import (
    Backbone,
    BackboneDtype,
    Device,
    Json,
    Precision,
    Threads,
    app,
)
from engram.cli.bars import bars
from engram.cli.flags import DATA, MODEL, OUTPUT, flags_from, option
from engram.cli.terminal import show
from engram.errors import EngramError
from engram.inference.bulk.bulk_settings import PoolSettings
from engram.util.description import Description
from engram.util.settings import Given
from engram.util.text import counted

if TYPE_CHECKING:
    from engram.curation.suggest import Suggestions
    from engram.model import MemoryViT


@app.command(name="suggest")
@flags_from({PoolSettings: DATA})
def suggest_command(
    pool: Annotated[
        list[str],
        typer.Argument(
            metavar="POOL…",
            help="Images without labels: folders, images, tables, lists, archives and addresses.",
        ),
    ],
    task: Annotated[
        list[Path] | None,
        option(
            MODEL,
            "The engram that is to learn from the images; with those that it extends, repeated. "
            "Without one, --backbone chooses images that stand for the others.",
            metavar="FILE",
        ),
    ] = None,
    count: Annotated[int, option(OUTPUT, "Number of images to choose.", "-n", "--count")] = 50,
    labelled: Annotated[
        list[str] | None,
        option(
            DATA,
            "Images that have labels already, such as the training folder: they and their "
            "near-copies are left out; repeatable.",
            metavar="IMAGES",
        ),
    ] = None,
    out: Annotated[
        list[Path] | None,
        option(
            OUTPUT,
            "Write a table (.csv), a list of paths (.txt) or a contact sheet (.html); repeatable.",
            "-o",
            "--out",
            metavar="FILE",
        ),
    ] = None,
    folders: Annotated[
        Path | None,
        option(
            OUTPUT,
            "Copy the images into this folder, next to an empty folder for each class.",
            metavar="FOLDER",
        ),
    ] = None,
    backbone: Backbone = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    backbone_dtype: BackboneDtype = "fp32",
    threads: Threads = None,
    as_json: Json = False,
    *,
    flags: Given,
) -> None:
    """Choose the images to label next: those that a task is unsure about, all different."""
    from engram.curation.suggest import suggest, task_to_ask
    from engram.curation.suggest_output import check_folders, check_out, write_suggestions

    if count < 1:
        raise EngramError(f"--count is {count}; choose at least 1 image.")
    for path in out or ():
        check_out(path)
    settings = PoolSettings(device=device, precision=precision, **flags[PoolSettings])
    with bars(as_json) as progress:
        progress("loading the task", 0, 0)
        model = _model(task or [], backbone, backbone_dtype)
        name = task_to_ask(model) if task else None
        if folders is not None:
            check_folders(folders, None if name is None else model.task(name).spec)
        found = suggest(
            model, pool, count, settings, task=name, labelled=labelled or (), progress=progress
        )
        write_suggestions(found, model, pool, settings, out or (), folders)
    show(_description(found, out or (), folders), as_json)


def _model(task: list[Path], backbone: str | None, backbone_dtype: str) -> MemoryViT:
    from engram.backbones.load import load_backbone
    from engram.inference.engine import load_model
    from engram.model import MemoryViT

    if task:
        return load_model(task, backbone, backbone_dtype=backbone_dtype)
    if backbone is None:
        raise EngramError(
            "No task was given; give --task FILE.safetensors, or --backbone to choose the first "
            "images to label before there is a task."
        )
    return MemoryViT(load_backbone(backbone, dtype=backbone_dtype))


def _description(found: Suggestions, out: Sequence[Path], folders: Path | None) -> Description:
    from engram.curation.suggest_output import suggestion_row

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
    columns = ["image", "answer", "uncertainty", "familiarity", "copies"]
    columns = [name for name in columns if any(row[name] not in (None, 0) for row in suggested)]
    table = tuple(tuple(_cell(row[name]) for name in columns) for row in suggested)
    legend = [found.note] if found.note else []
    return Description(document, rows, tuple(columns), table, tuple(legend))


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
