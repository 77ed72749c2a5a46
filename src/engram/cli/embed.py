"""`engram embed`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engram.cli.app import BackboneDtype, Device, Json, Precision, Tasks, Threads, app
from engram.cli.flags import DATA, OUTPUT, RESOURCES, flags_of, option
from engram.cli.inference import Workers
from engram.cli.progress import bars
from engram.cli.terminal import announce, show
from engram.errors import EngramError
from engram.train.options import DataOptions
from engram.util.cpus import DECODERS
from engram.util.description import Description
from engram.util.settings import Given

if TYPE_CHECKING:
    from engram.data.datasets import Dataset
    from engram.model import MemoryViT
    from engram.util.progress import Progress

_SHOWN = 5  # unreadable images in the summary


@app.command(name="embed")
@flags_of({DataOptions: DATA})
def embed_command(
    data: Annotated[
        list[str],
        typer.Argument(metavar="DATA…", help="Images or folders of them, or one labelled dataset."),
    ],
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
    batch: Annotated[int, option(RESOURCES, "Images per pass.")] = 64,
    workers: Workers = DECODERS,
    backbone_dtype: BackboneDtype = "fp32",
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: Threads = None,
    as_json: Json = False,
    flags: Given | None = None,
) -> None:
    """Turn images into vectors: the backbone's, and each task's own."""
    from engram.inference.embed import datasets_of, embed_batches
    from engram.inference.engine import TorchEngine
    from engram.inference.vectors import check_names, check_vector_file, vector_file
    from engram.util.files import check_writable
    from engram.util.processes import ProcessGroup

    check_writable(out, "file")
    check_vector_file(out)
    options = DataOptions(**(flags or {})[DataOptions])
    widths: dict[str, int] = {}
    failed: dict[str, str] = {}
    images = 0
    with bars(as_json) as progress:
        datasets = datasets_of(data[0] if len(data) == 1 else data, options.load)
        model = _model(engrams or [], backbone, backbone_dtype, datasets[0], progress)
        names = model.embedding_names(tasks or None)
        check_names(names)
        engine = TorchEngine(model, device=ProcessGroup(device).device, precision=precision)
        with vector_file(out) as file:
            for part in embed_batches(
                engine, datasets, tasks=names, batch=batch, workers=workers,
                progress=lambda done, total: progress("embedding", done, total),
            ):  # fmt: skip
                failed |= part.failed
                images += len(part.images)
                if part.images:
                    widths = {name: rows.shape[1] for name, rows in part.vectors.items()}
                    file.add(part)
            if not images:
                reason = next(iter(failed.values()))
                raise EngramError(f"No image can be read, so {out} was not written: {reason}.")
    show(_description(out, model, images, widths, failed), as_json)


def _model(
    engrams: list[Path],
    backbone: str | None,
    backbone_dtype: str,
    dataset: Dataset,
    progress: Progress,
) -> MemoryViT:
    """Of the engrams, or a backbone alone: the one that is named, or what suits the images."""
    from engram.backbones.load import load_backbone
    from engram.backbones.recommended import AUTO, choose_backbone
    from engram.data.datasets import Splits
    from engram.data.overview import typical_side
    from engram.inference.load import load_model
    from engram.model import MemoryViT

    if engrams:
        named = None if backbone == AUTO else backbone
        return load_model(engrams, named, backbone_dtype=backbone_dtype)
    if backbone is None or backbone == AUTO:
        side = typical_side(Splits(dataset.name, dataset.classes, train=dataset))
        backbone = choose_backbone(side, announce=announce, progress=progress).source
    return MemoryViT(load_backbone(backbone, dtype=backbone_dtype))


def _description(
    out: Path, model: MemoryViT, images: int, widths: dict[str, int], failed: dict[str, str]
) -> Description:
    document: dict[str, Any] = {
        "path": str(out),
        "backbone": model.backbone.source,
        "images": images,
        "vectors": widths,
        "unreadable": failed,
    }
    rows = [("backbone", model.backbone.source), ("images", f"{images:,}"), ("file", str(out))]
    if failed:
        reasons = [*list(failed.values())[:_SHOWN], *(["…"] if len(failed) > _SHOWN else [])]
        rows.append(("unreadable", f"{len(failed):,}, left out: {'; '.join(reasons)}"))
    table = tuple((name, f"{width:,}") for name, width in widths.items())
    return Description(document, rows, ("vectors", "numbers"), table)
