"""The application: its commands and its version."""

import re

from tests.support.commands import Output, run

import engram


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
