"""`engram drift`: whether tasks see other images than before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engram.cli.application import Json, app
from engram.cli.bars import bars
from engram.cli.flags import OUTPUT, option
from engram.cli.terminal import show
from engram.errors import EngramError


@app.command(name="drift")
def drift_command(
    reference: Annotated[
        Path,
        typer.Argument(
            metavar="REFERENCE", help="Answers to compare with, which engram predict --out wrote."
        ),
    ],
    new: Annotated[
        Path, typer.Argument(metavar="NEW", help="Answers of the same tasks about other images.")
    ],
    size: Annotated[
        float, option(None, "Smallest difference that counts as drift, from 0 to 1.")
    ] = 0.1,
    fail: Annotated[bool, option(None, "Exit with 1 if there is drift.", "--fail")] = False,
    out: Annotated[
        Path | None,
        option(
            OUTPUT,
            "Write a page with the distributions and the images that changed most.",
            "-o",
            "--out",
            metavar="FILE.html",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two tables of answers: which tasks see other images than before."""
    from engram.curation.answer_tables import read_answers
    from engram.curation.drift import compare, describe
    from engram.curation.drift_page import write_drift_page
    from engram.report.run_page import check_page_path

    if not 0 <= size <= 1:
        raise EngramError(f"--size is {size:g}; it is a share, from 0 to 1.")
    if out is not None:
        check_page_path(out)
    with bars(as_json) as progress:
        drift = compare(read_answers(reference, progress), read_answers(new, progress), size)
        if out is not None:
            progress("writing the page", 0, 0)
            write_drift_page(out, drift)
    description = describe(drift)
    if out is not None:
        description.rows.append(("page", str(out)))
    show(description, as_json)
    if fail and drift.tasks:
        raise typer.Exit(1)
