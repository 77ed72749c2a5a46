"""A command that is printed runs as it is printed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engram.util.invocation import program


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with the program in it, which is not on the PATH."""
    folder = tmp_path / "a project" / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "engram"):
        (folder / name).touch(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.chdir(tmp_path)
    return folder


def test_the_path_of_the_script_where_it_is_not_on_the_path(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert program() == "'a project/.venv/bin/engram'"
    monkeypatch.chdir(installed.parent.parent)
    assert program() == ".venv/bin/engram"
    monkeypatch.chdir("/")
    assert program().strip("'").endswith("/a project/.venv/bin/engram")


def test_its_name_where_it_is_on_the_path(
    installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(installed))
    assert program() == "engram"
    other = tmp_path / "other"
    other.mkdir()
    (other / "engram").touch(0o755)
    monkeypatch.setenv("PATH", str(other))  # another installation is not this one
    assert program() == "'a project/.venv/bin/engram'"


def test_python_where_there_is_no_script(installed: Path) -> None:
    (installed / "engram").unlink()
    assert program() == f"'{installed}/python' -m engram"
