"""`engram serve`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from engram.cli.application import Backbone, Json, app
from engram.cli.bars import bars
from engram.cli.flags import flags_from, option
from engram.cli.terminal import show
from engram.serve.service_settings import Settings
from engram.util.description import Description
from engram.util.settings import Given


@app.command(name="serve")
@flags_from({Settings: "Service"})
def serve_command(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="BUNDLE|FILE…", help="A bundle, or engrams as if composed."),
    ],
    backbone: Backbone = None,
    token: Annotated[
        str | None,
        option(
            "Access",
            "Secret that a client must send to attach or delete tasks.",
            envvar="ENGRAM_TOKEN",
            show_envvar=True,
        ),
    ] = None,
    ask_token: Annotated[
        str | None,
        option(
            "Access",
            "Secret that a client must send to ask; needed with --host beyond this machine.",
            envvar="ENGRAM_ASK_TOKEN",
            show_envvar=True,
        ),
    ] = None,
    as_json: Json = False,
    *,
    flags: Given,
) -> None:
    """Serve all tasks of a bundle, or of engrams, over HTTP, with a page to try them."""
    from engram.serve.launch import Job, bundle_to_serve, serve

    settings = Settings(**(flags or {})[Settings])
    with ExitStack() as until_ready, bundle_to_serve(sources) as folder:
        quiet = as_json or not sys.stderr.isatty()  # in a file, stderr is the log alone
        until_ready.enter_context(bars(quiet))("loading the tasks", 0, 0)

        def ready(description: Description) -> None:
            until_ready.close()
            lost = [("kept", "attached tasks are gone when the service stops: there is no bundle")]
            rows = lost if token and folder not in sources else []
            show(replace(description, rows=[*description.rows, *rows]), as_json)

        serve(Job(folder, settings, token, ask_token, backbone), ready)
