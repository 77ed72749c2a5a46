"""Engrams travel between machines that share no disk, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.farming import FOLDER, jobs_of

from engram import EngramError
from engram.cluster.travel import as_seen_anywhere, mark, packed, placed, unpack
from engram.train.options import RunOptions


def test_a_machine_without_the_folder_has_one_of_its_own(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, job = jobs_of('[jobs.a]\n[jobs.b]\nextends = ["a", "old=old.safetensors"]\n')
    FOLDER.mkdir()
    marked = mark(FOLDER)
    assert mark(FOLDER) == marked
    job = as_seen_anywhere(job)
    assert placed(job, marked) == job  # the disk is shared
    elsewhere = placed(job, "0123")
    assert elsewhere.out.parent.name == "engram-farm-0123-b"
    assert elsewhere.out.name == "b.safetensors"
    assert elsewhere.extends == (
        str(elsewhere.out.parent / "a.safetensors"),
        f"old={work / 'old.safetensors'}",
    )


def test_paths_are_absolute_and_names_stay(work: Path) -> None:
    (job,) = jobs_of("[jobs.a]\n")
    job = as_seen_anywhere(job)
    assert job.data == str(work / "colours.npz")
    assert job.given[RunOptions]["backbone"] == str(work / "vit")
    assert job.out == work / FOLDER / "a.safetensors"
    (named,) = jobs_of('[jobs.a]\nbackbone = "pico"\ndata = "digits"\n')
    named = as_seen_anywhere(named)
    assert (named.data, named.given[RunOptions]["backbone"]) == ("digits", "pico")


def test_what_is_finished_arrives_and_nothing_else_is_written(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "a.run").mkdir(parents=True)
    assert packed(here / "a.safetensors") == {}
    for name in ("a.safetensors", "a.run/report.html", "a.run/lock", "a.run/finished.json"):
        (here / name).write_text(name)
    files = packed(here / "a.safetensors")
    assert sorted(files) == ["a.run/finished.json", "a.run/report.html", "a.safetensors"]
    unpack(there, files, {"a"})
    unpack(there, files, {"a"})
    assert (there / "a.run" / "report.html").read_text() == "a.run/report.html"
    for bad in ("../x", "b.safetensors", "a.run/../x", "a.run/", "a.run/..", "/etc/x"):
        with pytest.raises(EngramError, match="which nobody asked for"):
            unpack(there, {bad: b""}, {"a"})
