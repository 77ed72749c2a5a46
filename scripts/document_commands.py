"""An mkdocs hook: lists every command with its flags, and every setting of a recipe.

Both come from the code as the site is built, so the pages cannot fall behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import typer.main

import engram.cli.main  # noqa: F401, registers the commands
from engram.cli.shared import app
from engram.train.recipe import Recipe

COMMANDS = "<!-- commands -->"
RECIPE = "<!-- recipe -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What mkdocs calls for each page."""
    for place, text in ((COMMANDS, commands), (RECIPE, recipe)):
        if place in markdown:
            markdown = markdown.replace(place, text())
    return markdown.replace(" ± ", "\u00a0±\u00a0")  # a mean and its deviation stay on one line


def commands() -> str:
    """A section for each command: what it does, its arguments and its flags."""
    return "\n\n".join(_section(name, command) for name, command in found())


def recipe() -> str:
    """A table of the settings, their defaults and what they are."""
    rows = ["| setting | default | what it is |", "|---|---|---|"]
    for item in fields(Recipe):
        choices = item.metadata["choices"]
        about = item.metadata["about"] + (f" ({', '.join(choices)})" if choices else "")
        rows.append(f"| `{item.name}` | `{item.metadata['shown']}` | {_cell(about)} |")
    return "\n".join(rows)


def found() -> Iterator[tuple[str, Any]]:
    """The commands by name, those of a group as `group command`."""
    yield from _within(typer.main.get_command(app), ())


def _within(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield " ".join(path), command
        return
    if path and command.invoke_without_command:  # it does something by itself
        yield " ".join(path), command
    for name, inner in command.commands.items():
        if not inner.hidden:
            yield from _within(inner, (*path, name))


def _section(name: str, command: Any) -> str:
    panels: dict[str, list[str]] = {}  # in the order of `--help`
    for parameter in command.params:
        if parameter.name != "help":
            panel = getattr(parameter, "rich_help_panel", None) or ""
            panels.setdefault(panel, []).append(_row(parameter))
    table = ["| argument or flag | what it is | default |", "|---|---|---|"]
    for panel, rows in panels.items():
        table += [f"| **{panel}** | | |", *rows] if panel else rows
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
        shown = "required"
    elif default is None or default is False or default in ("", (), []):
        shown = ""
    else:
        shown = f"`{default}`"
    return f"| {called} | {text} | {shown} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
