"""The folder of the demo: complete or untouched, and nobody else's."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from engram.cli.main import main
from engram.errors import EngramError, Interrupted
from engram.experiments import demo_output
from engram.experiments.demo import Demo, run_demo
from engram.experiments.demo_output import DEMO
from engram.train.features import caches


def quick(monkeypatch: pytest.MonkeyPatch, stop: BaseException | None = None) -> None:
    """A demo that writes a file and ends, or fails, at once."""

    def run(demo: Any) -> dict[str, Any]:
        (demo.folder / "report.html").write_text("new")
        if stop is not None:
            raise stop
        return {"what": DEMO}

    monkeypatch.setattr(Demo, "run", run)


def test_a_second_demo_replaces_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    run_demo(tmp_path / "demo")
    (tmp_path / "demo" / "report.html").write_text("old")
    (tmp_path / "demo" / ".DS_Store").touch()  # of somebody who looked at it
    run_demo(tmp_path / "demo")
    assert (tmp_path / "demo" / "report.html").read_text() == "new"
    (tmp_path / "demo" / "notes.txt").write_text("mine")
    with pytest.raises(EngramError, match="other files"):
        run_demo(tmp_path / "demo")
    assert (tmp_path / "demo" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("results", [None, "{", "[]", '{"what": "engram demo"}', '{"files": 3}'])
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, results: str | None) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    if results is not None:
        (tmp_path / "results.json").write_text(results)
    with pytest.raises(EngramError, match=r"is not a demo|other files"):
        run_demo(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_the_folder_one_stands_in_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--out", "."]) == 2
    assert "current folder" in capsys.readouterr().err
    assert main(["demo", "--seed", "-1"]) == 2


def test_a_file_in_the_way_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "demo").write_text("")
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 2
    assert "is a file" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file" / "demo")]) == 2
    err = capsys.readouterr().err
    assert "cannot be written" in err
    assert err.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission_is_a_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(EngramError, match=r"cannot be written \(Permission denied\)"):
        run_demo(tmp_path / "demo")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), "is full"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system"),
    ],
)
def test_what_the_disk_refuses_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, sentence: str
) -> None:
    quick(monkeypatch, error)
    with pytest.raises(EngramError, match=sentence):
        run_demo(tmp_path / "demo")
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_told_before_anything_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    monkeypatch.setattr(
        demo_output.shutil, "disk_usage", lambda path: type("", (), {"free": 10**8})()
    )
    with pytest.raises(EngramError, match=r"has 0.1 GB free"):
        run_demo(tmp_path / "demo")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_on_the_way_is_called_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever could not be written then, what to do about it is to make room."""
    quick(monkeypatch, EngramError("The cache cannot be written; set ENGRAM_CACHE."))
    free = iter([10**10, 4096])
    usage = lambda path: type("", (), {"free": next(free)})()  # noqa: E731
    monkeypatch.setattr(demo_output.shutil, "disk_usage", usage)
    with pytest.raises(EngramError, match=r"The disk of .* is full"):
        run_demo(tmp_path / "demo")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Interrupted("Stopped at step 3.")])
def test_ctrl_c_leaves_an_earlier_demo_as_it_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stop: BaseException,
) -> None:
    quick(monkeypatch)
    run_demo(tmp_path / "demo")
    (tmp_path / "demo" / "report.html").write_text("old")
    quick(monkeypatch, stop)
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 130
    assert "Stopped; nothing was written" in capsys.readouterr().err
    assert (tmp_path / "demo" / "report.html").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_the_cache_of_the_demo_goes_away_and_the_users_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGRAM_CACHE", str(tmp_path / "mine"))
    seen: list[Path] = []

    def run(demo: Any) -> dict[str, Any]:
        seen.append(caches.default_root())
        return {"what": DEMO}

    monkeypatch.setattr(Demo, "run", run)
    run_demo(tmp_path / "demo")
    assert seen[0].parent.parent == tmp_path
    assert not seen[0].exists()
    assert caches.default_root() == tmp_path / "mine"
