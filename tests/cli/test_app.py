"""The application: its commands and its version."""

import re
from typing import Any

import typer.main
from tests.support.commands import Output, run

import engram
from engram.cli.shared import app


def test_the_version(capsys: Output) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"engram {engram.__version__}\n"


def test_every_command_is_listed(capsys: Output) -> None:
    assert run("--help") == 0
    said = capsys.readouterr().out
    for command in ("fit", "sweep", "eval", "predict", "cache"):
        assert command in said
    panels = re.findall(r"─ (\w+) ─", said)
    assert panels[:6] == ["Options", "Begin", "Train", "Use", "Engrams", "Measure"]


def test_no_help_has_brackets_which_rich_would_not_print() -> None:
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        for parameter in command.params:
            assert "[" not in (getattr(parameter, "help", "") or ""), (name, parameter.name)
