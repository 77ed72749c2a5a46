"""`engram fit --add-classes`, as a user types it, and how it refuses."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.commands import QUICK, Output, assert_refused, document, run

import engram


@pytest.fixture
def pictures(work: Path) -> Path:
    """Folders of three colours, the third in a dataset of its own."""
    rng = np.random.default_rng(0)
    tints = {"red": (200, 60, 60), "green": (60, 200, 60), "blue": (60, 60, 200)}
    for name, tint in tints.items():
        folder = work / ("later" if name == "blue" else "first") / name
        folder.mkdir(parents=True)
        for i in range(12):
            pixels = rng.integers(-40, 40, (16, 16, 3)) + tint
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    command = ("--task", "colours", "--backbone", "vit", "--regime", "head", *QUICK)
    assert run("fit", "first", "-o", "first.safetensors", *command) == 0
    return work


def grow(*more: object, data: str = "later", old: str = "first.safetensors") -> int:
    command = ("--task", "colours", "--add-classes", "--from", old, "-o", "new.safetensors")
    return run("fit", data, *command, "--workers", 0, *more)


def test_a_task_grows_at_the_command_line(pictures: Path, capsys: Output) -> None:
    capsys.readouterr()
    assert grow("--json") == 0
    said = document(capsys)
    assert said["metrics"]["val"]["accuracy"] >= 0.5
    assert said["metrics"]["replay"]["images"] > 0
    assert Path(said["report"]).is_file()
    assert engram.inspect("new.safetensors").spec.classes == ("green", "red", "blue")
    assert run("inspect", "new.safetensors") == 0
    assert "grown from" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--regime", "head"), "--regime cannot be given"),
        (("--cells", 3), "--cells cannot be given"),
        (("--resume",), "--resume cannot be given"),
    ],
)
def test_what_the_old_task_decides_is_refused(
    more: tuple[object, ...], sentence: str, pictures: Path, capsys: Output
) -> None:
    capsys.readouterr()
    assert_refused(sentence, grow("--json", *more), capsys)


def test_mistakes_are_sentences(pictures: Path, capsys: Output) -> None:
    capsys.readouterr()
    plain = ("fit", "later", "--task", "colours", "-o", "new.safetensors", "--json")
    assert_refused("--add-classes needs the engram", run(*plain, "--add-classes"), capsys)
    alone = run(*plain, "--from", "first.safetensors")
    assert_refused("is for --add-classes", alone, capsys)
    assert_refused("knows already", grow("--json", data="first"), capsys)
    assert_refused("has no statistics", grow("--json", old="old.safetensors"), capsys)
    assert_refused("cannot be read", grow("--json", old="no.safetensors"), capsys)
