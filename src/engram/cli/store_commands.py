"""Commands about engrams as files: inspect, compose, merge, bundle, convert, push, pull, list."""

from __future__ import annotations

from pathlib import Path

import typer

from engram.cli import shared
from engram.cli.flags import argument, numbers, option, out_option, switch, task_names
from engram.cli.terminal import Watch
from engram.util.text import Description, words

_CARD = "Card"
REVISION = option("Hub", "Branch, tag or commit.")


@shared.command("inspect")
def inspect(
    source: str = argument(
        "FILE|BUNDLE|BACKBONE", "An engram, a bundle, or a backbone's path or Hub id."
    ),
) -> Description:
    """Print what an engram, a bundle or a backbone is."""
    from engram.store.describe import describe

    return describe(source)


@shared.command("compose")
def compose(
    sources: list[Path] = argument("FILE", "Engrams, or bundles of them."),
    out: Path = shared.OUT_FOLDER,
    backbone: str | None = shared.BACKBONE,
    overwrite: bool = switch(
        "Output", "Replace or leave out tasks of a bundle that is there.", "--overwrite"
    ),
) -> Description:
    """Put engrams for one backbone into one folder, after checking that they fit together."""
    from engram.store.compose import compose
    from engram.store.describe import describe_bundle

    bundle = compose(sources, out, backbone=backbone, overwrite=overwrite)
    return describe_bundle(bundle)


@shared.command("merge")
def merge_command(
    sources: list[str] = argument("FILE", "Two or more engrams of one task."),
    out: Path = shared.OUT_ENGRAM,
    weights: str = option(
        "Task",
        "Share of each in the average, together 1 (default: all the same).",
        default="",
        metavar="A,B",
    ),
    task: str | None = option("Task", "Name of the task (default: that of the first file)."),
    overwrite: bool = shared.OVERWRITE,
) -> Description:
    """Merge engrams of one task: average trainings, or add up what was taught."""
    from engram.store.describe import describe_engram
    from engram.store.merging import merge

    shares = numbers("--weights", weights, float)
    merged = merge(sources, out, weights=shares, task=task, overwrite=overwrite)
    return describe_engram(merged, out.stat().st_size)


bundle_app = typer.Typer(help="Change a bundle.", no_args_is_help=True)
shared.app.add_typer(bundle_app, name="bundle")

BUNDLE = argument("BUNDLE", "A folder of engrams.")
BUNDLE_TASK = argument("TASK", "The task.", autocompletion=task_names)


@shared.command("remove", group=bundle_app)
def bundle_remove(bundle: Path = BUNDLE, task: str = BUNDLE_TASK) -> Description:
    """Remove a task, its file and its older versions from a bundle; `engram compose` adds tasks."""
    from engram.store.bundles import read_bundle
    from engram.store.compose import update_bundle
    from engram.store.describe import describe_bundle

    old = read_bundle(bundle)
    new = old.minus(task)
    update_bundle(old, new)
    return describe_bundle(new)


@shared.command("history", group=bundle_app)
def bundle_history(
    bundle: Path = BUNDLE,
    task: str | None = argument("[TASK]", "A task.", default=None, autocompletion=task_names),
) -> Description:
    """List the versions of tasks: the one that answers, its shadow, and those before it."""
    from engram.store.bundles import read_bundle
    from engram.store.describe import describe_history

    return describe_history(read_bundle(bundle), task)


@shared.command("rollback", group=bundle_app)
def bundle_rollback(
    bundle: Path = BUNDLE,
    task: str = BUNDLE_TASK,
    to: str = option(
        "Task",
        "Start of the content of a version (default: the last one).",
        default="",
        metavar="HASH",
    ),
) -> Description:
    """Let an older version of a task answer again. The one that it replaces is kept."""
    from engram.store.compose import roll_back
    from engram.store.describe import describe_history

    return describe_history(roll_back(bundle, task, to), task)


@shared.command("convert")
def convert(
    checkpoint: str = argument("OLD.pt", "The old checkpoint, or hf:OWNER/NAME/OLD.pt."),
    out: Path = out_option("The folder to write engrams into.", default=...),
    base: str | None = option(
        "Model",
        "Path or Hub id of the ViT it was made from. Known for the published ones.",
        metavar="BACKBONE",
    ),
    names: str = option("Task", "Names for its tasks, in order.", default="", metavar="A,B"),
    raw_pixels: bool | None = option(
        "Model",
        "Whether it was trained on raw pixels from 0 to 1. Known for the published ones.",
        "--raw-pixels/--normalised-pixels",
        show_default=False,
    ),
) -> Description:
    """Make engrams from a checkpoint of necrashter/transformers-learnable-memory."""
    from engram.store.describe import describe_engrams
    from engram.store.legacy import convert

    paths = convert(checkpoint, base, out, names=words(names) or None, raw_pixels=raw_pixels)
    return describe_engrams(paths)


@shared.command("push")
def push_command(
    sources: list[str] = argument("FILE|BUNDLE", "An engram, a bundle, or engrams that fit."),
    to: str = option("Hub", "The Hub repository.", default=..., metavar="OWNER/NAME"),
    dry_run: bool = switch(
        "Output", "Show exactly what would be sent, and send nothing.", "--dry-run"
    ),
    revision: str | None = option("Hub", "Branch to push to; created if it is new."),
    private: bool = switch("Hub", "Create the repository as private, if it is new.", "--private"),
    license: str | None = option(_CARD, "Licence on the card, such as apache-2.0."),
    backbone: str | None = option(
        _CARD, "Hub id where others find the backbone.", metavar="OWNER/NAME"
    ),
    message: str | None = option("Hub", "Commit message."),
    replace: bool = switch("Hub", "Delete other engrams in the repository.", "--replace"),
    *,
    progress: Watch,
) -> Description:
    """Upload engrams to the Hub, with a card that describes them."""
    from engram.store.describe import describe_push
    from engram.store.sharing import push

    progress("preparing the push" if dry_run else f"pushing to {to}", 0, 0)
    done = push(
        sources, to, dry_run=dry_run, revision=revision, private=private or None,
        license=license, backbone=backbone, message=message, replace=replace,
    )  # fmt: skip
    return describe_push(done, dry_run)


@shared.command("pull")
def pull_command(
    sources: list[str] = argument("hf:OWNER/NAME[/FILE]", "Repositories or engrams of the Hub."),
    out: Path | None = out_option("The folder to write."),
    revision: str | None = REVISION,
    overwrite: bool = shared.OVERWRITE,
    *,
    progress: Watch,
) -> Description:
    """Download engrams from the Hub, verify them, and write them into a folder."""
    from engram.store.describe import describe_pull
    from engram.store.sharing import pull

    progress(f"pulling {', '.join(sources)}", 0, 0)
    return describe_pull(pull(sources, out, revision=revision, overwrite=overwrite))


@shared.command("list")
def list_command(
    source: str = argument("hf:OWNER/NAME|FOLDER", "Where to look for engrams."),
    revision: str | None = REVISION,
) -> Description:
    """List the engrams in a Hub repository or a folder."""
    from engram.store.describe import describe_list
    from engram.store.remote import list_engrams

    return describe_list(source, list_engrams(source, revision=revision))
