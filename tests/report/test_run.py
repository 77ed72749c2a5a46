"""The page of a run: `fit`, `sweep` and `eval` write it, and losing it costs nothing else."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tests.support.reports import sweep_of

import engram
from engram.cli.main import main
from engram.errors import EngramError
from engram.report.contents import Table
from engram.report.run_page import MAX_SETTINGS, tried_section
from engram.tasks.kinds import KINDS

SUBSECTIONS = ("curves", "confusion", "classes", "mistakes", "attention", "shares")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small backbone and small data, in which commands run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENGRAM_CACHE", str(tmp_path / "cache"))
    engram.save_backbone(engram.random_backbone(), tmp_path / "backbone")
    rng = np.random.default_rng(0)
    arrays = {
        f"{kind}_{split}": values
        for split in ("train", "test")
        for kind, values in (
            ("x", rng.integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)),
            ("y", np.arange(24) % 3),
        )
    }
    np.savez(tmp_path / "data.npz", **arrays)
    return tmp_path


def ids(path: Path) -> set[str]:
    return set(re.findall(r'id="([^"]+)"', path.read_text(encoding="utf-8")))


def test_fit_writes_a_report_beside_the_engram(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "fit data.npz --task t --backbone backbone --epochs 2 --workers 0 --test --json"
    assert main([*command.split(), "-o", "t.safetensors"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["report"] == str(Path("t.run") / "report.html")
    assert {f"{name}-t" for name in SUBSECTIONS} <= ids(place / "t.run" / "report.html")
    test, page = document["metrics"]["test"], (place / "t.run" / "report.html").read_text()
    if "uncalibrated_ece" in test:
        assert f"without it would be {test['uncalibrated_ece']:.2%}." in page
    assert "in nine of ten such cases" in page
    val = document["metrics"]["val"]
    assert f"{val['accuracy']:.2%}" != f"{val['held_out']:.2%}"
    assert f"The answers for them have {val['held_out']:.2%}" in page
    assert "a curve may jump" in page  # auto trained several tasks


def test_sweep_writes_its_settings_into_the_report(place: Path) -> None:
    command = "sweep data.npz --task t --backbone backbone --epochs 1 --workers 0 --lr 0.001,0.01"
    assert main([*command.split(), "--seeds", "2", "-o", "t.safetensors"]) == 0
    assert {"settings-t", "curves-t", "attention-t"} <= ids(place / "t.run" / "report.html")


def test_the_best_settings_of_a_sweep_come_first() -> None:
    section = tried_section(sweep_of("classification", 50), KINDS["classification"])
    assert section is not None
    table = section.contents[0]
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == [str(50 - i) for i in range(MAX_SETTINGS)]
    assert table.highlighted == 0
    assert table.note == "The best 40 of 50, by validation accuracy, with 1 seed each."


def test_eval_writes_a_report_where_it_is_told(place: Path) -> None:
    command = "fit data.npz --task t --backbone backbone --epochs 1 --workers 0 -o t.safetensors"
    assert main(command.split()) == 0
    command = (
        "eval t.safetensors --data data.npz --backbone backbone --workers 0 --report page.html"
    )
    assert main(command.split()) == 0
    assert {"task-t", "confusion-t", "mistakes-t", "regimes"} <= ids(place / "page.html")
    assert "curves-t" not in ids(place / "page.html")


def test_a_report_that_fails_costs_no_engram(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise EngramError("The disk is full.")

    monkeypatch.setattr("engram.report.run_page.write_sections", full)
    command = "fit data.npz --task t --backbone backbone --epochs 1 --workers 0 -o t.safetensors"
    assert main(command.split()) == 0
    assert "not written: The disk is full" in capsys.readouterr().out
    assert (place / "t.safetensors").exists()
