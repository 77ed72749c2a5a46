"""`engram eval` and `engram embed`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram.cli import shared
from engram.cli.arguments import LabelledTask, labelled_task
from engram.cli.flags import argument, option, out_option, switch
from engram.cli.terminal import Watch, announce
from engram.cli.words_option import embed_texts
from engram.errors import EngramError
from engram.train.options import ColumnOptions, DataOptions, RunOptions
from engram.util.settings import Given
from engram.util.text import Description, counted

if TYPE_CHECKING:
    from engram.inference.evaluate import Answers, VersionComparison
    from engram.model import MemoryViT

_SHOWN = 5  # unreadable images in the summary
_SHOWN_CLASSES = _SHOWN_CHANGES = 20  # in the tables of --against


# Evaluate


@shared.command("eval", {ColumnOptions: "Data"}, work="loading the tasks", threads=True)
def eval_command(
    sources: list[Path] = shared.ENGRAMS,
    data: list[str] | None = shared.TASK_DATA,
    split: str = shared.SPLIT,
    backbone: str | None = shared.BACKBONE,
    batch: int = shared.BATCH,
    workers: int = shared.WORKERS,
    device: str = shared.DEVICE,
    precision: str = shared.PRECISION,
    backbone_dtype: str = shared.BACKBONE_DTYPE,
    skip_bad: bool = switch("Data", "Leave unreadable images out of the count.", "--skip-bad"),
    against: list[Path] | None = option(
        None,
        "An earlier version of a task, or a bundle of them, to compare with; repeatable.",
        metavar="FILE",
    ),
    report: Path | None = option("Output", "Also write a page.", metavar="FILE.html"),
    *,
    flags: Given,
    progress: Watch,
) -> Description:
    """Measure tasks on data, all of them attached together."""
    from engram.inference.engine import TorchEngine, load_model
    from engram.report.page import check_page_path
    from engram.util.processes import ProcessGroup

    if not data:
        raise EngramError("There is nothing to evaluate on; give --data NAME=DATA.")
    if report is not None:
        check_page_path(report)  # before an hour of work, not after it
    processes = ProcessGroup(device)
    model = load_model(sources, backbone, backbone_dtype=backbone_dtype)
    columns, given = ColumnOptions(**flags[ColumnOptions]), dict[str, LabelledTask]()
    for text in data:
        one = labelled_task(model, list(model.tasks), text, split, columns)
        if one.name in given:
            raise EngramError(
                f"--data {text}: there is data for {one.name!r} already; evaluate on one after "
                "the other."
            )
        given[one.name] = one

    def measured(model: MemoryViT, name: str, when: str = "") -> Answers:
        engine = TorchEngine(model, device=processes.device, precision=precision)
        return given[name].answers(
            model, engine=engine, batch=batch, workers=workers, processes=processes,
            progress=partial(progress, f"{name}{when}"),
        )  # fmt: skip

    found = [measured(model, name) for name in given]
    comparisons: dict[str, Description] = {}
    if against:
        older = load_model(against, backbone, backbone_dtype=backbone_dtype)
        for new in found:
            old = measured(older, new.task, " before")
            comparisons[new.task] = _describe_comparison(old, new, skip_bad)
    rows = []
    if report is not None and processes.main:
        progress("writing the report", 0, 0)
        rows = _write_report(report, model, found)
    metrics = {
        one.task: {
            "split": one.dataset.split,
            **one.metrics(skip_bad),
            **one.without_leaks(given[one.task].leaked, skip_bad),
            **({"against": c.document} if (c := comparisons.get(one.task)) else {}),
        }
        for one in found
    }
    rows += _leak_rows(model, metrics)
    return replace(_describe_metrics(model, metrics, rows), below=list(comparisons.values()))


def _describe_comparison(old: Answers, new: Answers, skip_bad: bool) -> Description:
    """Tables of `--against` for a task: its classes, and the images whose answers changed."""
    from engram.inference.evaluate import compare

    found, kind = compare(old, new), new.kind
    before, after = (one.metrics(skip_bad) for one in (old, new))
    document = {
        "before": {name: value for name, value in before.items() if name != "unreadable"},
        "classes": {name: {"before": w, "after": n} for name, (w, n) in found.classes.items()},
        "mended": found.mended,
        "broken": found.broken,
        "changed": [asdict(change) for change in found.changes],
    }

    def row(name: str, was: float, now: float) -> tuple[str, ...]:
        change = ("-" if now < was else "+") + kind.shown(abs(now - was))
        return name, kind.shown(was), kind.shown(now), change

    worst = sorted(found.classes.items(), key=lambda one: one[1][1] - one[1][0])
    shown = [one for one in worst if one[1][0] != one[1][1]][:_SHOWN_CLASSES]
    table = [
        row(f"{new.task}, {kind.title}", before[kind.score], after[kind.score]),
        *(row(name, *pair) for name, pair in shown),
    ]
    same = len(found.classes) - sum(was != now for was, now in found.classes.values())
    legend = [f"{kind.class_title} of each class; {counted(same, *kind.nouns)} unchanged"]
    below = [_changed_images(found)] if found.changes else []
    return Description(document, [], ("", "before", "after", "change"), table, legend, below)


def _changed_images(found: VersionComparison) -> Description:
    images = [
        (change.image, *map(_text, (change.label, change.before, change.after)))
        for change in found.changes[:_SHOWN_CHANGES]
    ]
    legend = [f"{found.mended} mended, {found.broken} broken of {len(found.changes)} changed"]
    if more := len(found.changes) - len(images):
        legend.append(f"{more:,} more are in --json")
    return Description(None, [], ("changed image", "label", "before", "after"), images, legend)


def _text(answer: str | list[str]) -> str:
    return answer if isinstance(answer, str) else ", ".join(answer) or "none"


def _write_report(
    path: Path, model: MemoryViT, answers: Sequence[Answers]
) -> list[tuple[str, str]]:
    from engram.report.page import write_sections
    from engram.report.task_section import TaskPart, task_sections

    names = ", ".join(one.task for one in answers)
    splits = " and ".join(dict.fromkeys(one.dataset.split for one in answers))
    title = f"{names}: how good on the {splits} split"
    try:
        sections = task_sections(model, [TaskPart(one) for one in answers])
        write_sections(path, title, "", sections, model.backbone)
    except EngramError as error:  # what was measured is shown all the same
        return [("report", f"not written: {error}")]
    return []


def _leak_rows(model: MemoryViT, metrics: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    rows = []
    for name, values in metrics.items():
        if "leaked" in values:
            kind, clean = model.task(name).kind, values["clean"]
            images = counted(values["leaked"], "image")
            rest = f"{kind.shown(clean[kind.score])} of the other {clean['images']:,}"
            rows.append((name, f"{images} of {values['split']} in train, too; without: {rest}"))
    return rows


def _describe_metrics(
    model: MemoryViT, metrics: Mapping[str, Mapping[str, Any]], rows: list[tuple[str, str]]
) -> Description:
    from engram.tasks.metrics import shown

    wanted = [key for name in metrics for key in model.task(name).kind.columns]
    columns = tuple(dict.fromkeys([key for key in wanted if key != "loss"] + ["loss"]))
    table = [
        (
            name,
            values["split"],
            f"{values['images']:,}",
            *(shown(key, values[key]) if key in values else "" for key in columns),
            str(len(values["unreadable"])),
        )
        for name, values in metrics.items()
    ]
    return Description(metrics, rows, ("task", "split", "images", *columns, "unreadable"), table)


# Embed


@shared.command("embed", {DataOptions: "Data"}, threads=True)
def embed_command(
    out: Path = out_option(
        "The file to write: .parquet or .npz. An existing one is replaced.", "FILE", default=...
    ),
    data: list[str] | None = argument(
        "DATA…", "Images or folders of them, or one labelled dataset.", default=None
    ),
    texts: list[str] | None = option(
        "Data",
        "A text to embed, in place of images, with a CLIP or SigLIP as --backbone; repeatable.",
        "--text",
    ),
    engrams: list[Path] | None = option(
        None, "Engrams or bundles to embed for too; repeatable.", "--engram", metavar="FILE"
    ),
    backbone: str | None = option(
        None,
        "Path or Hub id of the backbone; by default the engrams' own, or what suits the "
        "size of the images.",
        metavar="BACKBONE",
    ),
    tasks: list[str] | None = shared.TASKS,
    batch: int = shared.BATCH,
    workers: int = shared.WORKERS,
    backbone_dtype: str = shared.BACKBONE_DTYPE,
    device: str = shared.DEVICE,
    precision: str = shared.PRECISION,
    *,
    flags: Given,
    progress: Watch,
) -> Description:
    """Turn images into vectors: the backbone's, and each task's own; or texts, with --text."""
    from engram.backbones.recommended import AUTO
    from engram.data.datasets import Splits
    from engram.inference.embed import (
        check_names,
        check_vector_file,
        embed_batches,
        find_datasets,
        vector_file,
    )
    from engram.inference.engine import TorchEngine, load_model
    from engram.model import MemoryViT
    from engram.train.backbone import backbone_for
    from engram.util.files import check_writable
    from engram.util.processes import ProcessGroup

    check_writable(out, "file")
    check_vector_file(out)
    if texts and data:
        raise EngramError("Images and --text cannot be embedded into one file; give one of them.")
    if texts:
        return embed_texts(texts, backbone, out)
    if not data:
        raise EngramError("There is nothing to embed: give images, or texts with --text.")
    options = DataOptions(**flags[DataOptions])
    widths, failed, images = dict[str, int](), dict[str, str](), 0
    datasets = find_datasets(data[0] if len(data) == 1 else data, options.load)
    if engrams:
        named = None if backbone == AUTO else backbone
        model = load_model(engrams, named, backbone_dtype=backbone_dtype)
    else:
        splits = Splits(datasets[0].name, datasets[0].classes, train=datasets[0])
        run = RunOptions(backbone or AUTO, backbone_dtype=backbone_dtype)
        vit, _ = backbone_for(run, splits, announce=announce, progress=progress)
        model = MemoryViT(vit)
    names = model.embedding_names(tasks or None)
    check_names(names)
    engine = TorchEngine(model, device=ProcessGroup(device).device, precision=precision)
    with vector_file(out) as add:
        for part in embed_batches(
            engine, datasets, tasks=names, batch=batch, workers=workers,
            progress=partial(progress, "embedding"),
        ):  # fmt: skip
            failed |= part.failed
            images += len(part.images)
            if part.images:
                widths = {name: rows.shape[1] for name, rows in part.vectors.items()}
                add(part)
        if not images:
            reason = next(iter(failed.values()))
            raise EngramError(f"No image can be read, so {out} was not written: {reason}.")
    source = model.backbone.source
    document = {
        "path": str(out),
        "backbone": source,
        "images": images,
        "vectors": widths,
        "unreadable": failed,
    }
    rows = [("backbone", source), ("images", f"{images:,}"), ("file", str(out))]
    if failed:
        reasons = [*list(failed.values())[:_SHOWN], *(["…"] if len(failed) > _SHOWN else [])]
        rows.append(("unreadable", f"{len(failed):,}, left out: {'; '.join(reasons)}"))
    table = [(name, f"{width:,}") for name, width in widths.items()]
    return Description(document, rows, ("vectors", "numbers"), table)
