"""The commands: parse, call, print. No logic.

A command imports what it needs when it runs, so that `engram --help` answers at once; it calls
one function and hands the result to `_show`. Whatever goes wrong is told by `main`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from engram import __version__
from engram.errors import EngramError

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
        str, typer.Argument(metavar="FILE|BUNDLE|TRUNK", help="What to look at; a trunk loads.")
    ],
    as_json: Json = False,
) -> None:
    """Print what an engram, a bundle or a trunk is."""
    from engram.files import read_engram

    engram = read_engram(source)
    _show({**engram.header(), "content": engram.content}, str(engram), as_json)


def _show(document: Any, text: str, as_json: bool) -> None:
    """The result: a JSON document for machines, or text for people."""
    print(json.dumps(document, ensure_ascii=False, indent=2) if as_json else text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and give its exit code: 0, 2 after a user's mistake, 1 after ours.

    A mistake is one sentence on stderr; with `--json`, stdout holds {"error": the sentence}.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
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
        print(json.dumps({"error": sentence}, ensure_ascii=False))
    print(sentence, file=sys.stderr)
