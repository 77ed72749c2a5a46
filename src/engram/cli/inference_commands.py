"""`engram eval`, `engram embed`, and `engram export`, which measures tasks before and after."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engram.cli.application import (
    Backbone,
    BackboneDtype,
    Batch,
    Device,
    Engrams,
    Json,
    Overwrite,
    Precision,
    Split,
    TaskData,
    Tasks,
    Threads,
    Workers,
    app,
)
from engram.cli.bars import bars
from engram.cli.complete import among
from engram.cli.flags import DATA, OUTPUT, flags_from, option
from engram.cli.terminal import announce, show
from engram.cli.words import embed_texts
from engram.errors import EngramError, Notice
from engram.train.options import ColumnOptions, DataOptions, named, split_data
from engram.util.cpus import DECODERS
from engram.util.description import Description
from engram.util.settings import Given
from engram.util.text import counted

if TYPE_CHECKING:
    from engram.data.datasets import Dataset, Splits
    from engram.export.web import WebExport
    from engram.export.write import Export
    from engram.inference.engine import Engine
    from engram.inference.evaluate import Answers
    from engram.model import MemoryViT
    from engram.util.progress import Progress

_SHOWN = 5  # unreadable images in the summary
_SHOWN_CLASSES = _SHOWN_CHANGES = 20  # in the tables of --against


# Data of tasks


@dataclass(frozen=True)
class LabelledTask:
    """A task, and the data of `--data NAME=DATA:split` to measure it on."""

    name: str
    splits: Splits
    split: str
    leaked: Sequence[int] = ()  # samples of the split that are in train, too


def _task_data(
    model: MemoryViT, tasks: Sequence[str], text: str, split: str, columns: ColumnOptions
) -> LabelledTask:
    """Read `--data NAME=DATA:split`; DATA alone is enough for a single task."""
    from engram.data.datasets import load
    from engram.data.overview import find_leaks

    name, rest = named(text, tasks)
    source, split = split_data(rest, split)
    if not name and len(tasks) != 1:
        raise EngramError(
            f"--data {text}: which of the tasks {', '.join(tasks)} is it for? Write "
            f"--data {next(iter(tasks), 'NAME')}={text}."
        )
    task = model.task(name or tasks[0])
    if task.spec.name not in tasks:
        raise EngramError(f"--data {text} is for none of the tasks {', '.join(tasks)}.")
    splits = load(source, split=split, like=task.spec, **columns.columns())
    if splits.unsplit:
        notice = (
            f"{source} has no splits, so all of it is measured, "
            f"{counted(len(splits[split]), 'image')}; if {task.spec.name!r} learned from them, "
            "that is no test."
        )
        warnings.warn(notice, Notice, stacklevel=2)
    leaked: Sequence[int] = ()
    if not splits.unsplit and Path(source).exists():  # of a dataset on the Hub, train is not loaded
        leaked = find_leaks(load(source, like=task.spec, **columns.columns()), split)
    return LabelledTask(task.spec.name, splits, split, leaked)


# Evaluate


@app.command(name="eval")
@flags_from({ColumnOptions: DATA})
def eval_command(
    sources: Engrams,
    data: TaskData = None,
    split: Split = "test",
    backbone: Backbone = None,
    batch: Batch = 64,
    workers: Workers = DECODERS,
    device: Device = "auto",
    precision: Precision = "fp32",
    backbone_dtype: BackboneDtype = "fp32",
    skip_bad: Annotated[
        bool, option(DATA, "Leave unreadable images out of the count.", "--skip-bad")
    ] = False,
    against: Annotated[
        list[Path] | None,
        option(
            None,
            "An earlier version of a task, or a bundle of them, to compare with; repeatable.",
            metavar="FILE",
        ),
    ] = None,
    report: Annotated[
        Path | None, option(OUTPUT, "Also write a page.", metavar="FILE.html")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
    *,
    flags: Given,
) -> None:
    """Measure tasks on data, all of them attached together."""
    from engram.inference.engine import load_model
    from engram.inference.evaluate import answers
    from engram.report.run_page import check_page_path
    from engram.util.processes import ProcessGroup

    if not data:
        raise EngramError("There is nothing to evaluate on; give --data NAME=DATA.")
    if report is not None:
        check_page_path(report)  # before an hour of work, not after it
    with bars(as_json) as progress:
        progress("loading the tasks", 0, 0)
        team = ProcessGroup(device)
        model = load_model(sources, backbone, backbone_dtype=backbone_dtype)
        columns, given = ColumnOptions(**flags[ColumnOptions]), dict[str, LabelledTask]()
        for text in data:
            one = _task_data(model, list(model.tasks), text, split, columns)
            if one.name in given:
                raise EngramError(
                    f"--data {text}: there is data for {one.name!r} already; evaluate on one after "
                    "the other."
                )
            given[one.name] = one

        def measured(model: MemoryViT, name: str, when: str = "") -> Answers:
            one = given[name]
            return answers(
                model, one.splits, name, split=one.split, batch=batch, workers=workers,
                precision=precision, team=team, progress=partial(progress, f"{name}{when}"),
            )  # fmt: skip

        found = [measured(model, name) for name in given]
        comparisons: dict[str, list[Description]] = {}
        if against:
            older = load_model(against, backbone, backbone_dtype=backbone_dtype)
            for new in found:
                old = measured(older, new.task, " before")
                comparisons[new.task] = _describe_comparison(old, new, skip_bad)
        rows = []
        if report is not None and team.main:
            progress("writing the report", 0, 0)
            rows = _write_report(report, model, found)
    metrics = {
        one.task: {
            "split": one.dataset.split,
            **one.metrics(skip_bad),
            **one.without_leaks(given[one.task].leaked, skip_bad),
            **({"against": c[0].document} if (c := comparisons.get(one.task)) else {}),
        }
        for one in found
    }
    rows += _leak_rows(model, metrics)
    show(_describe_metrics(model, metrics, rows), as_json)
    for table in () if as_json else chain.from_iterable(comparisons.values()):
        show(table, as_json)


def _describe_comparison(old: Answers, new: Answers, skip_bad: bool) -> list[Description]:
    """Tables of `--against` for a task: its classes, and the images whose answers changed."""
    from engram.inference.compare import compare

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
    table = (
        row(f"{new.task}, {kind.title}", before[kind.score], after[kind.score]),
        *(row(name, *pair) for name, pair in shown),
    )
    same = len(found.classes) - sum(was != now for was, now in found.classes.values())
    legend = [f"{kind.class_title} of each class; {counted(same, *kind.nouns)} unchanged"]
    tables = [Description(document, [], ("", "before", "after", "change"), table, tuple(legend))]
    if found.changes:
        images = tuple(
            (change.image, *map(_text, (change.label, change.before, change.after)))
            for change in found.changes[:_SHOWN_CHANGES]
        )
        more = len(found.changes) - len(images)
        legend = [f"{found.mended} mended, {found.broken} broken of {len(found.changes)} changed"]
        legend += [f"{more:,} more are in --json"] if more else []
        columns = ("changed image", "label", "before", "after")
        tables.append(Description(document, [], columns, images, tuple(legend)))
    return tables


def _text(answer: str | list[str]) -> str:
    return answer if isinstance(answer, str) else ", ".join(answer) or "none"


def _write_report(
    path: Path, model: MemoryViT, answers: Sequence[Answers]
) -> list[tuple[str, str]]:
    from engram.report.page import write_report
    from engram.report.task_section import TaskPart

    names = ", ".join(one.task for one in answers)
    splits = " and ".join(dict.fromkeys(one.dataset.split for one in answers))
    parts = [TaskPart(one) for one in answers]
    try:
        write_report(path, model, parts, title=f"{names}: how good on the {splits} split")
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
    table = tuple(
        (
            name,
            values["split"],
            f"{values['images']:,}",
            *(shown(key, values[key]) if key in values else "" for key in columns),
            str(len(values["unreadable"])),
        )
        for name, values in metrics.items()
    )
    return Description(metrics, rows, ("task", "split", "images", *columns, "unreadable"), table)


# Embed


@app.command(name="embed")
@flags_from({DataOptions: DATA})
def embed_command(
    out: Annotated[
        Path,
        option(
            OUTPUT,
            "The file to write: .parquet or .npz. An existing one is replaced.",
            "-o",
            "--out",
            metavar="FILE",
        ),
    ],
    data: Annotated[
        list[str] | None,
        typer.Argument(metavar="DATA…", help="Images or folders of them, or one labelled dataset."),
    ] = None,
    texts: Annotated[
        list[str] | None,
        option(
            DATA,
            "A text to embed, in place of images, with a CLIP or SigLIP as --backbone; repeatable.",
            "--text",
        ),
    ] = None,
    engrams: Annotated[
        list[Path] | None,
        option(
            None, "Engrams or bundles to embed for too; repeatable.", "--engram", metavar="FILE"
        ),
    ] = None,
    backbone: Annotated[
        str | None,
        option(
            None,
            "Path or Hub id of the backbone; by default the engrams' own, or what suits the "
            "size of the images.",
            metavar="BACKBONE",
        ),
    ] = None,
    tasks: Tasks = None,
    batch: Batch = 64,
    workers: Workers = DECODERS,
    backbone_dtype: BackboneDtype = "fp32",
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: Threads = None,
    as_json: Json = False,
    *,
    flags: Given,
) -> None:
    """Turn images into vectors: the backbone's, and each task's own; or texts, with --text."""
    from engram.inference.embed import embed_batches, find_datasets
    from engram.inference.engine import TorchEngine
    from engram.inference.vectors import check_names, check_vector_file, vector_file
    from engram.util.files import check_writable
    from engram.util.processes import ProcessGroup

    check_writable(out, "file")
    check_vector_file(out)
    if texts and data:
        raise EngramError("Images and --text cannot be embedded into one file; give one of them.")
    if texts:
        show(embed_texts(texts, backbone, out), as_json)
        return
    if not data:
        raise EngramError("There is nothing to embed: give images, or texts with --text.")
    options = DataOptions(**flags[DataOptions])
    widths, failed, images = dict[str, int](), dict[str, str](), 0
    with bars(as_json) as progress:
        datasets = find_datasets(data[0] if len(data) == 1 else data, options.load)
        model = _embedding_model(engrams or [], backbone, backbone_dtype, datasets[0], progress)
        names = model.embedding_names(tasks or None)
        check_names(names)
        engine = TorchEngine(model, device=ProcessGroup(device).device, precision=precision)
        with vector_file(out) as file:
            for part in embed_batches(
                engine, datasets, tasks=names, batch=batch, workers=workers,
                progress=partial(progress, "embedding"),
            ):  # fmt: skip
                failed |= part.failed
                images += len(part.images)
                if part.images:
                    widths = {name: rows.shape[1] for name, rows in part.vectors.items()}
                    file.add(part)
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
    table = tuple((name, f"{width:,}") for name, width in widths.items())
    show(Description(document, rows, ("vectors", "numbers"), table), as_json)


def _embedding_model(
    engrams: list[Path],
    backbone: str | None,
    backbone_dtype: str,
    dataset: Dataset,
    progress: Progress,
) -> MemoryViT:
    """The model of the engrams, or a backbone alone: the one named, or what suits the images."""
    from engram.backbones.load import load_backbone
    from engram.backbones.recommended import AUTO, choose_backbone
    from engram.data.datasets import Splits
    from engram.data.overview import typical_side
    from engram.inference.engine import load_model
    from engram.model import MemoryViT

    if engrams:
        moved = None if backbone == AUTO else backbone
        return load_model(engrams, moved, backbone_dtype=backbone_dtype)
    if backbone is None or backbone == AUTO:
        side = typical_side(Splits(dataset.name, dataset.classes, train=dataset))
        backbone = choose_backbone(side, announce=announce, progress=progress).source
    return MemoryViT(load_backbone(backbone, dtype=backbone_dtype))


# Export


@app.command(name="export")
@flags_from({ColumnOptions: DATA})
def export_command(
    sources: Annotated[
        list[Path], typer.Argument(metavar="BUNDLE", help="A bundle, or engrams for one backbone.")
    ],
    out: Annotated[
        Path | None, option(OUTPUT, "The file to write: .onnx or .pt2.", "-o", "--out")
    ] = None,
    web: Annotated[
        Path | None,
        option(
            OUTPUT,
            "A folder of static files to write: a page that runs all tasks in a browser.",
            metavar="FOLDER",
        ),
    ] = None,
    runtime: Annotated[
        Path | None,
        option(
            OUTPUT,
            "With --web: the npm package onnxruntime-web to copy files from, a folder or the "
            ".tgz of npm pack; by default the page loads them from a CDN.",
            metavar="PACKAGE",
        ),
    ] = None,
    file_format: Annotated[
        str | None,
        option(
            OUTPUT,
            "onnx or torch, if the file's ending does not say it.",
            "--format",
            autocompletion=among(("onnx", "torch")),
        ),
    ] = None,
    int8: Annotated[
        bool | None,
        option(
            OUTPUT,
            "int8 quantisation of the linear layers: faster, less exact. Default with --web.",
            "--int8/--no-int8",
        ),
    ] = None,
    tasks: Tasks = None,
    data: TaskData = None,
    split: Split = "test",
    backbone: Backbone = None,
    batch: Batch = 32,
    workers: Workers = DECODERS,
    overwrite: Overwrite = False,
    threads: Threads = None,
    as_json: Json = False,
    *,
    flags: Given,
) -> None:
    """Write all tasks as one file that runs without engram, or as a page that runs in a browser.

    What is written is checked against the model before.
    """
    from engram.export.runtime import OnnxModel, TorchProgram, require_onnx
    from engram.export.web import check_site_folder, export_web
    from engram.export.write import check_output_path, export_onnx, export_torch
    from engram.inference.engine import load_model
    from engram.inference.evaluate import answers

    if (out is None) == (web is None):
        raise EngramError("Give -o, a file to write, or --web, a folder for a page; one of them.")
    if web is not None:
        check_site_folder(web, overwrite)
        require_onnx()
    if out is not None:
        if runtime is not None:
            raise EngramError("--runtime is for --web, a page that runs in a browser.")
        kind = _format(out, file_format)
        check_output_path(out, kind, overwrite)
        if kind == "onnx":
            require_onnx()
        elif int8:
            raise EngramError(
                "--int8 is for ONNX; give -o a name that ends in .onnx, or leave it out."
            )
    with bars(as_json) as progress:
        progress("loading the tasks", 0, 0)
        model = load_model(sources, backbone)
        names = model.output_names(tasks or None)
        own = [name for name in names if name in model.tasks]
        columns = ColumnOptions(**flags[ColumnOptions])
        found = [_task_data(model, own, text, split, columns) for text in data or ()]

        def measure(engine: Engine | None, when: str) -> dict[str, dict[str, Any]]:
            return {
                one.name: answers(
                    model, one.splits, one.name,
                    split=one.split, batch=batch, workers=workers, engine=engine,
                    progress=partial(progress, f"{one.name} {when}"),
                ).metrics()
                for one in found
            }  # fmt: skip

        before = measure(None, "before")
        progress(f"writing {out or web} and checking it", 0, 0)
        made: Export | WebExport
        engine: Engine
        if out is None:
            assert web is not None
            made = export_web(
                model, web, int8=int8 is not False, tasks=names, runtime=runtime,
                overwrite=overwrite,
            )  # fmt: skip
            engine = OnnxModel(made.model)
        elif kind == "onnx":
            made = export_onnx(model, out, int8=bool(int8), tasks=names)
            engine = OnnxModel(out)
        else:
            made = export_torch(model, out, tasks=names)
            engine = TorchProgram(out)
        after = measure(engine, "after")
    show(_describe_export(model, made, before, after), as_json)


def _format(out: Path, kind: str | None) -> str:
    """The format that was asked for, or that the name's ending says."""
    from engram.export.write import SUFFIXES

    known = ", ".join(f"{name} ({suffix})" for name, suffix in SUFFIXES.items())
    if kind is None:
        kind = next((name for name, suffix in SUFFIXES.items() if out.suffix == suffix), None)
        if kind is None:
            raise EngramError(f"{out} has the ending {out.suffix!r}; formats are {known}.")
    if kind not in SUFFIXES:
        raise EngramError(f"There is no format {kind!r}; formats are {known}.")
    return kind


def _describe_export(
    model: MemoryViT,
    made: Export | WebExport,
    before: Mapping[str, Mapping[str, Any]],
    after: Mapping[str, Mapping[str, Any]],
) -> Description:
    from engram.export.verify import BATCHES
    from engram.export.write import OPSET, Export

    document: dict[str, Any] = {
        "int8": made.int8,
        "bytes": made.bytes,
        "seconds": round(made.seconds, 2),
        "tasks": {},
    }
    checked = ("checked", f"against the model, on {sum(BATCHES)} generated images")
    if isinstance(made, Export):
        document |= {
            "file": str(made.path),
            "format": made.format,
            "script": str(made.script) if made.script else None,
        }
        form = f"ONNX, opset {OPSET}" if made.format == "onnx" else "torch.export"
        rows = [
            ("file", str(made.path)),
            ("format", form + (", int8" if made.int8 else ", float32")),
            ("size", f"{made.bytes / 1e6:,.1f} MB"),
            checked,
        ]
        if made.format == "onnx":
            script = str(made.script or "predict.py is not engram's, and was left alone")
            rows.append(("script", script))
    else:
        document |= {"folder": str(made.folder), "format": "web", "runtime": made.runtime}
        document["model_bytes"] = made.model_bytes
        size = f"{made.bytes / 1e6:,.1f} MB, of which the model {made.model_bytes / 1e6:,.1f} MB"
        rows = [
            ("page", str(made.folder / "index.html")),
            ("size", f"{size} ({'int8' if made.int8 else 'float32'})"),
            ("runtime", f"onnxruntime-web, {made.runtime}"),
            checked,
            ("try it", f"python -m http.server -d {made.folder}"),
        ]
    table = []
    for name, found in made.differences.items():
        task_name, _, familiarity = name.partition(":")
        if familiarity:
            document["tasks"][task_name]["familiarity"] = asdict(found)
        else:
            document["tasks"][name] = {"change": asdict(found)}
        cells = [name, f"{found.largest:.2g}", f"{found.relative:.2%}", f"{found.agreement:.0%}"]
        if name in before:
            document["tasks"][name] |= {"before": before[name], "after": after[name]}
            task = model.task(name).kind
            old, new = before[name][task.score], after[name][task.score]
            change = ("-" if new < old else "+") + task.shown(abs(new - old))
            images = f"{before[name]['images']:,}"
            cells += [images, task.title, task.shown(old), task.shown(new), change]
        elif before:
            cells += [""] * 5
        table.append(tuple(cells))
    if made.int8 and not before:
        rows.append(("accuracy", "not measured; give --data NAME=DATA to see what int8 costs"))
    columns: tuple[str, ...] = ("task", "largest difference", "relative", "same answer")
    if before:
        columns += ("images", "metric", "model", "exported", "change")
    return Description(document, rows, columns, tuple(table))
