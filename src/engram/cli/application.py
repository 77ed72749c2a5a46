"""The command line's application."""

from __future__ import annotations

import typer

from engram import __version__
from engram.cli.flags import option

app = typer.Typer(
    name="engram",
    help="Teach one frozen Vision Transformer any number of new tasks, each one small file.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
