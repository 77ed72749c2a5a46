"""The application, what makes its commands, and arguments and options that several share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar, get_type_hints

import typer

from engram import __version__
from engram.cli.flags import (
    among,
    argument,
    help_line,
    option,
    out_option,
    place_in_help,
    setting_flags,
    switch,
    take_given,
    task_names,
)
from engram.cli.terminal import bars, complain, show
from engram.util.cpus import DECODERS, DECODERS_SHOWN, use_threads
from engram.util.settings import ComputeSettings, setting_of, settings_fields
from engram.util.text import Description

Command = TypeVar("Command", bound=Callable[..., Description | None])

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
        return option("Resources", help_line(about), default=item.default, metavar="NAME")
    line = help_line(about, ", ".join(choices))
    return option("Resources", line, default=item.default, autocompletion=among(choices))


def _compute_with(threads: int | None) -> None:
    if threads:
        use_threads(threads)


JSON = switch("Output", "Print one JSON document for machines.", "--json")
_DATA_HELP = "A folder, a table, .npz, hf:NAME, digits or a preset."
DATA_ARGUMENT = argument("DATA", _DATA_HELP)
OPTIONAL_DATA = argument("DATA", _DATA_HELP, default=None)
TASK_DATA = option(
    "Data",
    "A task and its data to measure it on, with a split of its own if you like; repeatable.",
    metavar="NAME=DATA[:SPLIT]",
)
SPLIT = option(
    "Data",
    "Split of the data: train, val or test.",
    default="test",
    autocompletion=among(("train", "val", "test")),
)
BACKBONE = option("Model", "Path or Hub id of the backbone, if it has moved.", metavar="BACKBONE")
OWN_BACKBONE = option(
    "Model",
    "The backbone: a path, a Hub id, a name that `engram backbones` lists, pico, or auto, the "
    "one that fit would take.",
    default="auto",
    metavar="BACKBONE",
)
IMAGE_SIZE = option("Task", "Height and width of images in pixels, if not the backbone's own.")
ENGRAMS = argument("FILE", "Engrams or bundles.")
BATCH = option("Resources", "Images per pass.", default=64)
WORKERS = option(
    "Resources", "Processes that decode images.", default=DECODERS, show_default=DECODERS_SHOWN
)
THREADS = option(  # for every command that computes
    "Resources",
    "Number of CPU threads (default: one for each CPU that the process may use).",
    min=1,
    callback=_compute_with,
    show_default=False,
)
DEVICE = _compute_option("device")
ENGINE = _compute_option("engine")
PRECISION = _compute_option("precision")
BACKBONE_DTYPE = _compute_option("backbone_dtype")
TASKS = option("Model", "Only these tasks; repeatable.", "--task", autocompletion=task_names)
OUT_FOLDER = out_option("The folder to write.", default=...)
OUT_ENGRAM = out_option("The engram to write.", default=...)
OVERWRITE = switch("Output", "Replace what is there.", "--overwrite")


def command(
    name: str = "",
    panels: Mapping[type, str] | None = None,
    defaults: Any = None,
    *,
    work: str = "",
    threads: bool = False,
    group: typer.Typer = app,
) -> Callable[[Command], Command]:
    """Make a command of a function that returns its result, which is then printed.

    `panels` are settings classes: each field is a flag in the panel of its class, unless the
    function has a parameter of that name. `defaults`, an instance of one of them, has the values
    that the help shows. A command without a name is what its group does by itself.

    The function gets what it names of these: `flags`, the settings that were given; `progress`,
    which begins with `work`; and `as_json`. `threads` adds the flag for their number.
    """

    def register(function: Command) -> Command:
        own, hints = signature(function).parameters, get_type_hints(function)
        settings = {
            one: [item for item in settings_fields(one) if item.name not in own]
            for one in panels or {}
        }

        def run(as_json: bool, **values: Any) -> int:
            if threads:
                values.pop("threads")  # its callback has set the number
            given = {one: dict(take_given(values, items)) for one, items in settings.items()}
            shows = bars(as_json, work) if "progress" in own else nullcontext()
            with shows as progress:
                ours = {"flags": given, "progress": progress, "as_json": as_json}
                result = function(**values, **{key: ours[key] for key in ours if key in own})
            if result is None:
                return 0
            show(result, as_json)
            if result.problem:
                complain(result.problem, as_json=False)
            return result.code

        listed = [
            parameter.replace(annotation=hints[key], kind=Parameter.KEYWORD_ONLY)
            for key, parameter in own.items()
            if key not in ("flags", "progress", "as_json")
        ]
        listed += [_keyword("threads", THREADS, int | None)] if threads else []
        listed.append(_keyword("as_json", JSON, bool))
        for one, items in settings.items():
            shown = defaults if isinstance(defaults, one) else None
            listed += setting_flags(items, (panels or {})[one], shown)
        run.__doc__, run.__annotations__ = function.__doc__, {}
        run.__signature__ = Signature(sorted(listed, key=place_in_help))  # type: ignore[attr-defined]
        add = group.command(name=name) if name else group.callback(invoke_without_command=True)
        add(run)
        return function

    return register


def _keyword(name: str, default: Any, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


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
