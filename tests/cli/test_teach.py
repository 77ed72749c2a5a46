"""`engram teach`, as a user types it."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.commands import Output, assert_refused, document, run

import engram


@pytest.fixture
def pictures(work: Path) -> Path:
    """Folders: three images each of red and green, one more of each, and blue."""
    rng = np.random.default_rng(0)
    tints = {"red": (200, 60, 60), "green": (60, 200, 60), "blue": (60, 60, 200)}
    for data, counts in {
        "first": {"red": 3, "green": 3},
        "more": {"red": 1, "green": 1, "blue": 2},
        "one": {"red": 1, "green": 1},
    }.items():
        for name, count in counts.items():
            folder = work / data / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(-40, 40, (16, 16, 3)) + tints[name]
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    return work


def teach(data: str, out: str, *more: object) -> int:
    return run("teach", data, "-o", out, *more)


def test_a_task_is_taught_learns_more_and_forgets(pictures: Path, capsys: Output) -> None:
    assert teach("first", "a.safetensors", "--task", "colours", "--backbone", "vit", "--json") == 0
    said = document(capsys)
    assert said["classes"] == ["green", "red"]
    assert said["images"] == 6
    assert said["metrics"]["val"]["images"] == 6
    assert teach("more", "b.safetensors", "--from", "a.safetensors", "--json") == 0
    assert document(capsys)["classes"] == ["green", "red", "blue"]
    assert teach("more", "c.safetensors", "--from", "b.safetensors", "--forget", "--json") == 0
    assert document(capsys)["images"] == 6
    one, two = map(engram.inspect, ("a.safetensors", "c.safetensors"))
    np.testing.assert_allclose(one.tensors["head.weight"], two.tensors["head.weight"], atol=1e-4)
    assert run("merge", "a.safetensors", "b.safetensors", "-o", "d.safetensors", "--json") == 0


def test_it_says_what_it_does_not_know(pictures: Path, capsys: Output) -> None:
    assert teach("one", "a.safetensors", "--task", "colours", "--backbone", "vit") == 0
    assert "not known" in capsys.readouterr().out
    assert run("predict", "a.safetensors", "first/red/0.png", "--backbone", "vit") == 0
    assert "no familiarity of colours: too few images" in capsys.readouterr().out


def test_fit_teaches_where_no_image_can_be_held_out(pictures: Path, capsys: Output) -> None:
    command = ("fit", "one", "--task", "colours", "--backbone", "vit", "-o", "a.safetensors")
    assert run(*command, "--json") == 0
    said = document(capsys)
    assert said["regime"] == "head"
    assert said["metrics"] == {}
    assert engram.inspect("a.safetensors").has_sums


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--forget", "--task", "a"), "--from"),
        ((), "--task NAME"),
        (("--task", "a", "--statistics", "maybe"), "--statistics"),
    ],
)
def test_what_makes_no_sense_is_refused(
    more: tuple[object, ...], sentence: str, pictures: Path, capsys: Output
) -> None:
    given = ("--backbone", "vit", "--json", *more)
    assert_refused(sentence, teach("first", "a.safetensors", *given), capsys)
