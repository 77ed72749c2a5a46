"""The demo, end to end but small: what it writes, what it proves, what it refuses."""

import errno
import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from engram.cli.main import main
from engram.errors import EngramError, Interrupted
from engram.experiments import demo_output
from engram.experiments.demo import Demo, DemoSize, run_demo
from engram.experiments.demo_output import DEMO
from engram.inference.load import load_model
from engram.train import cache
from engram.trunks.load import load_trunk

TINY = DemoSize(digits=40, digits_epochs=1, scenes=40, scenes_epochs=1, test=40, rounds=1)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """One small demo for all tests: its folder, its results, its story."""
    folder = tmp_path_factory.mktemp("out") / "demo"
    story = StringIO()
    results = run_demo(folder, size=TINY, console=Console(file=story, width=100))
    return folder, results, story.getvalue()


def test_results_say_what_the_demo_found(ran: tuple[Path, dict[str, Any], str]) -> None:
    folder, results, _ = ran
    assert json.loads((folder / "results.json").read_text()) == results
    assert set(results["accuracies"]) == {"digits", "shape", "count"}
    assert all(0 <= value <= 1 for value in results["accuracies"].values())
    assert results["base_identical"] is True
    assert set(results["costs"]) == {"digits", "shape", "count"}
    assert all(0 < cost["share"] < 0.05 for cost in results["costs"].values())
    assert results["costs"]["count"]["macs"] > results["costs"]["shape"]["macs"]  # it reads more
    assert results["seconds"] > 0
    assert results["passes"]["ratio"] > 1
    assert set(results["picture"]["answers"]) == {"base", "digits", "shape", "count"}


def test_with_the_mask_other_tasks_change_nothing(ran: tuple[Path, dict[str, Any], str]) -> None:
    found = ran[1]["without_mask"]
    assert [step["beside"] for step in found["steps"]] == [[], ["shape"], ["shape", "count"]]
    assert {step["with_mask"] for step in found["steps"]} == {ran[1]["accuracies"]["digits"]}
    assert found["steps"][0]["without_mask"] == found["steps"][0]["with_mask"]
    assert 0 <= found["base_answers_changed"] <= 1


def test_the_bundle_answers_and_leaves_base_alone(ran: tuple[Path, dict[str, Any], str]) -> None:
    model = load_model(ran[0] / "bundle").eval()
    assert model.task("count").spec.extends == ("shape",)
    pixels = torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        logits = model(pixels, exact=True)
        assert torch.equal(logits["base"], load_trunk("pico").eval()(pixels))
    assert {name: values.shape[1] for name, values in logits.items()} == {
        "base": 10,
        "digits": 10,
        "shape": 5,
        "count": 4,
    }


def test_the_story_is_told_in_order(ran: tuple[Path, dict[str, Any], str]) -> None:
    story, at = ran[2], 0
    for part in ("One frozen ViT", "digits", "shape", "count", "Composed", "one pass",
                 "bit for bit", "One pass for all", "Without the mask", "report.html",
                 "engram fit photos"):  # fmt: skip
        at = story.find(part, at)
        assert at >= 0, part


def test_only_what_is_listed_is_left_behind(ran: tuple[Path, dict[str, Any], str]) -> None:
    folder, results, _ = ran
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert there == set(results["files"])
    assert {"report.html", "results.json", "bundle/bundle.json"} <= there
    assert [path.name for path in folder.parent.iterdir()] == ["demo"]


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
    with pytest.raises(EngramError, match=r"holds a demo and other files \(notes.txt\)"):
        run_demo(tmp_path / "demo")
    assert (tmp_path / "demo" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("results", [None, "{", "[]", '{"what": "engram demo"}', '{"files": 3}'])
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, results: str | None) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    if results is not None:
        (tmp_path / "results.json").write_text(results)
    with pytest.raises(EngramError, match="choose another one with --out"):
        run_demo(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_the_folder_one_stands_in_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--out", "."]) == 2
    assert "is the current folder and cannot be replaced; choose" in capsys.readouterr().err
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
    with pytest.raises(EngramError, match=r"cannot be written to .* \(Permission denied\)"):
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
    with pytest.raises(EngramError, match=r"The disk of .* is full; make room"):
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
        seen.append(cache.default_root())
        return {"what": DEMO}

    monkeypatch.setattr(Demo, "run", run)
    run_demo(tmp_path / "demo")
    assert seen[0].parent.parent == tmp_path
    assert not seen[0].exists()
    assert cache.default_root() == tmp_path / "mine"


def test_without_scikit_learn_a_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 2
    assert "pip install 'engram-vit[demo]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_json_is_the_results_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick(monkeypatch)
    assert main(["demo", "--out", str(tmp_path / "demo"), "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out) == json.loads((tmp_path / "demo" / "results.json").read_text())


def test_help_names_the_demo() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engram", "demo", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "--out" in done.stdout
