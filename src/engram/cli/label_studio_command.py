"""`engram label-studio`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from engram.cli.application import Json, app
from engram.cli.flags import OUTPUT, flags_from, option
from engram.cli.terminal import show
from engram.serve.label_settings import LabelSettings
from engram.util.description import Description
from engram.util.settings import Given


@app.command(name="label-studio")
@flags_from({LabelSettings: "Service"})
def label_studio_command(
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="The task of the service that predicts.")
    ],
    out: Annotated[
        Path, option(OUTPUT, "The folder for labelled images, one folder a class.", "-o", "--out")
    ],
    as_json: Json = False,
    *,
    flags: Given,
) -> None:
    """Connect a service to Label Studio: predictions in, annotated images out to a folder."""
    from engram.util.optional import require

    for package in ("fastapi", "uvicorn"):
        require(package, extra="serve", purpose="The backend for Label Studio")
    from engram.serve.label_studio import LabelSecrets, run_label_backend

    settings = LabelSettings(**(flags or {})[LabelSettings])
    names = ("ENGRAM_ASK_TOKEN", "LABEL_STUDIO_API_KEY", "ENGRAM_LABEL_PASSWORD")
    own = LabelSecrets(*(os.environ.get(name, "").strip() for name in names))

    def ready(url: str) -> None:
        document = {"url": url, "task": task, "service": settings.service, "out": str(out)}
        rows = [("backend", f"{url} (add it in Label Studio, Settings, Model)"),
                ("service", f"{settings.service}, task {task}"),
                ("annotated images", str(out))]  # fmt: skip
        show(Description(document, rows), as_json)

    run_label_backend(settings, task, out, own, ready)
