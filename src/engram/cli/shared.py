"""The application, and the arguments and options that several of its commands share."""

from __future__ import annotations

from typing import Any

import typer

from engram import __version__
from engram.cli.flags import (
    DATA,
    MODEL,
    OUTPUT,
    RESOURCES,
    TASK,
    among,
    argument,
    help_line,
    option,
    out_option,
    switch,
    task_names,
)
from engram.util.cpus import DECODERS, DECODERS_SHOWN, use_threads
from engram.util.settings import ComputeSettings, setting_of

app = typer.Typer(
    name="engram",
    help="Teach one frozen Vision Transformer any number of new tasks, each one small file.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _compute_option(name: str) -> Any:
    item = setting_of(ComputeSettings, name)
    about, choices = item.metadata["about"], item.metadata["choices"]
    if not choices:
        return option(RESOURCES, help_line(about), default=item.default, metavar="NAME")
    line = help_line(about, ", ".join(choices))
    return option(RESOURCES, line, default=item.default, autocompletion=among(choices))


def _compute_with(threads: int | None) -> None:
    if threads:
        use_threads(threads)


JSON = switch(OUTPUT, "Print one JSON document for machines.", "--json")
_DATA_HELP = "A folder, a table, .npz, hf:NAME, digits or a preset."
DATA_ARGUMENT = argument("DATA", _DATA_HELP)
OPTIONAL_DATA = argument("DATA", _DATA_HELP, default=None)
TASK_DATA = option(
    DATA,
    "A task and its data to measure it on, with a split of its own if you like; repeatable.",
    metavar="NAME=DATA[:SPLIT]",
)
SPLIT = option(
    DATA,
    "Split of the data: train, val or test.",
    default="test",
    autocompletion=among(("train", "val", "test")),
)
BACKBONE = option(MODEL, "Path or Hub id of the backbone, if it has moved.", metavar="BACKBONE")
OWN_BACKBONE = option(
    MODEL,
    "The backbone: a path, a Hub id, a name that `engram backbones` lists, pico, or auto, the "
    "one that fit would take.",
    default="auto",
    metavar="BACKBONE",
)
IMAGE_SIZE = option(TASK, "Height and width of images in pixels, if not the backbone's own.")
ENGRAMS = argument("FILE", "Engrams or bundles.")
BATCH = option(RESOURCES, "Images per pass.", default=64)
WORKERS = option(
    RESOURCES, "Processes that decode images.", default=DECODERS, show_default=DECODERS_SHOWN
)
THREADS = option(  # for every command that computes
    RESOURCES,
    "Number of CPU threads (default: one for each CPU that the process may use).",
    min=1,
    callback=_compute_with,
    show_default=False,
)
DEVICE = _compute_option("device")
ENGINE = _compute_option("engine")
PRECISION = _compute_option("precision")
BACKBONE_DTYPE = _compute_option("backbone_dtype")
TASKS = option(MODEL, "Only these tasks; repeatable.", "--task", autocompletion=task_names)
OUT_FOLDER = out_option("The folder to write.", default=...)
OUT_ENGRAM = out_option("The engram to write.", default=...)
OVERWRITE = switch(OUTPUT, "Replace what is there.", "--overwrite")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"engram {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = option(
        None, "Print the version.", "--version", default=False, callback=_version, is_eager=True
    ),
) -> None:
    pass
