"""`engram check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from engram.cli.application import (
    BackboneDtype,
    DataArgument,
    ImageSize,
    Json,
    Threads,
    Workers,
    app,
)
from engram.cli.bars import bars
from engram.cli.flags import DATA, OUTPUT, flags_from, option
from engram.cli.terminal import announce, show
from engram.train.options import DataOptions
from engram.train.recipe import Recipe
from engram.util.cpus import DECODERS
from engram.util.settings import Given


@app.command(name="check")
@flags_from({DataOptions: DATA})
def check_command(
    data: DataArgument,
    out: Annotated[
        Path | None, option(OUTPUT, "Also write a page.", "-o", "--out", metavar="FILE.html")
    ] = None,
    csv: Annotated[
        Path | None, option(OUTPUT, "Also write all findings as a table.", metavar="FILE.csv")
    ] = None,
    backbone: Annotated[
        str,
        option(
            None,
            "Path, Hub id or name of the backbone; by default the one that fit would take.",
            metavar="BACKBONE",
        ),
    ] = "auto",
    image_size: ImageSize = None,
    backbone_dtype: BackboneDtype = "fp32",
    workers: Workers = DECODERS,
    threads: Threads = None,
    as_json: Json = False,
    *,
    flags: Given,
) -> None:
    """Find wrong labels, near-duplicates, leaks and outliers in a dataset; it stays as it is."""
    from engram.curation.check import check
    from engram.curation.check_page import write_page
    from engram.curation.findings import describe, write_csv
    from engram.model import MemoryViT
    from engram.report.run_page import check_page_path
    from engram.train.backbone import backbone_for
    from engram.util.files import check_writable

    if out is not None:
        check_page_path(out)  # before the work, not after it
    if csv is not None:
        check_writable(csv)
    with bars(as_json) as progress:
        progress("reading the data", 0, 0)
        splits = DataOptions(**flags[DataOptions]).load(data, one_class=True)
        progress("loading the backbone", 0, 0)
        vit, _ = backbone_for(
            backbone, splits, image_size=image_size, dtype=backbone_dtype,
            announce=announce, progress=progress,
        )  # fmt: skip
        model = MemoryViT(vit)
        found = check(model, splits, recipe=Recipe(workers=workers), progress=progress)
        if csv is not None:
            write_csv(found, csv)
        if out is not None:
            progress("writing the page", 0, 0)
            write_page(found, model, out)
    result = describe(found)
    for label, path in (("page", out), ("table", csv)):
        if path is not None:
            result.rows.append((label, str(path)))
    show(result, as_json)
