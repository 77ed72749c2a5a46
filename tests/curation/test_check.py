"""check finds what was put into the data: wrong labels, copies, leaks, strangers, bad files."""

from __future__ import annotations

import csv
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.support.commands import QUICK, Output, assert_refused, document, run
from torch import Tensor

from engram.train.features.cache import Cache

_SIDE = 48


def photograph(kind: int, seed: int) -> Image.Image:
    """One of three colours with blobs that differ from picture to picture."""
    random = np.random.default_rng([kind, seed])
    coarse = random.integers(0, 90, (6, 6, 3))
    coarse[..., kind] += 150
    return Image.fromarray(coarse.astype(np.uint8)).resize((_SIDE, _SIDE), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "photos"
    names = ("red", "green", "blue")
    for split, each in (("train", 16), ("test", 4)):
        for kind, label in enumerate(names):
            folder = root / split / label
            folder.mkdir(parents=True)
            for i in range(each):
                photograph(kind, i + 100 * (split == "test")).save(folder / f"{i:02}.png")
    shutil.move(root / "train/red/03.png", root / "train/blue/wrong.png")
    copy = photograph(1, 5).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    copy.save(root / "test/green/copy.jpg", quality=60)
    (root / "train/red/broken.png").write_bytes(b"no image")
    photograph(2, 77).resize((5, 5)).save(root / "train/blue/small.png")
    noise = np.random.default_rng(0).integers(0, 256, (_SIDE, _SIDE, 3), dtype=np.uint8)
    Image.fromarray(noise).save(root / "test/red/stranger.png")
    return root


def checked(photos: Path, capsys: Output, *flags: str) -> dict[str, Any]:
    assert run("check", str(photos), "--backbone", "pico", "--workers", "0", "--json", *flags) == 0
    return document(capsys)


def names(found: list[dict[str, Any]]) -> list[str]:
    return [Path(one["path"]).name for one in found]


def test_check_finds_what_is_wrong(photos: Path, tmp_path: Path, capsys: Output) -> None:
    page, table = tmp_path / "page.html", tmp_path / "all.csv"
    found = checked(photos, capsys, "-o", str(page), "--csv", str(table))
    labels = {Path(one["path"]).name: one for one in found["labels"]}
    assert len(labels) <= 3
    assert labels["wrong.png"]["suggested"] == "red"
    assert all("/red/" in path for path in labels["wrong.png"]["nearest"])
    leak, *others = found["leaks"]
    assert (Path(leak["path"]).name, leak["kind"]) == ("copy.jpg", "copies")
    assert Path(leak["of"]).parts[-3:] == ("train", "green", "05.png")
    assert {one["kind"] for one in others} <= {"frames"}
    assert sorted(map(Path, found["duplicates"][0]["paths"])) == [
        photos / "test/green/copy.jpg",
        photos / "train/green/05.png",
    ]
    assert "stranger.png" in names(found["outliers"])[:5]
    assert names(found["tiny"]) == ["small.png"]
    assert [Path(one.partition(":")[0]).name for one in found["unreadable"]] == ["broken.png"]
    assert [one["train"] for one in found["classes"]] == [18, 16, 16]
    for file in (page, table):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    text = page.read_text()
    assert "wrong.png" in text
    assert 'src="http' not in text
    rows = list(csv.DictReader(table.open()))
    assert {row["finding"] for row in rows} >= {
        "label", "copies", "leak", "outlier", "tiny", "unreadable",
    }  # fmt: skip
    assert all(float(row["score"]) > 0 for row in rows if row["finding"] in ("label", "outlier"))
    assert [row["other"] for row in rows if row["finding"] == "unreadable"] != [""]


def test_fit_finds_the_features_that_check_cached(
    photos: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    compute = Cache.compute

    def counted(self: Cache, images: Tensor) -> Tensor:
        computed.append(len(images))
        return compute(self, images)

    monkeypatch.setattr(Cache, "compute", counted)
    checked(photos, capsys)
    assert sum(computed) == 63  # all that can be read, once
    checked(photos, capsys)
    flags = ("--backbone", "pico", "--task", "new", "-o", tmp_path / "new.safetensors", *QUICK)
    assert run("fit", photos, *flags) == 0
    assert sum(computed) == 63


def test_a_table_names_images_below_the_folder(photos: Path, capsys: Output) -> None:
    assert run("check", str(photos), "--backbone", "pico", "--workers", "0") == 0
    said = capsys.readouterr().out
    assert said.count(str(photos)) <= 2  # of the data, and of the file that cannot be read
    assert str(Path("train/blue/wrong.png")) in said


def test_small_images_are_one_finding_where_most_are_small(tmp_path: Path, capsys: Output) -> None:
    for i in range(20):
        for name, shade in (("dark", 40), ("light", 200)):
            (tmp_path / name).mkdir(exist_ok=True)
            image = np.random.default_rng(i).integers(shade, shade + 40, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(image).save(tmp_path / name / f"{i}.png")
    assert run("check", str(tmp_path), "--backbone", "pico", "--workers", "0") == 0
    said = capsys.readouterr().out
    assert "40 images, the smallest of 6x6" in said
    assert said.count("tiny") == 1


def test_one_class_has_no_labels_to_check(photos: Path, tmp_path: Path, capsys: Output) -> None:
    shutil.copytree(photos / "train/green", tmp_path / "one/green")
    found = checked(tmp_path / "one", capsys)
    assert found["labels"] == []
    assert "two classes" in found["unchecked"]


def test_two_images_are_checked(tmp_path: Path, capsys: Output) -> None:
    for kind, label in enumerate(("red", "green")):
        (tmp_path / "two" / label).mkdir(parents=True)
        photograph(kind, 0).save(tmp_path / "two" / label / "0.png")
    found = checked(tmp_path / "two", capsys)
    assert [found[kind] for kind in ("labels", "duplicates", "leaks", "outliers")] == [[]] * 4


def test_what_cannot_be_checked_is_a_sentence(
    tmp_path: Path, photos: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert_refused("empty", run("check", "empty", "--json"), capsys)
    Path("notes.txt").write_text("mine")
    assert_refused("not an HTML page", run("check", photos, "-o", "notes.txt", "--json"), capsys)
    for label in ("a", "b"):
        Path("bad", label).mkdir(parents=True)
        Path("bad", label, "0.png").write_bytes(b"no image")
    code = run("check", "bad", "--backbone", "pico", "--workers", "0", "--json")
    assert_refused("No image of bad can be read", code, capsys)
