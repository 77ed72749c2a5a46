"""`--recipe FILE`: it repeats a run, flags win over it, and what is wrong in it is named."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from tests.support.commands import QUICK, Output, assert_refused, fit, run

import engram
from engram.methods import Masked
from engram.train.options import DataOptions, names_file
from engram.train.recipe import read_settings


def again(command: str, *more: object, task: str = "new") -> str:
    """Repeat the run of `new.safetensors` by its recipe file alone; returns the content."""
    named = ("--task", task, "--recipe", "new.run/recipe.toml", "-o", "again.safetensors")
    assert run(command, "colours.npz", *named, *more) == 0
    return engram.inspect("again.safetensors").content


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("fit", ()),
        (
            "fit",
            ("--regime", "masked", "--cells", 2, "--lr", 0.01, "--seed", 3, "--val-share", 0.2),
        ),
        ("fit", ("--regime", "side", "--rank", 4, "--seeds", 2, "--class-init", "random")),
        ("fit", ("--regime", "masked", "--extends", "old=old.safetensors", "--image-size", 8)),
        ("sweep", ("--lr", "0.001,0.01", "--cells", "0,2", "--weight-decay", 0, "--refit")),
    ],
    ids=["auto", "masked", "seeds", "extends", "sweep"],
)
def test_the_file_of_a_run_repeats_it(
    command: str, flags: tuple[object, ...], work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--image-size" in flags:
        parent = engram.MemoryViT(engram.load_backbone("vit", image_size=8))
        parent.add_task("old", ["red", "green", "blue"], 2, seed=0)
        parent.save("old", "old.safetensors")
    common = ("--task", "new", "-o", "new.safetensors", "--backbone", "vit", *QUICK)
    assert run(command, "colours.npz", *common, *flags) == 0
    first = engram.inspect("new.safetensors")
    assert again(command) == first.content
    assert (work / "again.run" / "recipe.toml").read_text() == (
        work / "new.run" / "recipe.toml"
    ).read_text()


def test_a_sweep_takes_the_file_of_fit_but_not_its_refit(work: Path, capsys: Output) -> None:
    """Which learns from held-out images after cross-validation; a sweep would train once more."""
    assert fit("--regime", "masked", "--cells", 2) == 0
    assert read_settings(Path("new.run/recipe.toml"))["refit"] is True
    again("sweep", "--lr", "0.001,0.01")
    assert read_settings(Path("again.run/recipe.toml"))["refit"] is False
    again("sweep", "--lr", "0.001,0.01", "--refit", "--overwrite")
    assert read_settings(Path("again.run/recipe.toml"))["refit"] is True


def test_a_flag_wins_over_the_file(work: Path) -> None:
    Path("mine.toml").write_text(
        'regime = "masked"\ncells = 2\nsteps = 6\nbatch = 16\nworkers = 0\nlr = 0.01\n'
        'backbone = "vit"\n'
    )
    common = ("fit", "colours.npz", "--task", "t", "--recipe", "mine.toml", "-o", "t.safetensors")
    assert run(*common, "--cells", 1, "--epochs", 1) == 0
    made = engram.inspect("t.safetensors")
    assert made.spec.method == Masked(cells=1, tokens=1)
    assert (made.recipe["lr"], made.recipe["epochs"], made.recipe["steps"]) == (0.01, 1, 0)


def test_a_flag_can_turn_off_what_the_file_turns_on(work: Path) -> None:
    Path("mine.toml").write_text(
        'regime = "masked"\nsteps = 2\nbatch = 16\nworkers = 0\nbackbone = "vit"\nrefit = true\n'
    )
    common = ("fit", "colours.npz", "--task", "t", "--recipe", "mine.toml", "-o", "t.safetensors")
    assert run(*common, "--no-refit") == 0
    assert engram.inspect("t.safetensors").recipe["refit"] is False


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("epoch = 3", "mine.toml sets epoch, which is no setting; the nearest is epochs."),
        ("[task]\ncells = 3", "mine.toml sets task, which is no setting; the nearest is "),
        ("epochs = 0", "epochs is 0; it must be a whole number, at least 1."),
        ('lr = "high"', "lr is 'high'; it must be a number, at least 0."),
        ("cells = [1, 5]", "mine.toml: cells is a list of 2 values; it must be"),
        ('seeds = "3"', "mine.toml: seeds is '3'; it must be a whole number, at least 1."),
        ("label = 3", "mine.toml: label is 3; it must be text."),
        ('kind = "colour"', "mine.toml: kind is 'colour'; it can be classification"),
        ("regime = 'none'", "no regime 'none'; choose one of masked"),
        ("refit = 3", "refit is 3"),
        ("epochs", "mine.toml is no TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(
    line: str, sentence: str, work: Path, capsys: Output
) -> None:
    Path("mine.toml").write_text(line)
    assert_refused(sentence, fit("--json", "--recipe", "mine.toml"), capsys)


def test_a_file_that_is_not_there_is_named(work: Path, capsys: Output) -> None:
    code = fit("--json", "--recipe", "yours.toml")
    assert_refused("yours.toml cannot be read", code, capsys)
    code = fit("--json", "--recipe", "best")
    assert_refused("choose one of default, paper", code, capsys)


def test_every_option_of_the_data_can_be_in_a_file(work: Path) -> None:
    for item in fields(DataOptions):
        Path("mine.toml").write_text(f"{item.name} = 1\n")
        assert read_settings(Path("mine.toml")) == {item.name: 1}


def test_our_names_come_before_files(work: Path) -> None:
    Path("paper").write_text("")
    Path("mine").write_text("")
    assert [names_file(name) for name in ("paper", "default", "mine", "x.toml", "x")] == [
        *(False, False, True, True, False)
    ]
