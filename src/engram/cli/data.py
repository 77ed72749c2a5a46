"""`engram data`: what is understood of a dataset."""

from __future__ import annotations

from typing import Annotated

from engram.cli.app import DataArgument, Json, app
from engram.cli.flags import DATA, flags_of, option
from engram.cli.progress import bars
from engram.cli.terminal import show
from engram.train.options import DataOptions
from engram.util.settings import Given


@app.command(name="data")
@flags_of({DataOptions: DATA})
def data_command(
    data: DataArgument,
    check: Annotated[
        bool,
        option(
            DATA,
            "Decode every image and look for all duplicates; else a sample of the headers.",
            "--check",
        ),
    ] = False,
    as_json: Json = False,
    flags: Given | None = None,
) -> None:
    """Print what is understood of a dataset; writes nothing."""
    from engram.data.overview import describe, look_at

    with bars(as_json) as progress:
        splits = DataOptions(**(flags or {})[DataOptions]).load(data)
        overview = look_at(splits, check=check, progress=progress)
    show(describe(overview), as_json)
