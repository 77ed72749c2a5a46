"""`engram serve` and `engram label-studio`."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from engram.cli import shared
from engram.cli.flags import argument, option, out_option
from engram.cli.terminal import bars, show
from engram.serve.service_settings import LabelSettings, Settings
from engram.util.settings import Given
from engram.util.text import Description


@shared.command("serve", {Settings: "Service"})
def serve_command(
    sources: list[Path] = argument("BUNDLE|FILE…", "A bundle, or engrams as if composed."),
    backbone: str | None = shared.BACKBONE,
    token: str | None = option(
        "Access",
        "Secret that a client must send to attach or delete tasks.",
        envvar="ENGRAM_TOKEN",
        show_envvar=True,
    ),
    ask_token: str | None = option(
        "Access",
        "Secret that a client must send to ask; needed with --host beyond this machine.",
        envvar="ENGRAM_ASK_TOKEN",
        show_envvar=True,
    ),
    *,
    flags: Given,
    as_json: bool,
) -> None:
    """Serve all tasks of a bundle, or of engrams, over HTTP, with a page to try them."""
    from engram.serve.launch import Job, bundle_to_serve

    settings = Settings(**flags[Settings])
    with ExitStack() as until_ready, bundle_to_serve(sources) as folder:
        quiet = as_json or not sys.stderr.isatty()  # in a file, stderr is the log alone
        until_ready.enter_context(bars(quiet, "loading the tasks"))

        def ready(description: Description) -> None:
            until_ready.close()
            lost = [("kept", "attached tasks are gone when the service stops: there is no bundle")]
            rows = lost if token and folder not in sources else []
            show(replace(description, rows=[*description.rows, *rows]), as_json)

        job = Job(folder, settings, token, ask_token, backbone)
        with job.open() as listener:
            from engram.serve.service import serve  # a port that is taken shows before torch loads

            serve(job, listener, ready)


@shared.command("label-studio", {LabelSettings: "Service"})
def label_studio_command(
    task: str = argument("TASK", "The task of the service that predicts."),
    out: Path = out_option("The folder for labelled images, one folder a class.", default=...),
    *,
    flags: Given,
    as_json: bool,
) -> None:
    """Connect a service to Label Studio: predictions in, annotated images out to a folder."""
    from engram.util.optional import require

    for package in ("fastapi", "uvicorn"):
        require(package, extra="serve", purpose="The backend for Label Studio")
    from engram.serve.label_studio import LabelSecrets, run_label_backend

    settings = LabelSettings(**flags[LabelSettings])
    names = ("ENGRAM_ASK_TOKEN", "LABEL_STUDIO_API_KEY", "ENGRAM_LABEL_PASSWORD")
    own = LabelSecrets(*(os.environ.get(name, "").strip() for name in names))

    def ready(url: str) -> None:
        document = {"url": url, "task": task, "service": settings.service, "out": str(out)}
        rows = [("backend", f"{url} (add it in Label Studio, Settings, Model)"),
                ("service", f"{settings.service}, task {task}"),
                ("annotated images", str(out))]  # fmt: skip
        show(Description(document, rows), as_json)

    run_label_backend(settings, task, out, own, ready)
