"""`engram export`, which measures tasks before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram.cli import shared
from engram.cli.arguments import labelled_task
from engram.cli.flags import argument, option, out_option
from engram.cli.terminal import Watch
from engram.errors import EngramError
from engram.train.options import ColumnOptions
from engram.util.settings import Given
from engram.util.text import Description

if TYPE_CHECKING:
    from engram.export.web import WebExport
    from engram.export.write import Export
    from engram.inference.engine import Engine
    from engram.model import MemoryViT

Metrics = Mapping[str, Mapping[str, Any]]  # by task


@shared.command("export", {ColumnOptions: "Data"}, work="loading the tasks", threads=True)
def export_command(
    sources: list[Path] = argument("BUNDLE", "A bundle, or engrams for one backbone."),
    out: Path | None = out_option("The file to write: .onnx or .pt2."),
    web: Path | None = option(
        "Output",
        "A folder of static files to write: a page that runs all tasks in a browser.",
        metavar="FOLDER",
    ),
    runtime: Path | None = option(
        "Output",
        "With --web: the npm package onnxruntime-web to copy files from, a folder or the "
        ".tgz of npm pack; by default the page loads them from a CDN.",
        metavar="PACKAGE",
    ),
    int8: bool | None = option(
        "Output",
        "int8 quantisation of the linear layers: faster, less exact. With --web: weights in "
        "int8, or in float32, in place of float16.",
        "--int8/--no-int8",
    ),
    tasks: list[str] | None = shared.TASKS,
    data: list[str] | None = shared.TASK_DATA,
    split: str = shared.SPLIT,
    backbone: str | None = shared.BACKBONE,
    batch: int = option("Resources", "Images per pass.", default=32),
    workers: int = shared.WORKERS,
    overwrite: bool = shared.OVERWRITE,
    *,
    flags: Given,
    progress: Watch,
) -> Description:
    """Write all tasks as one file that runs without engram, or as a page that runs in a browser.

    What is written is checked against the model before.
    """
    from engram.export.runtime import OnnxModel, TorchProgram, require_onnx
    from engram.export.web import check_site_folder, export_web
    from engram.export.write import check_output_path, export_onnx, export_torch
    from engram.inference.engine import load_model

    target = out or web
    if target is None or (out and web):
        raise EngramError("Give -o, a file to write, or --web, a folder for a page; one of them.")
    if runtime and not web:
        raise EngramError("--runtime is for --web, a page that runs in a browser.")
    if web:
        check_site_folder(target, overwrite)
    kind = "web" if web else check_output_path(target, overwrite)
    if kind != "torch":
        require_onnx()
    elif int8:
        raise EngramError("--int8 is for ONNX; give -o a name that ends in .onnx, or leave it out.")
    model = load_model(sources, backbone)
    names = model.output_names(tasks or None)
    own = [name for name in names if name in model.tasks]
    columns = ColumnOptions(**flags[ColumnOptions])
    found = [labelled_task(model, own, text, split, columns) for text in data or ()]

    def measure(engine: Engine | None, when: str) -> dict[str, dict[str, Any]]:
        more = {"batch": batch, "workers": workers, "engine": engine}
        return {
            one.name: one.answers(
                model, progress=partial(progress, f"{one.name} {when}"), **more
            ).metrics()
            for one in found
        }

    before = measure(None, "before")
    progress(f"writing {target} and checking it", 0, 0)
    made: Export | WebExport
    engine: Engine
    if web:
        weights = {None: "float16", True: "int8", False: "float32"}[int8]
        made = export_web(
            model, target, weights=weights, tasks=names, runtime=runtime, overwrite=overwrite
        )
        engine = OnnxModel(made.model)
    elif kind == "onnx":
        made = export_onnx(model, target, int8=bool(int8), tasks=names)
        engine = OnnxModel(made.path)
    else:
        made = export_torch(model, target, tasks=names)
        engine = TorchProgram(made.path)
    after = measure(engine, "after")
    return _describe_export(model, made, before, after)


def _describe_export(
    model: MemoryViT, made: Export | WebExport, before: Metrics, after: Metrics
) -> Description:
    from engram.export.verify import BATCHES
    from engram.export.write import OPSET, Export

    int8 = made.int8 if isinstance(made, Export) else made.weights == "int8"
    tasks: dict[str, Any] = {}
    document: dict[str, Any] = {"int8": int8, "bytes": made.bytes, "tasks": tasks}
    document["seconds"] = round(made.seconds, 2)
    size, checked = f"{made.bytes / 1e6:,.1f} MB", f"{sum(BATCHES)} generated images"
    if isinstance(made, Export):
        script = made.script and str(made.script)
        document |= {"file": str(made.path), "format": made.format, "script": script}
        form = f"ONNX, opset {OPSET}" if made.format == "onnx" else "torch.export"
        rows = [
            ("file", str(made.path)),
            ("format", f"{form}, {'int8' if int8 else 'float32'}"),
            ("size", size),
        ]
        if made.format == "onnx":
            rows.append(("script", script or "predict.py is not engram's, and was left alone"))
    else:
        document |= {"folder": str(made.folder), "format": "web", "runtime": made.runtime}
        document |= {"model_bytes": made.model_bytes, "weights": made.weights}
        model_size = f"the model {made.model_bytes / 1e6:,.1f} MB (weights in {made.weights})"
        rows = [
            ("page", str(made.folder / "index.html")),
            ("size", f"{size}, of which {model_size}"),
            ("runtime", f"onnxruntime-web, {made.runtime}"),
            ("try it", f"python -m http.server -d {made.folder}"),
        ]
    rows.append(("checked", f"against the model, on {checked}"))
    if int8 and not before:
        rows.append(("accuracy", "not measured; give --data NAME=DATA to see what int8 costs"))
    table = []
    for name, found in made.differences.items():
        task_name, _, familiarity = name.partition(":")
        tasks.setdefault(task_name, {})["familiarity" if familiarity else "change"] = asdict(found)
        cells = [name, f"{found.largest:.2g}", f"{found.relative:.2%}", f"{found.agreement:.0%}"]
        if name in before:
            tasks[name] |= {"before": before[name], "after": after[name]}
            kind = model.task(name).kind
            old, new = before[name][kind.score], after[name][kind.score]
            change = ("-" if new < old else "+") + kind.shown(abs(new - old))
            images = f"{before[name]['images']:,}"
            cells += [images, kind.title, kind.shown(old), kind.shown(new), change]
        elif before:
            cells += [""] * 5
        table.append(tuple(cells))
    columns: tuple[str, ...] = ("task", "largest difference", "relative", "same answer")
    if before:
        columns += ("images", "metric", "model", "exported", "change")
    return Description(document, rows, columns, tuple(table))
