"""Commands about images: data, check, suggest, drift."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engram.cli import shared
from engram.cli.arguments import model_of
from engram.cli.flags import argument, option, out_option, switch
from engram.cli.terminal import Watch, announce
from engram.errors import EngramError
from engram.inference.bulk.bulk_settings import PoolSettings
from engram.train.options import DataOptions, RunOptions
from engram.train.recipe import Recipe
from engram.util.settings import Given
from engram.util.text import Description

_NO_TASK = (
    "No task was given; give --task FILE.safetensors, or --backbone to choose the first images to "
    "label before there is a task."
)


@shared.command("data", {DataOptions: "Data"})
def data_command(
    data: str = shared.DATA_ARGUMENT,
    check: bool = switch(
        "Data",
        "Decode every image and look for all duplicates; else a sample of the headers.",
        "--check",
    ),
    *,
    flags: Given,
    progress: Watch,
) -> Description:
    """Print what is understood of a dataset; writes nothing."""
    from engram.data.overview import describe

    splits = DataOptions(**flags[DataOptions]).load(data)
    return describe(splits, check=check, progress=progress)


@shared.command("check", {DataOptions: "Data"}, work="reading the data", threads=True)
def check_command(
    data: str = shared.DATA_ARGUMENT,
    out: Path | None = out_option("Also write a page.", "FILE.html"),
    csv: Path | None = option("Output", "Also write all findings as a table.", metavar="FILE.csv"),
    backbone: str = shared.OWN_BACKBONE,
    image_size: int | None = shared.IMAGE_SIZE,
    backbone_dtype: str = shared.BACKBONE_DTYPE,
    workers: int = shared.WORKERS,
    *,
    flags: Given,
    progress: Watch,
) -> Description:
    """Find wrong labels, near-duplicates, leaks and outliers in a dataset; it stays as it is."""
    from engram.curation.check import check
    from engram.curation.check_output import describe, write_csv, write_page
    from engram.model import MemoryViT
    from engram.report.page import check_page_path
    from engram.train.backbone import backbone_for
    from engram.util.files import check_writable

    if out is not None:
        check_page_path(out)  # before the work, not after it
    if csv is not None:
        check_writable(csv)
    splits = DataOptions(**flags[DataOptions]).load(data, one_class=True)
    progress("loading the backbone", 0, 0)
    options = RunOptions(backbone, image_size, backbone_dtype)
    vit, _ = backbone_for(options, splits, announce=announce, progress=progress)
    model = MemoryViT(vit)
    found = check(model, splits, Recipe(workers=workers), progress)
    if csv is not None:
        write_csv(found, csv)
    if out is not None:
        progress("writing the page", 0, 0)
        write_page(found, model, out)
    result = describe(found)
    for label, path in (("page", out), ("table", csv)):
        if path is not None:
            result.rows.append((label, str(path)))
    return result


@shared.command("suggest", {PoolSettings: "Data"}, work="loading the task", threads=True)
def suggest_command(
    pool: list[str] = argument(
        "POOL…", "Images without labels: folders, images, tables, lists, archives and addresses."
    ),
    task: list[Path] | None = option(
        "Model",
        "The engram that is to learn from the images; with those that it extends, repeated. "
        "Without one, --backbone chooses images that stand for the others.",
        metavar="FILE",
    ),
    count: int = option("Output", "Number of images to choose.", "-n", "--count", default=50),
    labelled: list[str] | None = option(
        "Data",
        "Images that have labels already, such as the training folder: they and their "
        "near-copies are left out; repeatable.",
        metavar="IMAGES",
    ),
    out: list[Path] | None = out_option(
        "Write a table (.csv), a list of paths (.txt) or a contact sheet (.html); repeatable.",
        "FILE",
    ),
    folders: Path | None = option(
        "Output",
        "Copy the images into this folder, next to an empty folder for each class.",
        metavar="FOLDER",
    ),
    backbone: str | None = shared.BACKBONE,
    device: str = shared.DEVICE,
    precision: str = shared.PRECISION,
    backbone_dtype: str = shared.BACKBONE_DTYPE,
    *,
    flags: Given,
    progress: Watch,
) -> Description:
    """Choose the images to label next: those that a task is unsure about, all different."""
    from engram.curation.suggest import suggest, task_to_ask
    from engram.curation.suggest_output import (
        check_folders,
        check_out,
        describe,
        write_suggestions,
    )

    if count < 1:
        raise EngramError(f"--count is {count}; choose at least 1 image.")
    for path in out or ():
        check_out(path)
    settings = PoolSettings(device=device, precision=precision, **flags[PoolSettings])
    model = model_of(task or [], backbone, backbone_dtype, _NO_TASK)
    if folders is not None:
        name = task_to_ask(model)
        check_folders(folders, None if name is None else model.task(name).spec)
    found = suggest(model, pool, count, settings, labelled or (), progress)
    write_suggestions(found, model, pool, settings, out or (), folders)
    return describe(found, out or (), folders)


@shared.command("drift")
def drift_command(
    reference: Path = argument(
        "REFERENCE", "Answers to compare with, which engram predict --out wrote."
    ),
    new: Path = argument("NEW", "Answers of the same tasks about other images."),
    size: float = option(
        None, "Smallest difference that counts as drift, from 0 to 1.", default=0.1
    ),
    fail: bool = switch(None, "Exit with 1 if there is drift.", "--fail"),
    out: Path | None = out_option(
        "Write a page with the distributions and the images that changed most.", "FILE.html"
    ),
    *,
    progress: Watch,
) -> Description:
    """Compare two tables of answers: which tasks see other images than before."""
    from engram.curation.drift import compare, describe, read_answers
    from engram.curation.drift_page import write_drift_page
    from engram.report.page import check_page_path

    if not 0 <= size <= 1:
        raise EngramError(f"--size is {size:g}; it is a share, from 0 to 1.")
    if out is not None:
        check_page_path(out)
    drift = compare(read_answers(reference, progress), read_answers(new, progress), size)
    description = describe(drift)
    if out is not None:
        progress("writing the page", 0, 0)
        write_drift_page(out, drift)
        description.rows.append(("page", str(out)))
    return replace(description, code=1) if fail and drift.tasks else description
