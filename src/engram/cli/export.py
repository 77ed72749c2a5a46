"""`engram export`: write the file, and measure tasks on data before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engram.cli.app import Backbone, Json, Overwrite, Tasks, Threads, app
from engram.cli.complete import among
from engram.cli.flags import DATA, OUTPUT, RESOURCES, flags_of, option
from engram.cli.inference import Split, Workers, data_for
from engram.cli.progress import bars
from engram.cli.terminal import show
from engram.errors import EngramError
from engram.train.options import ColumnOptions
from engram.util.cpus import DECODERS
from engram.util.description import Description
from engram.util.settings import Given

if TYPE_CHECKING:
    from engram.export.write import Export
    from engram.inference.engine import Engine
    from engram.model import MemoryViT


@app.command(name="export")
@flags_of({ColumnOptions: DATA})
def export_command(
    sources: Annotated[
        list[Path], typer.Argument(metavar="BUNDLE", help="A bundle, or engrams for one backbone.")
    ],
    out: Annotated[Path, option(OUTPUT, "The file to write: .onnx or .pt2.", "-o", "--out")],
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
        bool,
        option(OUTPUT, "int8 quantisation of the linear layers: faster, less exact.", "--int8"),
    ] = False,
    tasks: Tasks = None,
    data: Annotated[
        list[str] | None,
        option(
            DATA,
            "Measure a task before and after, on a split of its own if you like; repeatable.",
            metavar="NAME=DATA[:SPLIT]",
        ),
    ] = None,
    split: Split = "test",
    backbone: Backbone = None,
    batch: Annotated[int, option(RESOURCES, "Images per pass, when measuring.")] = 32,
    workers: Workers = DECODERS,
    overwrite: Overwrite = False,
    threads: Threads = None,
    as_json: Json = False,
    flags: Given | None = None,
) -> None:
    """Write all tasks as one file that runs without engram, checked against the model."""
    from engram.export.runtime import require_onnx
    from engram.export.write import check_output_path
    from engram.inference.evaluate import answers
    from engram.inference.load import load_model

    kind = _format(out, file_format)
    check_output_path(out, kind, overwrite)
    if kind == "onnx":
        require_onnx()
    elif int8:
        raise EngramError("--int8 is for ONNX; give -o a name that ends in .onnx, or leave it out.")
    with bars(as_json) as progress:
        progress("loading the tasks", 0, 0)
        model = load_model(sources, backbone)
        names = model.output_names(tasks or None)
        own = [name for name in names if name in model.tasks]
        columns = ColumnOptions(**(flags or {})[ColumnOptions])
        found = [data_for(model, own, text, split, columns) for text in data or ()]

        def measure(engine: Engine | None, when: str) -> dict[str, dict[str, Any]]:
            return {
                one.task: answers(
                    model, one.splits, one.task,
                    split=one.split, batch=batch, workers=workers, engine=engine,
                    progress=partial(progress, f"{one.task} {when}"),
                ).metrics()
                for one in found
            }  # fmt: skip

        before = measure(None, "before")
        progress(f"writing {out.name} and checking it", 0, 0)
        made, engine = _export(model, out, kind, int8, names)
        result = _description(model, made, before, measure(engine, "after"))
    show(result, as_json)


def _export(
    model: MemoryViT, out: Path, kind: str, int8: bool, names: Sequence[str]
) -> tuple[Export, Engine]:
    """Write the file, and open it again as an engine."""
    from engram.export.runtime import OnnxModel, TorchProgram
    from engram.export.write import export_onnx, export_torch

    if kind == "onnx":
        return export_onnx(model, out, int8=int8, tasks=names), OnnxModel(out)
    return export_torch(model, out, tasks=names), TorchProgram(out)


def _format(out: Path, kind: str | None) -> str:
    """What was asked for, or what the name's ending says."""
    from engram.export.write import SUFFIXES

    known = ", ".join(f"{name} ({suffix})" for name, suffix in SUFFIXES.items())
    if kind is None:
        kind = next((name for name, suffix in SUFFIXES.items() if out.suffix == suffix), None)
        if kind is None:
            raise EngramError(f"{out} has the ending {out.suffix!r}; formats are {known}.")
    if kind not in SUFFIXES:
        raise EngramError(f"There is no format {kind!r}; formats are {known}.")
    return kind


def _description(
    model: MemoryViT,
    made: Export,
    before: Mapping[str, Mapping[str, Any]],
    after: Mapping[str, Mapping[str, Any]],
) -> Description:
    from engram.export.graphs import OPSET
    from engram.export.verify import BATCHES

    document: dict[str, Any] = {
        "file": str(made.path),
        "format": made.format,
        "int8": made.int8,
        "bytes": made.bytes,
        "seconds": round(made.seconds, 2),
        "script": str(made.script) if made.script else None,
        "tasks": {},
    }
    table = []
    for name, found in made.differences.items():
        document["tasks"][name] = {"change": asdict(found)}
        cells = [name, f"{found.largest:.2g}", f"{found.relative:.2%}", f"{found.agreement:.0%}"]
        if name in before:
            document["tasks"][name] |= {"before": before[name], "after": after[name]}
            task = model.task(name).kind
            old, new = before[name][task.score], after[name][task.score]
            cells += [
                f"{before[name]['images']:,}",
                task.title,
                task.shown(old),
                task.shown(new),
                ("-" if new < old else "+") + task.shown(abs(new - old)),
            ]
        elif before:
            cells += [""] * 5
        table.append(tuple(cells))
    kind = f"ONNX, opset {OPSET}" if made.format == "onnx" else "torch.export"
    rows = [
        ("file", str(made.path)),
        ("format", kind + (", int8" if made.int8 else ", float32")),
        ("size", f"{made.bytes / 1e6:,.1f} MB"),
        ("checked", f"against the model, on {sum(BATCHES)} generated images"),
    ]
    if made.format == "onnx":
        rows.append(
            ("script", str(made.script or "predict.py is not engram's, and was left alone"))
        )
    if made.int8 and not before:
        rows.append(("accuracy", "not measured; give --data NAME=DATA to see what int8 costs"))
    columns: tuple[str, ...] = ("task", "largest difference", "relative", "same best class")
    if before:
        columns += ("images", "metric", "model", "exported", "change")
    return Description(document, rows, columns, tuple(table))
