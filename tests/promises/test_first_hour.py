"""The first hour: somebody with a folder of photographs gets a result and knows what happened.

Nothing but defaults, on a machine without a network, and everything in a log file.
benchmarks/first_hour.py does the same on real photographs, and measures it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.nursery import Nursery, Running

COLOURS = {"apple": (200, 40, 40), "leaf": (40, 170, 60), "sky": (60, 90, 210)}


@pytest.fixture(scope="module")
def phone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs in the formats of phones, with the clutter that phones leave."""
    heif = pytest.importorskip("pillow_heif")
    heif.register_heif_opener()
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("phone") / "photos"
    for name, colour in COLOURS.items():
        place = folder / name
        place.mkdir(parents=True)
        for i in range(12):
            noise = rng.integers(-35, 35, (72, 96, 3))
            image = Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8))
            suffix = (".HEIC", ".JPG", ".png", ".webp")[i % 4]
            image.save(place / f"IMG_{i:04}{suffix}", "HEIF" if suffix == ".HEIC" else None)
        (place / "IMG_0000.MOV").write_bytes(b"\0\0\0\x14ftypqt  ")
        (place / "._IMG_0001.JPG").write_bytes(b"\0\5\x16\7")
        (place / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    return folder


@pytest.fixture(scope="module")
def first(phone: Path, nursery: Nursery) -> tuple[Path, Running]:
    """The first command: `engram fit photos/ --task NAME -o FILE`."""
    out = phone.parent / "colours.safetensors"
    return out, run(nursery, phone, "fit", phone, "--task", "colours", "-o", out)


def run(nursery: Nursery, phone: Path, *arguments: str | Path) -> Running:
    offline = {"HF_HUB_CACHE": str(phone.parent / "hub"), "HF_HUB_OFFLINE": "1"}
    done = nursery.start(*arguments, ENGRAM_CACHE=str(phone.parent / "cache"), **offline).wait()
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    return done


def test_a_look_at_the_data_says_what_is_there_and_writes_nothing(
    phone: Path, nursery: Nursery
) -> None:
    before = sorted(phone.rglob("*"))
    done = run(nursery, phone, "data", phone)
    assert done.code == 0
    for words in ("3 classes", "train 36", "hidden", ".mov", "96x72"):
        assert words in done.stdout
    assert sorted(phone.rglob("*")) == before


def test_the_first_result_is_good_and_says_what_was_done(first: tuple[Path, Running]) -> None:
    out, done = first
    assert done.code == 0, done.stderr
    assert out.is_file()
    said = done.stdout + done.stderr
    for words in ("pico", "backbones get", "3 classes", "validation", "cache", "report", "regime"):
        assert words in said
    accuracy = next(line for line in done.stdout.splitlines() if "accuracy" in line)
    assert "100" in accuracy  # three colours are easy


def test_a_log_file_has_lines_and_no_control_characters(first: tuple[Path, Running]) -> None:
    _, done = first
    lines = done.stderr.splitlines()
    assert lines
    assert len(lines) < 60
    assert all(line.isprintable() for line in lines)


def test_a_second_run_loses_nothing(
    first: tuple[Path, Running], phone: Path, nursery: Nursery
) -> None:
    out, _ = first
    before = out.read_bytes()
    again = run(nursery, phone, "fit", phone, "--task", "colours", "-o", out)
    assert again.code == 2
    assert "--overwrite" in again.stderr
    assert out.read_bytes() == before


def test_the_engram_answers_and_says_how_good_it_is(
    first: tuple[Path, Running], phone: Path, nursery: Nursery
) -> None:
    out, _ = first
    photo = next((phone / "sky").glob("*.HEIC"))
    answer = json.loads(run(nursery, phone, "predict", out, photo, "--json").stdout)
    assert answer[0]["tasks"]["colours"][0]["class"] == "sky"
    inspected = run(nursery, phone, "inspect", out).stdout
    assert "accuracy" in inspected
    assert "lr 0\n" not in inspected
    composed = run(nursery, phone, "compose", out, "-o", phone.parent / "bundle")
    assert composed.code == 0
    assert "colours" in composed.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("fit", "no-such-folder", "--task", "x", "-o", "x.safetensors"), "no-such-folder"),
        (("predict", "no.safetensors", "x.png"), "no.safetensors"),
    ],
)
def test_a_wrong_path_is_one_sentence(
    phone: Path, nursery: Nursery, arguments: tuple[str, ...], sentence: str
) -> None:
    done = run(nursery, phone, *arguments)
    assert done.code == 2
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
