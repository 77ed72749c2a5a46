"""fit, sweep and cache at the command line: what they print and how they refuse."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import QUICK, Output, assert_refused, document, fit, run
from tests.support.training import filled

import engram
from engram import Recipe

# fit


@pytest.mark.parametrize("command", ["fit", "sweep"])
def test_every_setting_is_a_flag_with_its_default(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert run(command, "--help") == 0
    said = " ".join(capsys.readouterr().out.split())
    for item in fields(Recipe):
        assert f"--{item.name.replace('_', '-')} " in said
        if not (command == "sweep" and item.name in ("lr", "weight_decay", "refit")):  # its own
            about = item.metadata["about"]
            assert about[1:] in said
            if item.default is True:
                assert f"--no-{item.name.replace('_', '-')} " in said
            else:
                assert f"default: {item.metadata['shown']})" in said


def test_fit_prints_the_document_it_promises(work: Path, capsys: Output) -> None:
    masked = ("--regime", "masked", "--cells", 3)
    assert fit("--json", "--test", *masked, "--label-smoothing", 0.1) == 0
    said = document(capsys)
    promised = ["task", "path", "regime", "parameters", "seconds", "metrics", "training"]
    assert list(said) == [*promised, "interrupted", "backbone", "report", "wrong_labels"]
    assert said["backbone"] == "vit"
    assert (said["task"], said["path"], said["regime"]) == ("new", "new.safetensors", "masked")
    assert said["parameters"] == 2 * 3 * 32 + 32 + 3 * 33
    assert 0 < said["seconds"] < 60
    assert set(said["metrics"]) == {"val", "test"}
    val = said["metrics"]["val"]
    assert (val["images"], val["folds"], val["learned_all"]) == (60, 5, True)
    assert val["interval"][0] <= val["accuracy"] <= val["interval"][1]
    assert said["metrics"]["test"]["images"] == 21
    assert 0 <= said["metrics"]["test"]["accuracy"] <= 1
    header = engram.inspect("new.safetensors")
    expected = Recipe(steps=6, batch=16, workers=0, evaluations=1, label_smoothing=0.1, lr=1e-3)
    about_data = {"data": header.recipe["data"], "train_images": 60}
    about_data["training"] = said["training"]
    assert header.recipe == {**expected.to_dict(), **about_data}


def test_fit_tries_regimes_and_lists_them(work: Path, capsys: Output) -> None:
    assert fit("--json") == 0
    said = document(capsys)
    assert list(said)[-5:] == ["tried", "own_pass", "backbone", "report", "wrong_labels"]
    assert {one["regime"] for one in said["tried"]} >= {
        "head", "readout", "masked", "masked+adapter", "side",
    }  # fmt: skip
    (kept,) = (one for one in said["tried"] if one["kept"])
    assert (kept["regime"], kept["parameters"]) == (said["regime"], said["parameters"])
    assert kept["value"] == said["metrics"]["val"]["held_out"]
    assert set(kept) == {
        "regime", "lr", "parameters", "metric", "value", "images", "how", "epochs", "kept", "tied",
        "dropped", "own_pass",
    }  # fmt: skip
    page = (work / "new.run" / "report.html").read_text()
    assert "Regimes that were tried" in page
    assert all(one["regime"] in page for one in said["tried"])
    assert fit("--overwrite") == 0
    table = capsys.readouterr().out
    assert re.search(r"tried +.*lr +.*epochs +.*parameters", table)
    assert "validation accuracy" in " ".join(table.split())
    assert "kept" in table


@pytest.mark.parametrize(
    "flags", [("--regime", "masked"), ("--seeds", 2), ("--recipe", "paper", "--augment", "none")]
)
def test_one_regime_is_trained_where_the_paper_or_seeds_are_asked_for(
    flags: tuple[object, ...], work: Path, capsys: Output
) -> None:
    assert fit("--json", *flags) == 0
    said = document(capsys)
    assert said["regime"] == "masked"
    assert "tried" not in said


def test_a_readout_is_fitted(work: Path, capsys: Output) -> None:
    assert fit("--json", "--regime", "readout") == 0
    assert document(capsys)["regime"] == "readout"
    assert fit("--json", "--regime", "readout", "--resume") == 0
    assert document(capsys)["regime"] == "readout"
    assert (work / "new.run" / "report.html").exists()


def test_fit_without_test_leaves_the_test_split_alone(work: Path, capsys: Output) -> None:
    assert fit("--json") == 0
    assert set(document(capsys)["metrics"]) == {"val"}


def test_fit_says_what_it_does(work: Path, capsys: Output) -> None:
    assert fit() == 0
    said = capsys.readouterr().err.splitlines()
    first = next(i for i, line in enumerate(said) if line.startswith("backbone  vit, images of 16"))
    assert "60 images to train, held out in turn in 5 folds" in said[first + 1]
    assert said[first + 2].startswith("cache  ")
    stages = [line.partition(":")[0] for line in said[first + 3 :]]
    assert {"hashing images", "caching", "solving", "training"} <= set(stages)
    assert said[-1] == "writing the report"
    assert any(re.search(r"training: (\d+) of \1, took.*loss", line) for line in said)
    assert fit("--json", "--overwrite") == 0
    assert capsys.readouterr().err == ""


def test_fit_prints_rows_for_people(work: Path, capsys: Output) -> None:
    assert fit("--seeds", 2) == 0
    said = capsys.readouterr().out
    for label in (
        "engram",
        "backbone",
        "regime",
        "parameters",
        "seconds",
        "val accuracy",
    ):
        assert label in said
    assert re.search(r"val accuracy .* to .*%\), 6 held-out images", said)
    assert "new.safetensors" in said


def test_extends_reads_an_engram_by_its_name(work: Path, capsys: Output) -> None:
    assert fit("--extends", "old=old.safetensors") == 0
    header = engram.inspect("new.safetensors")
    assert header.spec.extends == ("old",)
    assert header.parents == {"old": engram.inspect("old.safetensors").content}
    assert fit("--extends", "older=old.safetensors", out="other.safetensors") == 2
    assert "is called 'old', not 'older'" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_a_sentence(work: Path, capsys: Output) -> None:
    (work / "locked").mkdir(mode=0o500)
    assert fit(out="locked/new.safetensors") == 2
    assert "cannot be written (Permission denied)" in capsys.readouterr().err


def test_logs_are_named_at_the_command_line(
    work: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert_refused("no log 'board'", fit("--json", "--log", "board"), capsys)
    assert fit("--regime", "masked", "--log", "tensorboard, mlflow") == 0
    assert list((work / "new.run").glob("events.out.tfevents.*"))
    (metric,) = (work / "mlruns").glob("*/*/metrics/val_loss")
    assert len(metric.read_text().splitlines()) == 1


# sweep


def test_sweep_prints_every_setting_and_the_best(work: Path, capsys: Output) -> None:
    grid = ("--lr", "0.001,0.01", "--cells", "1,2", "--seeds", 2, "--weight-decay", "0")
    command = ("sweep", "colours.npz", "--task", "new", "--backbone", "vit", *QUICK, *grid)
    assert run(*command, "-o", "new.safetensors", "--json") == 0
    said = document(capsys)
    assert set(said) >= {"task", "path", "regime", "parameters", "seconds", "metrics", "best"}
    assert [(s["lr"], s["cells"]) for s in said["settings"]] == [
        (0.001, 1), (0.001, 2), (0.01, 1), (0.01, 2),
    ]  # fmt: skip
    assert all(len(s["values"]) == 2 for s in said["settings"])
    assert said["best"] in said["settings"]
    assert {"mean", "deviation"} <= said["metrics"]["val"].keys()
    assert {"sweep.csv", "sweep.png"} <= {path.name for path in (work / "new.run").iterdir()}
    assert run(*command, "-o", "other.safetensors") == 0
    table = capsys.readouterr().out
    assert "validation accuracy" in table
    assert re.search(r"\d\d\.\d\d% ± \d+\.\d\d%", table)
    assert table.count("±") >= 4
    assert "best" in table


def test_a_sweep_without_lists_tries_rates_around_the_default(work: Path, capsys: Output) -> None:
    command = ("sweep", "colours.npz", "--task", "new", "--backbone", "vit", *QUICK)
    assert run(*command, "-o", "new.safetensors", "--json") == 0
    assert [s["lr"] for s in document(capsys)["settings"]] == [0.000333, 0.001, 0.003]


def test_the_page_of_a_refit_says_that_its_pictures_were_learned(work: Path) -> None:
    command = ("sweep", "colours.npz", "--task", "new", "--backbone", "vit", *QUICK)
    assert run(*command, "--lr", 0.01, "--refit", "-o", "new.safetensors") == 0
    page = (work / "new.run" / "report.html").read_text()
    assert "It has learned from the validation images since" in page
    assert "train accuracy" in page
    assert "val accuracy" not in page


# cache


def test_the_commands_show_and_clear_it(
    small_backbone: Path, noise: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = filled(small_backbone, noise)
    (own_cache / "mine.txt").write_text("not the cache's")
    for other in ("holiday", "0" * 24):
        (own_cache / other).mkdir()
        (own_cache / other / "meta.json").write_text('{"camera": "x"}')
    (kept.folder / "note.txt").write_text("not the cache's either")
    assert run("cache", "info", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["folder"] == str(own_cache)
    [about] = said["caches"]
    assert about["images"] == 12
    assert about["fingerprint"] == kept.backbone.fingerprint
    assert 12 * kept.row_bytes < about["bytes"] < 12 * kept.row_bytes + 5000
    assert run("cache", "info") == 0
    assert "16x16" in capsys.readouterr().out
    assert run("cache", "clear", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"freed": about["bytes"]}
    left = sorted(path.name for path in own_cache.rglob("*") if path.is_file())
    assert left == ["meta.json", "meta.json", "mine.txt", "note.txt"]
    assert run("cache", "info") == 0


# How they refuse


REFUSED_BY_FIT: dict[str, dict[str, Any]] = {
    "gone does not exist; data can be": {"data": "gone"},
    "no regime 'some'; choose": {"more": ["--regime", "some"]},
    "There is no recipe 'best'; choose": {"more": ["--recipe", "best"]},
    "--lr is -1.0; it must be a number": {"more": ["--lr", "-1"]},
    "optimizer is 'adam'; it can be": {"more": ["--optimizer", "adam"]},
    "--cells is -2; it must be": {"more": ["--cells", "-2"]},
    "'UPPER' cannot name a task": {"task": "UPPER"},
    "is a folder; -o names the engram's file": {"out": "folder"},
    "old.safetensors exists already": {"out": "old.safetensors"},
    "cannot be written": {"out": "red.png/new.safetensors"},
    "gone.safetensors": {"more": ["--extends", "old=gone.safetensors"]},
    "its regime is 'head'": {"more": ["--extends", "old=old.safetensors", "--regime", "head"]},
    "'masked' has no setting 'update'": {"more": ["--update", "add", "--regime", "masked"]},
    "--class-init is 'zero'": {"more": ["--class-init", "zero"]},
    "nowhere": {"backbone": "nowhere"},
    "--seeds is -1; at least one": {"more": ["--seeds", "-1"]},
    "--seeds needs one regime; give one": {"more": ["--seeds", "2", "--regime", "auto"]},
    "--soup needs one regime; give one": {"more": ["--soup", "2", "--regime", "auto"]},
    "--soup is 1; an average needs at least 2": {"more": ["--soup", "1"]},
    "--own-pass says what auto tries": {"more": ["--own-pass", "--regime", "side"]},
    "leave out --own-pass or": {"more": ["--own-pass", "--extends", "old=old.safetensors"]},
    "side+readout, which is an average": {"more": ["--regime", "side+readout"]},
    "is solved, not trained": {"more": ["--regime", "readout", "--seeds", "2"]},
}


@pytest.mark.parametrize("sentence", REFUSED_BY_FIT)
def test_a_mistake_of_fit_is_one_sentence_and_exit_code_2(
    sentence: str, work: Path, capsys: Output
) -> None:
    (work / "folder").mkdir()
    given = dict(REFUSED_BY_FIT[sentence])
    assert_refused(sentence, fit(*given.pop("more", ()), "--json", **given), capsys)


def test_an_engram_that_exists_is_noticed_before_the_data_is_read(
    work: Path, capsys: Output
) -> None:
    assert_refused(
        "old.safetensors exists already", fit("--json", data="gone", out="old.safetensors"), capsys
    )


REFUSED_BY_SWEEP = {
    "--lr is '0.1;0.2'; give numbers": ["--lr", "0.1;0.2"],
    "--cells is '1.5'; give numbers": ["--cells", "1.5"],
    "--lr is -1; it must be a number above 0": ["--lr", "-1,0.1"],
    "--seeds is 0; at least one": ["--seeds", "0"],
    "--soup is 2, but only 1 of the 2 variants": ["--soup", "2", "--cells", "1,2"],
}


@pytest.mark.parametrize("sentence", REFUSED_BY_SWEEP)
def test_a_mistake_of_sweep_is_one_sentence_and_exit_code_2(
    sentence: str, work: Path, capsys: Output
) -> None:
    out = ("--task", "new", "-o", "new.safetensors", "--backbone", "vit", *QUICK)
    code = run("sweep", "colours.npz", *out, *REFUSED_BY_SWEEP[sentence], "--json")
    assert_refused(sentence, code, capsys)
