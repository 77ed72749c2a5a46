"""Commands in this process, what they print, and how they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from engram.cli import main as cli

Output = pytest.CaptureFixture[str]


QUICK = ("--steps", "6", "--batch", "16", "--workers", "0", "--evaluations", "1")


def run(*arguments: object) -> int:
    """A command's exit code."""
    return cli.main([str(argument) for argument in arguments])


def fit(
    *more: object,
    data: str = "colours.npz",
    task: str = "new",
    out: str = "new.safetensors",
    backbone: str = "vit",
) -> int:
    return run("fit", data, "--task", task, "-o", out, "--backbone", backbone, *QUICK, *more)


def document(capsys: Output) -> Any:
    """The JSON document that was printed."""
    return json.loads(capsys.readouterr().out)


def assert_refused(sentence: str, code: int, capsys: Output) -> None:
    """Exit code 2, one line on stderr with this text in it, and the same as JSON on stdout."""
    said = capsys.readouterr()
    assert code == 2, said.err
    assert sentence in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert "Something went wrong" not in said.err
    assert json.loads(said.out) == {"error": said.err.strip()}
    assert not Path("new.safetensors").exists()
