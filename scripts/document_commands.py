"""A hook of mkdocs: every command with every flag, written into docs/commands.md as it is built.

The list comes from the commands themselves, so it cannot fall behind them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer.main

from engram.cli.main import app

PLACE = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What mkdocs calls for each page."""
    return markdown.replace(PLACE, commands()) if PLACE in markdown else markdown


def commands() -> str:
    """A section for each command: what it does, its arguments and its flags."""
    return "\n\n".join(_section(name, command) for name, command in found())


def found() -> Iterator[tuple[str, Any]]:
    """The commands by name, those of a group as `group command`."""
    yield from _within(typer.main.get_command(app), ())


def _within(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield " ".join(path), command
        return
    for name, inner in command.commands.items():
        if not inner.hidden:
            yield from _within(inner, (*path, name))


def _section(name: str, command: Any) -> str:
    rows = [_row(parameter) for parameter in command.params if parameter.name != "help"]
    table = ["| | what it is | default |", "|---|---|---|", *rows]
    return f"## engram {name}\n\n{_cell(command.help or '')}\n\n" + "\n".join(table)


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        called = f"`{parameter.metavar or parameter.name.upper()}`"
    else:
        called = ", ".join(f"`{flag}`" for flag in [*parameter.opts, *parameter.secondary_opts])
        if parameter.metavar:
            called += f" `{parameter.metavar}`"
    text, default = _cell(parameter.help or ""), parameter.default
    found = re.fullmatch(r"(.*) \((?:(.*); )?default: (.*)\)\.", text)
    if found:  # a flag made from a setting names its choices and its default there
        text, default = f"{found[1]} ({found[2]})." if found[2] else f"{found[1]}.", found[3]
    if parameter.required:
        shown = "needed"
    elif default is None or default is False or default in ("", (), []):
        shown = ""
    else:
        shown = f"`{default}`"
    return f"| {called} | {text} | {shown} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
