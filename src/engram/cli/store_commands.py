"""Commands about engrams as files: inspect, compose, merge, bundle, convert, push, pull, list."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engram.cli.application import Backbone, Json, OutEngram, OutFolder, Overwrite, app
from engram.cli.bars import bars
from engram.cli.complete import task_names
from engram.cli.flags import HUB, MODEL, OUTPUT, TASK, numbers, option
from engram.cli.terminal import show
from engram.util.text import words

_CARD = "Card"
Revision = Annotated[str | None, option(HUB, "Branch, tag or commit.")]


@app.command()
def inspect(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|BUNDLE|BACKBONE",
            help="An engram, a bundle, or a backbone's path or Hub id.",
        ),
    ],
    as_json: Json = False,
) -> None:
    """Print what an engram, a bundle or a backbone is."""
    from engram.store.describe import describe

    show(describe(source), as_json)


@app.command()
def compose(
    sources: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Engrams, or bundles of them.")
    ],
    out: OutFolder,
    backbone: Backbone = None,
    overwrite: Annotated[
        bool, option(OUTPUT, "Replace or leave out tasks of a bundle that is there.", "--overwrite")
    ] = False,
    as_json: Json = False,
) -> None:
    """Put engrams for one backbone into one folder, after checking that they fit together."""
    from engram.store.compose import compose
    from engram.store.describe import describe_bundle

    bundle = compose(sources, out, backbone=backbone, overwrite=overwrite)
    show(describe_bundle(bundle), as_json)


@app.command(name="merge")
def merge_command(
    sources: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Two or more engrams of one task.")
    ],
    out: OutEngram,
    weights: Annotated[
        str,
        option(
            TASK, "Share of each in the average, together 1 (default: all the same).", metavar="A,B"
        ),
    ] = "",
    task: Annotated[
        str | None, option(TASK, "Name of the task (default: that of the first file).")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Merge engrams of one task: average trainings, or add up what was taught."""
    from engram.store.describe import describe_engram
    from engram.store.merging import merge

    shares = numbers("--weights", weights, float)
    merged = merge(sources, out, weights=shares, task=task, overwrite=overwrite)
    show(describe_engram(merged, out.stat().st_size), as_json)


bundle_app = typer.Typer(help="Change a bundle.", no_args_is_help=True)
app.add_typer(bundle_app, name="bundle")


BundleFolder = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder of engrams.")]
BundleTask = Annotated[
    str, typer.Argument(metavar="TASK", help="The task.", autocompletion=task_names)
]


@bundle_app.command(name="remove")
def bundle_remove(
    bundle: BundleFolder,
    task: BundleTask,
    as_json: Json = False,
) -> None:
    """Remove a task, its file and its older versions from a bundle; `engram compose` adds tasks."""
    from engram.store.bundles import read_bundle
    from engram.store.compose import update_bundle
    from engram.store.describe import describe_bundle

    old = read_bundle(bundle)
    new = old.minus(task)
    update_bundle(old, new)
    show(describe_bundle(new), as_json)


@bundle_app.command(name="history")
def bundle_history(
    bundle: BundleFolder,
    task: Annotated[
        str | None,
        typer.Argument(metavar="[TASK]", help="A task.", autocompletion=task_names),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the versions of tasks: the one that answers, its shadow, and those before it."""
    from engram.store.bundles import read_bundle
    from engram.store.describe import describe_history

    show(describe_history(read_bundle(bundle), task), as_json)


@bundle_app.command(name="rollback")
def bundle_rollback(
    bundle: BundleFolder,
    task: BundleTask,
    to: Annotated[
        str,
        option(TASK, "Start of the content of a version (default: the last one).", metavar="HASH"),
    ] = "",
    as_json: Json = False,
) -> None:
    """Let an older version of a task answer again. The one that it replaces is kept."""
    from engram.store.compose import roll_back
    from engram.store.describe import describe_history

    show(describe_history(roll_back(bundle, task, to), task), as_json)


@app.command()
def convert(
    checkpoint: Annotated[
        str, typer.Argument(metavar="OLD.pt", help="The old checkpoint, or hf:OWNER/NAME/OLD.pt.")
    ],
    out: Annotated[Path, option(OUTPUT, "The folder to write engrams into.", "-o", "--out")],
    base: Annotated[
        str | None,
        option(
            MODEL,
            "Path or Hub id of the ViT it was made from. Known for the published ones.",
            metavar="BACKBONE",
        ),
    ] = None,
    names: Annotated[str, option(TASK, "Names for its tasks, in order.", metavar="A,B")] = "",
    raw_pixels: Annotated[
        bool | None,
        option(
            MODEL,
            "Whether it was trained on raw pixels from 0 to 1. Known for the published ones.",
            "--raw-pixels/--normalised-pixels",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make engrams from a checkpoint of necrashter/transformers-learnable-memory."""
    from engram.store.describe import describe_engrams
    from engram.store.legacy import convert

    paths = convert(checkpoint, base, out, names=words(names) or None, raw_pixels=raw_pixels)
    show(describe_engrams(paths), as_json)


@app.command(name="push")
def push_command(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="FILE|BUNDLE", help="An engram, a bundle, or engrams that fit."),
    ],
    to: Annotated[str, option(HUB, "The Hub repository.", metavar="OWNER/NAME")],
    dry_run: Annotated[
        bool, option(OUTPUT, "Show exactly what would be sent, and send nothing.", "--dry-run")
    ] = False,
    revision: Annotated[str | None, option(HUB, "Branch to push to; created if it is new.")] = None,
    private: Annotated[
        bool, option(HUB, "Create the repository as private, if it is new.", "--private")
    ] = False,
    license: Annotated[
        str | None, option(_CARD, "Licence on the card, such as apache-2.0.")
    ] = None,
    backbone: Annotated[
        str | None, option(_CARD, "Hub id where others find the backbone.", metavar="OWNER/NAME")
    ] = None,
    message: Annotated[str | None, option(HUB, "Commit message.")] = None,
    replace: Annotated[
        bool, option(HUB, "Delete other engrams in the repository.", "--replace")
    ] = False,
    as_json: Json = False,
) -> None:
    """Upload engrams to the Hub, with a card that describes them."""
    from engram.store.describe import describe_push
    from engram.store.sharing import push

    with bars(as_json) as progress:
        progress("preparing the push" if dry_run else f"pushing to {to}", 0, 0)
        done = push(
            sources, to, dry_run=dry_run, revision=revision, private=private or None,
            license=license, backbone=backbone, message=message, replace=replace,
        )  # fmt: skip
    show(describe_push(done, dry_run), as_json)


@app.command(name="pull")
def pull_command(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="hf:OWNER/NAME[/FILE]", help="Repositories or engrams of the Hub."),
    ],
    out: Annotated[Path | None, option(OUTPUT, "The folder to write.", "-o", "--out")] = None,
    revision: Revision = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Download engrams from the Hub, verify them, and write them into a folder."""
    from engram.store.describe import describe_pull
    from engram.store.sharing import pull

    with bars(as_json) as progress:
        progress(f"pulling {', '.join(sources)}", 0, 0)
        done = pull(sources, out, revision=revision, overwrite=overwrite)
    show(describe_pull(done), as_json)


@app.command(name="list")
def list_command(
    source: Annotated[
        str, typer.Argument(metavar="hf:OWNER/NAME|FOLDER", help="Where to look for engrams.")
    ],
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """List the engrams in a Hub repository or a folder."""
    from engram.store.describe import describe_list
    from engram.store.remote import list_engrams

    show(describe_list(source, list_engrams(source, revision=revision)), as_json)
