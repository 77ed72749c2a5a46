"""The commands: parse, call, print. No logic.

A command imports what it needs when it runs, so that `engram --help` answers at once; it calls
one function and hands the result to `_show`. Whatever goes wrong is told by `main`.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engram import __version__
from engram.errors import EngramError

if TYPE_CHECKING:
    from engram.describe import Description

app = typer.Typer(
    name="engram",
    help="Teach one frozen Vision Transformer any number of new tasks, each one small file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for machines.")]
Backbone = Annotated[
    str | None,
    typer.Option(metavar="TRUNK", help="Where the trunk lies today: a path or Hub id."),
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
    from engram.describe import describe

    _show(describe(source), as_json)


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
    from engram.bundles import compose
    from engram.describe import describe_bundle

    _show(describe_bundle(compose(sources, out, backbone=backbone)), as_json)


@app.command()
def convert(
    checkpoint: Annotated[Path, typer.Argument(metavar="OLD.pt", help="The old checkpoint.")],
    base: Annotated[
        str, typer.Option(metavar="TRUNK", help="The ViT it was made from: a path or Hub id.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write engrams into.")],
    names: Annotated[
        str | None, typer.Option(metavar="A,B", help="Names for its tasks, in order.")
    ] = None,
    raw_pixels: Annotated[
        bool, typer.Option("--raw-pixels", help="It was trained on pixels from 0 to 1 as they are.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make engrams from a checkpoint of necrashter/transformers-learnable-memory."""
    from engram.describe import describe_engrams
    from engram.legacy import convert

    called = names.split(",") if names else None
    paths = convert(checkpoint, base, out, names=called, raw_pixels=raw_pixels)
    _show(describe_engrams(paths), as_json)


def _show(result: Description, as_json: bool) -> None:
    """The result: a JSON document for machines, or rows and a table for people."""
    if as_json:
        print(json.dumps(result.document, indent=2), flush=True)
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    width = None if sys.stdout.isatty() else 1000  # in a file nothing has to be cut
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    wide = max((len(label) for label, _ in result.rows), default=0)
    for label, text in result.rows:
        console.print(f"{label:{wide}}  {text}", soft_wrap=True)
    if result.table:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for title in result.columns:
            table.add_column(title, overflow="fold")
        for cells in result.table:
            table.add_row(*cells)
        console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and give its exit code: 0, 2 after a user's mistake, 1 after ours.

    A mistake is one sentence on stderr; with `--json`, stdout holds {"error": the sentence}.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a letter is no error
            stream.reconfigure(errors="replace")
    try:
        app(args=given, prog_name="engram")
    except SystemExit as stop:  # how typer ends, after help and usage errors too
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code == 130:
            print("Stopped.", file=sys.stderr)
        return code
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    except EngramError as error:
        _complain(str(error), "--json" in given)
        return 2
    except OSError as error:  # of the machine: a full disk, a folder that may not be read
        what = f"{error.filename} cannot be used" if error.filename else "The output was lost"
        _complain(f"{what} ({error.strerror or error}).", "--json" in given)
        return 2
    except Exception as error:
        if os.environ.get("ENGRAM_DEBUG"):
            raise
        _complain(
            f"Something went wrong inside engram ({type(error).__name__}: {error}); please report "
            "it with the command you ran. ENGRAM_DEBUG=1 shows where.",
            "--json" in given,
        )
        return 1
    return 0


def _complain(sentence: str, as_json: bool) -> None:
    sentence = " ".join(sentence.split())
    if as_json:
        try:
            print(json.dumps({"error": sentence}), flush=True)
        except OSError:  # it was the output that failed
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    print(sentence, file=sys.stderr)
