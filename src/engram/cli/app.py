"""The command line's application, and the options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from engram import __version__
from engram.cli.complete import among, task_names
from engram.cli.flags import MODEL, OUTPUT, RESOURCES, TASK, help_line, option
from engram.util.cpus import use_threads
from engram.util.settings import (
    ABOUT_BACKBONE_DTYPE,
    ABOUT_DEVICE,
    ABOUT_PRECISION,
    BACKBONE_DTYPES,
    PRECISIONS,
)

app = typer.Typer(
    name="engram",
    help="Teach one frozen Vision Transformer any number of new tasks, each one small file.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _one_of(choices: tuple[str, ...], about: str) -> Any:
    return typer.Option(
        help=help_line(about, ", ".join(choices)),
        autocompletion=among(choices),
        rich_help_panel=RESOURCES,
    )


Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document for machines.", rich_help_panel=OUTPUT),
]
DataArgument = Annotated[
    str,
    typer.Argument(metavar="DATA", help="A folder, a table, .npz, hf:NAME, digits or a preset."),
]
Backbone = Annotated[
    str | None,
    typer.Option(
        metavar="BACKBONE",
        help="Path or Hub id of the backbone, if it has moved.",
        rich_help_panel=MODEL,
    ),
]
ImageSize = Annotated[
    int | None,
    typer.Option(
        "--image-size",
        help="Height and width of images in pixels, if not the backbone's own.",
        rich_help_panel=TASK,
    ),
]
Engrams = Annotated[list[Path], typer.Argument(metavar="FILE", help="Engrams or bundles.")]
Device = Annotated[
    str, typer.Option(metavar="NAME", help=help_line(ABOUT_DEVICE), rich_help_panel=RESOURCES)
]
Precision = Annotated[str, _one_of(PRECISIONS, ABOUT_PRECISION)]
BackboneDtype = Annotated[str, _one_of(BACKBONE_DTYPES, ABOUT_BACKBONE_DTYPE)]
Threads = Annotated[  # for every command that computes; the callback does it
    int | None,
    option(
        RESOURCES,
        "Number of CPU threads (default: one for each CPU that the process may use).",
        min=1,
        callback=lambda count: count and use_threads(count),
        show_default=False,
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        help="Only these tasks; repeatable.",
        autocompletion=task_names,
        rich_help_panel=MODEL,
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the file if it exists.", rich_help_panel=OUTPUT)
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"engram {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
