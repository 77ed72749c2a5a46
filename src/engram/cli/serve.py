"""`engram serve`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from engram.cli.app import Backbone, Json, app
from engram.cli.flags import Given, flags_of
from engram.cli.terminal import show
from engram.serve.settings import Settings


@app.command(name="serve")
@flags_of({Settings: "Service"})
def serve_command(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder of engrams.")],
    backbone: Backbone = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="ENGRAM_TOKEN",
            help="Secret that a client must send to attach or delete tasks.",
            show_envvar=True,
        ),
    ] = None,
    ask_token: Annotated[
        str | None,
        typer.Option(
            envvar="ENGRAM_ASK_TOKEN",
            help="Secret that a client must send to ask; needed with --host beyond this machine.",
            show_envvar=True,
        ),
    ] = None,
    as_json: Json = False,
    flags: Given | None = None,
) -> None:
    """Serve all tasks of a bundle over HTTP, with a page to try them."""
    from engram.serve.run import serve

    settings = Settings(**(flags or {})[Settings])
    serve(
        bundle, settings, partial(show, as_json=as_json),
        token=token, ask_token=ask_token, backbone=backbone,
    )  # fmt: skip
