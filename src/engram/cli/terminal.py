"""Output of results and errors, for people and machines.

Text may come from a stranger's file. `visible` makes it harmless here, where everything is printed,
and json escapes it in documents.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import TYPE_CHECKING

from engram.errors import Notice
from engram.util.documents import jsonable
from engram.util.text import visible

if TYPE_CHECKING:
    from engram.util.description import Description


def is_first() -> bool:
    """Whether this is the only process, or the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def show(result: Description, as_json: bool) -> None:
    """Print the result: a JSON document for machines, or rows and a table for people."""
    if not is_first():
        return
    if as_json:
        show_document(result.document)
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    width = None if sys.stdout.isatty() else 1000  # in a file nothing has to be cut
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    wide = max((len(label) for label, _ in result.rows), default=0)
    for label, text in result.rows:
        console.print(f"{visible(label):{wide}}  {_visible_block(text)}", soft_wrap=True)
    if result.table:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for title in result.columns:
            table.add_column(visible(title), overflow="fold")
        for cells in result.table:
            table.add_row(*map(visible, cells))
        console.print(table)
    for line in result.legend:
        console.print(visible(line), soft_wrap=True)


def show_document(document: object) -> None:
    """Print a JSON document. NaN and infinity, which JSON does not have, are null."""
    print(json.dumps(jsonable(document), indent=2, allow_nan=False), flush=True)


def _visible_block(text: str) -> str:
    """The text of a row. Only one that begins with a line break, a block, has several lines."""
    if not text.startswith("\n"):
        return visible(text)
    return "\n".join(map(visible, text.split("\n")))


def complain(sentence: str, as_json: bool) -> None:
    """Print a mistake: one line on stderr, and for machines a document on stdout as well."""
    lines = [line.strip() for line in sentence.splitlines()]
    sentence = " ".join(line for line in lines if line)  # spaces inside may be those of a path
    if as_json:
        try:
            print(json.dumps({"error": sentence}), flush=True)
        except OSError:  # it was the output that failed
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    print(visible(sentence), file=sys.stderr)


def announce(sentence: str) -> None:
    """Show a sentence to the user while all goes on."""
    warnings.warn(sentence, Notice, stacklevel=2)


_usual = warnings.formatwarning


def notice_or_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """A notice is its sentence alone; other warnings also say where they come from."""
    if issubclass(category, Notice):
        return f"{visible(str(message))}\n"
    text = _usual(message, category, filename, lineno, line)
    return "\n".join(map(visible, text.split("\n")))
