"""The folder of a run: what it keeps, what it clears, and which checkpoint it continues."""

from __future__ import annotations

import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.training import fit_until, start

import engram
from engram import EngramError, MemoryViT, Recipe, load_backbone
from engram.data.datasets import load
from engram.errors import Notice
from engram.train.runs.result import Result
from engram.train.runs.run import Run, has_state, run_folder
from engram.train.search.sweep import sweep
from engram.util.processes import ProcessGroup

QUICK = Recipe(steps=2, batch=16, evaluations=2, workers=0)


@pytest.mark.parametrize(
    ("out", "folder"),
    [("t.safetensors", "t.run"), ("deep/t", "deep/t.run"), ("t.v2.safetensors", "t.v2.run")],
)
def test_a_run_has_a_folder_next_to_its_engram(out: str, folder: str) -> None:
    assert run_folder(Path(out)) == Path(folder)


def test_a_place_that_is_taken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngramError, match="is a folder"):
        Run(tmp_path, ProcessGroup(), overwrite=True)
    out = tmp_path / "t.safetensors"
    out.touch()
    with pytest.raises(EngramError, match="exists already; choose another out"):
        Run(out, ProcessGroup(), overwrite=False)
    with Run(out, ProcessGroup(), overwrite=True):
        assert (tmp_path / "t.run").is_dir()


def test_a_run_without_an_engram_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Run(None, ProcessGroup(), resume=True) as run:
        assert run.finished("one", Result) is None
        assert run.begin("one", ["off", ""]) is None
        run.write("a.txt", "text")
        run.list_unreadable({"a.png": "a.png: broken"})
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(EngramError, match=r"cannot be written \(.*\)"),
        Run(tmp_path / "file" / "t.safetensors", ProcessGroup(), overwrite=False),
    ):
        pass


def test_what_was_saved_is_where_the_same_run_begins(tmp_path: Path) -> None:
    feed = ["off", ""]
    out = tmp_path / "t.safetensors"
    with Run(out, ProcessGroup(), overwrite=False, resume=True) as run:
        with pytest.warns(Notice, match="nothing to resume"):
            assert run.begin("one", feed) is None
        assert not has_state(out)
        run.save({"x": torch.arange(3.0)}, {"identity": "one", "feed": feed, "step": 5})
        assert has_state(out)
        state = run.begin("one", feed)
        assert state is not None
        assert state["step"] == 5
        assert state["tensors"]["x"].tolist() == [0, 1, 2]
        with pytest.raises(EngramError, match="other settings"):
            run.begin("two", feed)
    with (
        Run(out, ProcessGroup(), overwrite=False) as run,
        pytest.raises(EngramError, match="holds an interrupted run"),
    ):
        run.begin("one", feed)
    with Run(out, ProcessGroup(), overwrite=True, resume=True) as run, pytest.warns(Notice):
        assert run.begin("two", feed) is None  # nothing of this run, so it is replaced
    assert not run.checkpoint.exists()


def test_only_the_owner_may_read_a_run(small_backbone: Path, colours: Path, tmp_path: Path) -> None:
    splits = load(colours)
    out = tmp_path / "c.safetensors"
    engram.fit(start(small_backbone, splits), "colours", splits, QUICK, out=out)
    folder = run_folder(out)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert not [path for path in folder.iterdir() if socket.gethostname() in path.name]


def test_a_finished_run_is_a_success_however_often_it_is_resumed(
    small_backbone: Path, colours: Path, tmp_path: Path
) -> None:
    splits, out = load(colours), tmp_path / "c.safetensors"
    first = engram.fit(start(small_backbone, splits), "colours", splits, QUICK, out=out)
    written = out.stat().st_mtime_ns
    model = start(small_backbone, splits)
    again = engram.fit(model, "colours", splits, QUICK, out=out, resume=True)
    assert out.stat().st_mtime_ns == written
    assert again.to_dict() == first.to_dict()
    assert torch.equal(model.task("colours").head.weight, load_file(out)["head.weight"])
    with pytest.raises(EngramError, match="exists already"):
        engram.fit(
            start(small_backbone, splits),
            "colours",
            splits,
            QUICK.but(steps=3),
            out=out,
            resume=True,
        )
    assert out.stat().st_mtime_ns == written


def test_a_run_killed_just_after_it_wrote_the_engram_ends_well(
    small_backbone: Path, colours: Path, tmp_path: Path
) -> None:
    """The engram is there, and so is the checkpoint: resumed, it ends with the same engram."""
    splits, out = load(colours), tmp_path / "c.safetensors"
    recipe = QUICK.but(checkpoint_seconds=0)
    kept: list[bytes] = []

    def keep(what: str, done: int, total: int, note: str = "") -> None:
        checkpoint = run_folder(out) / "checkpoint.safetensors"
        if what == "training" and checkpoint.exists():
            kept.append(checkpoint.read_bytes())

    engram.fit(start(small_backbone, splits), "colours", splits, recipe, out=out, progress=keep)
    content = engram.inspect(out).content
    (run_folder(out) / "finished.json").unlink()
    (run_folder(out) / "checkpoint.safetensors").write_bytes(kept[-1])
    engram.fit(start(small_backbone, splits), "colours", splits, recipe, out=out, resume=True)
    assert engram.inspect(out).content == content
    assert not (run_folder(out) / "checkpoint.safetensors").exists()


def test_a_second_run_to_the_same_file_is_refused_while_the_first_lives(
    nursery: Any, small_backbone: Path, colours: Path, tmp_path: Path
) -> None:
    out = tmp_path / "c.safetensors"
    command = [
        "fit",
        colours,
        "--task",
        "c",
        "--backbone",
        small_backbone,
        "-o",
        out,
        "--workers",
        0,
    ]
    with Run(out, ProcessGroup(), overwrite=False):
        second = nursery.run(*command, "--steps", 1)
        assert second.code == 2
        assert "Another process is training" in second.stderr
        assert not out.exists()
    assert nursery.run(*command, "--steps", 1).code == 0


def test_a_new_run_keeps_nothing_of_the_one_it_replaces(
    small_backbone: Path, photos: Path, tmp_path: Path
) -> None:
    out, folder = tmp_path / "c.safetensors", tmp_path / "c.run"
    folder.mkdir()
    older = ("unreadable.txt", "sweep.csv", "sweep.png", "report.html", "notes.txt")
    for name in older:
        (folder / name).write_text("of an older run")
    splits = load(photos)
    recipe = QUICK
    engram.fit(start(small_backbone, splits), "colours", splits, recipe, out=out)
    assert [name for name in older if (folder / name).exists()] == ["notes.txt"]
    assert (folder / "history.csv").exists()


def test_a_plot_that_cannot_be_written_fails_no_run(
    small_backbone: Path, colours: Path, tmp_path: Path
) -> None:
    splits, out = load(colours), tmp_path / "c.safetensors"
    for name in ("history.svg", "sweep.png"):
        (tmp_path / "c.run" / name).mkdir(parents=True)  # no file can be written there
    recipe = QUICK
    engram.fit(start(small_backbone, splits), "colours", splits, recipe, out=out)
    assert out.exists()
    model = MemoryViT(load_backbone(small_backbone))
    assert sweep(model, "t", splits, recipe, out=out, overwrite=True).path == out


def test_a_damaged_checkpoint_is_refused(
    small_backbone: Path, colours: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out.run"
    folder.mkdir()
    (folder / "checkpoint.safetensors").write_bytes(b"not a checkpoint")
    splits = load(colours)
    model = engram.MemoryViT(engram.load_backbone(small_backbone))
    model.add_task("colours", splits.classes, seed=0)
    recipe = engram.Recipe(steps=1, workers=0)
    with pytest.raises(EngramError, match=r"cannot be read .* overwrite=True"):
        engram.fit(model, "colours", splits, recipe, out=tmp_path / "out.safetensors", resume=True)
    model.detach("colours")
    model.add_task("colours", splits.classes, seed=0)
    out = tmp_path / "out.safetensors"
    assert engram.fit(model, "colours", splits, recipe, out=out, overwrite=True).path == out
    assert torch.equal(model.task("colours").head.weight, load_file(out)["head.weight"])


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{}", "9" * 5000])
def test_a_damaged_record_is_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "out.safetensors").write_bytes(b"an engram")
    (tmp_path / "out.run").mkdir()
    (tmp_path / "out.run" / "finished.json").write_text(text)
    run = Run(tmp_path / "out.safetensors", ProcessGroup(), overwrite=False, resume=True)
    with run, pytest.raises(EngramError, match="exists already"):
        run.finished("this one", Result)


@pytest.mark.parametrize(("first", "then"), [("on", "off"), ("off", "on")])
def test_a_run_says_that_it_went_another_way_through_the_cache(
    first: str, then: str, small_backbone: Path, flowers: Path, tmp_path: Path
) -> None:
    """With cache auto the room on the disk decides, which may be another a day later."""
    out = tmp_path / "out.safetensors"
    fit_until(small_backbone, flowers, out, stop=3, cache=first)
    with pytest.raises(EngramError, match=rf"; continue with resume=True and cache=.{first}., or"):
        fit_until(small_backbone, flowers, out, cache=then, resume=True)
    with pytest.raises(EngramError, match="other settings"):
        fit_until(small_backbone, flowers, out, cache=then, lr=0.5, resume=True)
    assert fit_until(small_backbone, flowers, out, cache=first, resume=True) == 4
