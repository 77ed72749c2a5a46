"""`engram export`: write the file, and measure tasks on data before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from engram.cli.jobs import data_for
from engram.errors import EngramError
from engram.export.graphs import OPSET
from engram.export.runtime import BATCHES, OnnxModel, TorchProgram, require
from engram.export.write import SUFFIXES, Export, check_place, export_onnx, export_torch
from engram.inference.engine import Engine
from engram.inference.evaluate import answers
from engram.inference.load import load_model
from engram.model import MemoryViT
from engram.util.description import Description
from engram.util.hub import PathOrHubId
from engram.util.progress import Progress


def export_job(
    sources: Sequence[PathOrHubId],
    out: Path,
    *,
    kind: str | None,
    int8: bool,
    tasks: Sequence[str],
    data: Sequence[str],
    split: str,
    label: str,
    backbone: str | None,
    batch: int,
    workers: int,
    overwrite: bool,
    progress: Progress,
) -> Description:
    """`engram export`: write the file, and measure tasks on data before and after."""
    kind = _format(out, kind)
    check_place(out, kind, overwrite)
    if kind == "onnx":
        require("onnx", "onnxscript", "onnxruntime")
    elif int8:
        raise EngramError("int8 is for ONNX; give -o a name that ends in .onnx, or leave it out.")
    model = load_model(sources, backbone)
    names = model.output_names(tasks or None)
    own = [name for name in names if name != "base"]
    pairs = [data_for(model, own, text, split, label) for text in data]

    def measure(engine: Engine | None, when: str) -> dict[str, dict[str, Any]]:
        return {
            name: answers(
                model, splits, name,
                split=split, batch=batch, workers=workers, engine=engine,
                progress=partial(progress, f"{name} {when}"),
            ).metrics()
            for name, splits in pairs
        }  # fmt: skip

    before = measure(None, "before")
    engine: Engine
    if kind == "onnx":
        made = export_onnx(model, out, int8=int8, tasks=names)
        engine = OnnxModel(out)
    else:
        made = export_torch(model, out, tasks=names)
        engine = TorchProgram(out)
    return _description(model, made, before, measure(engine, "after"))


def _format(out: Path, kind: str | None) -> str:
    """What was asked for, or what the name's ending says."""
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
    for name, change in made.changes.items():
        document["tasks"][name] = {"change": asdict(change)}
        cells = [name, f"{change.largest:.2g}", f"{change.relative:.2%}", f"{change.agreement:.0%}"]
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
        ("checked", f"against the model, on {sum(BATCHES)} generated pictures"),
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
