"""The command line's application, and the options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from engram import __version__
from engram.cli.complete import among, task_names
from engram.cli.flags import DATA, MODEL, OUTPUT, RESOURCES, TASK, help_line, option
from engram.util.cpus import DECODERS_SHOWN, use_threads
from engram.util.settings import (
    ABOUT_BACKBONE_DTYPE,
    ABOUT_DEVICE,
    ABOUT_ENGINE,
    ABOUT_PRECISION,
    BACKBONE_DTYPES,
    ENGINES,
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


def _choice(choices: tuple[str, ...], about: str) -> Any:
    line = help_line(about, ", ".join(choices))
    return option(RESOURCES, line, autocompletion=among(choices))


Json = Annotated[bool, option(OUTPUT, "Print one JSON document for machines.", "--json")]
_DATA = typer.Argument(metavar="DATA", help="A folder, a table, .npz, hf:NAME, digits or a preset.")
DataArgument = Annotated[str, _DATA]
OptionalData = Annotated[str | None, _DATA]
TaskData = Annotated[
    list[str] | None,
    option(
        DATA,
        "A task and its data to measure it on, with a split of its own if you like; repeatable.",
        metavar="NAME=DATA[:SPLIT]",
    ),
]
Split = Annotated[
    str,
    option(
        DATA,
        "Split of the data: train, val or test.",
        autocompletion=among(("train", "val", "test")),
    ),
]
Backbone = Annotated[
    str | None,
    option(MODEL, "Path or Hub id of the backbone, if it has moved.", metavar="BACKBONE"),
]
OwnBackbone = Annotated[
    str,
    option(
        MODEL,
        "The backbone: a path, a Hub id, a name that `engram backbones` lists, pico, or auto, the "
        "one that fit would take.",
        metavar="BACKBONE",
    ),
]
ImageSize = Annotated[
    int | None, option(TASK, "Height and width of images in pixels, if not the backbone's own.")
]
Engrams = Annotated[list[Path], typer.Argument(metavar="FILE", help="Engrams or bundles.")]
Batch = Annotated[int, option(RESOURCES, "Images per pass.")]
Workers = Annotated[
    int, option(RESOURCES, "Processes that decode images.", show_default=DECODERS_SHOWN)
]
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
Device = Annotated[str, option(RESOURCES, help_line(ABOUT_DEVICE), metavar="NAME")]
EngineName = Annotated[str, _choice(ENGINES, ABOUT_ENGINE)]
Precision = Annotated[str, _choice(PRECISIONS, ABOUT_PRECISION)]
BackboneDtype = Annotated[str, _choice(BACKBONE_DTYPES, ABOUT_BACKBONE_DTYPE)]
Tasks = Annotated[
    list[str] | None,
    option(MODEL, "Only these tasks; repeatable.", "--task", autocompletion=task_names),
]
OutFolder = Annotated[Path, option(OUTPUT, "The folder to write.", "-o", "--out")]
OutEngram = Annotated[Path, option(OUTPUT, "The engram to write.", "-o", "--out")]
Overwrite = Annotated[bool, option(OUTPUT, "Replace what is there.", "--overwrite")]


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
