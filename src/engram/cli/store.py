"""Commands about engrams as files: inspect, compose, convert, push, pull, list."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engram.cli.app import Backbone, Json, app
from engram.cli.flags import words
from engram.cli.terminal import show


@app.command()
def inspect(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|BUNDLE|TRUNK", help="An engram, a bundle, or a trunk's path or Hub id."
        ),
    ],
    as_json: Json = False,
) -> None:
    """Print what an engram, a bundle or a trunk is."""
    from engram.store.describe import describe

    show(describe(source), as_json)


@app.command()
def compose(
    sources: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Engrams, or bundles of them.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write.")],
    backbone: Backbone = None,
    as_json: Json = False,
) -> None:
    """Put engrams for one trunk into one folder, after checking that they fit together."""
    from engram.store.bundles import compose
    from engram.store.describe import describe_bundle

    show(describe_bundle(compose(sources, out, backbone=backbone)), as_json)


@app.command()
def convert(
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="OLD.pt", help="The old checkpoint, or hf:OWNER/NAME/OLD.pt."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write engrams into.")],
    base: Annotated[
        str | None,
        typer.Option(
            metavar="TRUNK",
            help="Path or Hub id of the ViT it was made from. Known for the published ones.",
        ),
    ] = None,
    names: Annotated[str, typer.Option(metavar="A,B", help="Names for its tasks, in order.")] = "",
    raw_pixels: Annotated[
        bool | None,
        typer.Option(
            "--raw-pixels/--normalised-pixels",
            help="Whether it was trained on raw pixels from 0 to 1. Known for the published ones.",
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
    to: Annotated[str, typer.Option(metavar="OWNER/NAME", help="The Hub repository.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show exactly what would be sent, and send nothing.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch to push to; created if it is new.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Create the repository as private, if it is new.")
    ] = False,
    license: Annotated[
        str | None, typer.Option(help="Licence on the card, such as apache-2.0.")
    ] = None,
    backbone: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="Hub id where others find the trunk."),
    ] = None,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Delete other engrams in the repository.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Upload engrams to the Hub, with a card that describes them."""
    from engram.store.describe import describe_push
    from engram.store.sharing import push

    done = push(
        sources, to, dry_run=dry_run, revision=revision, private=private or None, license=license,
        backbone=backbone, message=message, replace=replace,
    )  # fmt: skip
    show(describe_push(done, dry_run), as_json)


@app.command(name="pull")
def pull_command(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="hf:OWNER/NAME[/FILE]", help="Repositories or engrams of the Hub."),
    ],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The folder to write.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace other files of the same names.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Download engrams from the Hub, verify them, and write them into a folder."""
    from engram.store.describe import describe_pull
    from engram.store.sharing import pull

    show(describe_pull(pull(sources, out, revision=revision, overwrite=overwrite)), as_json)


@app.command(name="list")
def list_command(
    source: Annotated[
        str, typer.Argument(metavar="hf:OWNER/NAME|FOLDER", help="Where to look for engrams.")
    ],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    as_json: Json = False,
) -> None:
    """List the engrams in a Hub repository or a folder."""
    from engram.store.describe import describe_list
    from engram.store.remote import list_engrams

    show(describe_list(source, list_engrams(source, revision=revision)), as_json)
