"""fit, eval, predict, sweep and cache at the command line: what they print and how they refuse."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import engram
from engram import MemoryViT, load_trunk
from engram.cli import main as cli
from engram.errors import Notice
from engram.train.recipe import Recipe

Output = pytest.CaptureFixture[str]
QUICK = ("--steps", "6", "--batch", "16", "--workers", "0", "--evaluations", "1")


@pytest.fixture
def work(tmp_path: Path, small_trunk: Path, colours: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a trunk, data, a picture and an engram, as a user would have it."""
    monkeypatch.chdir(tmp_path)
    os.symlink(small_trunk, "vit")
    os.symlink(colours, "colours.npz")
    Image.new("RGB", (20, 16), (210, 50, 60)).save("red.png")
    model = MemoryViT(load_trunk("vit"))
    model.add_task("old", ["red", "green", "blue"], 2, seed=0)
    model.save("old", "old.safetensors")
    return tmp_path


def run(*arguments: object) -> int:
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
    return json.loads(capsys.readouterr().out)


# What is printed


def test_fit_prints_the_document_it_promises(work: Path, capsys: Output) -> None:
    assert fit("--json", "--test", "--cells", 3, "--label-smoothing", 0.1) == 0
    said = document(capsys)
    promised = ["task", "path", "regime", "parameters", "seconds", "metrics"]
    assert list(said) == [*promised, "report"]
    assert (said["task"], said["path"], said["regime"]) == ("new", "new.safetensors", "masked")
    assert said["parameters"] == 2 * 3 * 32 + 32 + 3 * 33
    assert 0 < said["seconds"] < 60
    assert set(said["metrics"]) == {"val", "test"}
    assert said["metrics"]["val"]["images"] == 6
    assert said["metrics"]["test"]["images"] == 21
    assert 0 <= said["metrics"]["test"]["accuracy"] <= 1
    header = engram.inspect("new.safetensors")
    expected = Recipe(steps=6, batch=16, workers=0, evaluations=1, label_smoothing=0.1)
    about_data = {"data": header.recipe["data"], "train_images": 54}
    assert header.recipe == {**expected.to_dict(), **about_data}


def test_fit_without_test_leaves_the_test_split_alone(work: Path, capsys: Output) -> None:
    assert fit("--json") == 0
    assert set(document(capsys)["metrics"]) == {"val"}


def test_fit_prints_rows_for_people(work: Path, capsys: Output) -> None:
    assert fit("--seeds", 2) == 0
    said = capsys.readouterr().out
    for label in ("engram", "regime", "parameters", "seconds", "val accuracy"):
        assert label in said
    assert "new.safetensors" in said


def test_extends_reads_an_engram_by_its_name(work: Path, capsys: Output) -> None:
    assert fit("--extends", "old=old.safetensors") == 0
    header = engram.inspect("new.safetensors")
    assert header.spec.extends == ("old",)
    assert header.parents == {"old": engram.inspect("old.safetensors").content}
    assert fit("--extends", "older=old.safetensors", out="other.safetensors") == 2
    assert "is called 'old', not 'older'; write --extends old=old.saf" in capsys.readouterr().err


def test_eval_measures_tasks_together_as_alone(work: Path, capsys: Output) -> None:
    assert fit() == 0
    capsys.readouterr()
    both = ("--data", "old=colours.npz", "--data", "new=colours.npz", "--workers", 0, "--json")
    assert run("eval", "old.safetensors", "new.safetensors", *both) == 0
    together = document(capsys)
    assert list(together) == ["old", "new"]
    for name in ("old", "new"):
        assert (
            run("eval", f"{name}.safetensors", "--data", "colours.npz", "--workers", 0, "--json")
            == 0
        )
        alone = document(capsys)[name]
        assert alone["images"] == together[name]["images"] == 21
        assert alone["accuracy"] == together[name]["accuracy"]
        assert alone["loss"] == pytest.approx(together[name]["loss"], abs=1e-5)
    assert set(together["new"]) == {"accuracy", "images", "loss", "macro_f1", "ece", "unreadable"}
    assert run("eval", "old.safetensors", "--data", "colours.npz", "--split", "train") == 0
    assert "60" in capsys.readouterr().out


def test_eval_says_that_data_without_splits_is_no_test(work: Path, capsys: Output) -> None:
    for name in ("red", "green", "blue"):
        (work / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (16, 16), name).save(work / "photos" / name / "0.png")
    with pytest.warns(Notice, match=r"^photos has no splits, so all its 3 images .* no test\.$"):
        assert run("eval", "old.safetensors", "--data", "photos", "--workers", 0, "--json") == 0
    assert document(capsys)["old"]["images"] == 3


def test_eval_finds_labels_in_the_column_that_is_named(work: Path, capsys: Output) -> None:
    Path("table.csv").write_text("path,split,colour\nred.png,test,red\n")
    command = ("eval", "old.safetensors", "--data", "table.csv", "--workers", 0, "--json")
    assert run(*command) == 2
    assert "has no column 'label'" in capsys.readouterr().err
    assert run(*command, "--label", "colour") == 0
    assert document(capsys)["old"]["images"] == 1


def test_paths_may_have_an_equals_sign(work: Path, capsys: Output) -> None:
    (work / "lr=0.1").mkdir()
    (work / "old.safetensors").rename("lr=0.1/old.safetensors")
    os.symlink(work / "colours.npz", "set=a.npz")
    for number, text in enumerate(("lr=0.1/old.safetensors", "old=lr=0.1/old.safetensors")):
        assert fit("--extends", text, out=f"{number}.safetensors") == 0
    capsys.readouterr()
    for text in ("set=a.npz", "old=set=a.npz"):
        command = ("eval", "lr=0.1/old.safetensors", "--data", text, "--workers", 0, "--json")
        assert run(*command) == 0
        assert document(capsys)["old"]["images"] == 21


def test_predict_prints_one_object_for_each_image(work: Path, capsys: Output) -> None:
    (work / "more").mkdir()
    for name in ("b.png", "a.png"):
        Image.new("RGB", (16, 16)).save(work / "more" / name)
    (work / "more" / "notes.txt").write_text("no image")
    (work / "more" / "._a.png").write_text("what macOS leaves beside a file")
    assert run("predict", "old.safetensors", "red.png", "more", "--top-k", 2, "--json") == 0
    said = document(capsys)
    assert [one["image"] for one in said] == ["red.png", "more/a.png", "more/b.png"]
    for one in said:
        assert set(one) == {"image", "tasks"}
        assert list(one["tasks"]) == ["base", "old"]
        assert len(one["tasks"]["old"]) == 2
        assert set(one["tasks"]["old"][0]) == {"class", "probability"}
    assert run("predict", "old.safetensors", "red.png", "--task", "old") == 0
    table = capsys.readouterr().out
    assert "red.png" in table
    assert "%" in table
    assert run("predict", "red.png", "--backbone", "vit", "--json") == 0
    assert list(document(capsys)[0]["tasks"]) == ["base"]


def test_predict_names_what_is_no_image_and_answers_the_rest(work: Path, capsys: Output) -> None:
    (work / "text.png").write_text("not a picture")
    assert run("predict", "old.safetensors", "text.png", "red.png", "gone.png", "--json") == 2
    text, red, gone = document(capsys)
    assert text == {"image": "text.png", "error": "text.png: not an image that can be read"}
    assert set(red) == {"image", "tasks"}
    assert gone["error"] == "gone.png: the file does not exist"
    assert run("predict", "old.safetensors", "text.png") == 2
    assert "not an image that can be read" in capsys.readouterr().out


def test_sweep_prints_every_setting_and_the_best(work: Path, capsys: Output) -> None:
    grid = ("--lr", "0.001,0.01", "--cells", "1,2", "--seeds", 2, "--weight-decay", "0")
    command = ("sweep", "colours.npz", "--task", "new", "--backbone", "vit", *QUICK, *grid)
    assert run(*command, "-o", "new.safetensors", "--json") == 0
    said = document(capsys)
    assert set(said) >= {"task", "path", "regime", "parameters", "seconds", "metrics", "best"}
    assert [(s["lr"], s["cells"]) for s in said["settings"]] == [
        (0.001, 1), (0.001, 2), (0.01, 1), (0.01, 2),
    ]  # fmt: skip
    assert all(len(s["accuracies"]) == 2 for s in said["settings"])
    assert said["best"] in said["settings"]
    assert {"mean", "deviation"} <= said["metrics"]["val"].keys()
    assert {"sweep.csv", "sweep.png"} <= {path.name for path in (work / "new.run").iterdir()}
    assert run(*command, "-o", "other.safetensors") == 0
    table = capsys.readouterr().out
    assert "validation accuracy" in table
    assert re.search(r"\d\d\.\d\d% ± \d+\.\d\d%", table)
    assert table.count("±") >= 4
    assert "best" in table


def test_the_page_of_a_refit_says_that_its_pictures_were_learned(work: Path) -> None:
    command = ("sweep", "colours.npz", "--task", "new", "--backbone", "vit", *QUICK)
    assert run(*command, "--lr", 0.01, "--refit", "-o", "new.safetensors") == 0
    page = (work / "new.run" / "report.html").read_text()
    assert "what follows is about images that it has learned" in page
    assert "train accuracy" in page
    assert "val accuracy" not in page


def test_eval_counts_bad_files_unless_told_otherwise(work: Path, capsys: Output) -> None:
    rng = np.random.default_rng(0)
    for name in ("red", "green", "blue"):
        (work / "photos" / "test" / name).mkdir(parents=True)
        for i in range(2):
            pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(work / "photos" / "test" / name / f"{i}.png")
    bad = Path("photos") / "test" / "red" / "bad.png"
    bad.write_bytes(b"")
    command = ("eval", "old.safetensors", "--data", "old=photos", "--workers", 0, "--json")
    assert run(*command) == 0
    assert (said := document(capsys)["old"])["images"] == 7
    assert said["unreadable"] == [str(bad)]
    assert run(*command, "--skip-bad") == 0
    assert document(capsys)["old"]["images"] == 6


# How they refuse


REFUSED = {
    "gone does not exist; data can be": ("fit", {"data": "gone"}),
    "there is no regime 'some'; choose": ("fit", {"more": ["--regime", "some"]}),
    "There is no recipe 'best'; choose": ("fit", {"more": ["--recipe", "best"]}),
    "lr is -1.0; it must be a number": ("fit", {"more": ["--lr", "-1"]}),
    "optimizer is 'adam'; it can be": ("fit", {"more": ["--optimizer", "adam"]}),
    "cells is -2; it must be": ("fit", {"more": ["--cells", "-2"]}),
    "'UPPER' cannot name a task": ("fit", {"task": "UPPER"}),
    "is a folder; -o names the engram's file": ("fit", {"out": "folder"}),
    "old.safetensors exists already": ("fit", {"out": "old.safetensors"}),
    "cannot be written": ("fit", {"out": "red.png/new.safetensors"}),
    "gone.safetensors": ("fit", {"more": ["--extends", "old=gone.safetensors"]}),
    "only masked tasks extend": (
        "fit", {"more": ["--extends", "old=old.safetensors", "--regime", "head"]}
    ),
    "update='add' is for the regimes memory": ("fit", {"more": ["--update", "add"]}),
    "class_init is 'zero'": ("fit", {"more": ["--class-init", "zero"]}),
    "nowhere": ("fit", {"backbone": "nowhere"}),
    "--lr is '0.1;0.2'; give numbers": ("sweep", ["--lr", "0.1;0.2"]),
    "--cells is '1.5'; give numbers": ("sweep", ["--cells", "1.5"]),
    "lr is -1; it must be a number above 0": ("sweep", ["--lr", "-1,0.1"]),
    "seeds is 0; at least one": ("sweep", ["--seeds", "0"]),
    "seeds is -1; at least one": ("fit", {"more": ["--seeds", "-1"]}),
    "there is data for 'old' already": (
        "eval", ["old.safetensors", "--data", "old=colours.npz", "--data", "colours.npz"]
    ),
    "batch is 0; it must be at least 1": (
        "eval", ["old.safetensors", "--data", "colours.npz", "--batch", "0"]
    ),
    "workers is -1; it must be at least 0": (
        "eval", ["old.safetensors", "--data", "colours.npz", "--workers", "-1"]
    ),
    "page.html cannot be written (No such": (
        "eval", ["old.safetensors", "--data", "colours.npz", "--report", "gone/page.html"]
    ),
    "folder cannot be written (it is a folder)": (
        "eval", ["old.safetensors", "--data", "colours.npz", "--report", "folder"]
    ),
    "old.safetensors exists and is not an HTML page": (
        "eval", ["old.safetensors", "--data", "colours.npz", "--report", "old.safetensors"]
    ),
    "/dev/null cannot be written (it is not a regular file)": (
        "eval", ["old.safetensors", "--data", "colours.npz", "--report", "/dev/null"]
    ),
    "which is none of the 3 classes": ("eval", ["old.safetensors", "--data", "old=digits"]),
    "There is no task 'flowers'": ("eval", ["old.safetensors", "--data", "flowers=colours.npz"]),
    "has no val split": ("eval", ["old.safetensors", "--data", "colours.npz", "--split", "val"]),
    "no split 'any'": ("eval", ["old.safetensors", "--data", "colours.npz", "--split", "any"]),
    "gone.safetensors cannot be": ("eval", ["gone.safetensors", "--data", "colours.npz"]),
    "No engram was given": ("predict", ["red.png"]),
    "lost.safetensors cannot be read": ("predict", ["lost.safetensors", "red.png"]),
    "No image was given": ("predict", ["old.safetensors"]),
    "ask for at least 1 class": ("predict", ["old.safetensors", "red.png", "--top-k", "0"]),
    "There is no task 'young'": ("predict", ["old.safetensors", "red.png", "--task", "young"]),
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    sentence: str, work: Path, capsys: Output
) -> None:
    (work / "folder").mkdir()
    command, given = REFUSED[sentence]
    if isinstance(given, dict):
        settings: dict[str, Any] = dict(given)
        code = fit(*settings.pop("more", ()), "--json", **settings)
    elif command == "sweep":
        out = ("--task", "new", "-o", "new.safetensors", "--backbone", "vit", *QUICK)
        code = run("sweep", "colours.npz", *out, *given, "--json")
    else:
        code = run(command, *given, "--json")
    said = capsys.readouterr()
    assert code == 2, said.err
    assert sentence in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert "Something went wrong" not in said.err
    assert json.loads(said.out) == {"error": said.err.strip()}
    assert not (work / "new.safetensors").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_a_sentence(work: Path, capsys: Output) -> None:
    (work / "locked").mkdir(mode=0o500)
    assert fit(out="locked/new.safetensors") == 2
    assert "cannot be written (Permission denied); choose another -o" in capsys.readouterr().err


def test_every_command_is_listed(capsys: Output) -> None:
    assert run("--help") == 0
    said = capsys.readouterr().out
    for command in ("fit", "sweep", "eval", "predict", "cache"):
        assert command in said
