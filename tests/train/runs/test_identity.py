"""A checkpoint is of one run: of one backbone, one task, one recipe and the same images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.support.training import fit_until

from engram import EngramError
from engram.data.datasets import load
from engram.train.runs.identity import samples_of


@pytest.mark.parametrize("cache", ["on", "off"])
@pytest.mark.parametrize(
    "renamed",
    [
        [("rose", "was rose"), ("tulip", "rose"), ("was rose", "tulip")],
        [("rose/0.png", "rose/00.png")],
    ],
    ids=["swapped", "renamed"],
)
def test_other_pictures_under_the_same_labels_are_other_data(
    renamed: list[tuple[str, str]], cache: str, small_backbone: Path, flowers: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    fit_until(small_backbone, flowers, out, stop=3, cache=cache)
    for old, new in renamed:
        (flowers / old).rename(flowers / new)
    with pytest.raises(EngramError, match="other settings"):
        fit_until(small_backbone, flowers, out, cache=cache, resume=True)


@pytest.mark.parametrize("cache", ["on", "off"])
@pytest.mark.parametrize(
    "change",
    [{"read": {"image_size": 32}}, {"read": {"activation": "quick_gelu"}}, {"parent": 1}],
    ids=["size", "activation", "parent"],
)
def test_another_backbone_or_parent_is_another_run(
    change: dict[str, Any], cache: str, small_backbone: Path, flowers: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    fit_until(small_backbone, flowers, out, stop=3, cache=cache)
    with pytest.raises(EngramError, match="other settings"):
        fit_until(small_backbone, flowers, out, cache=cache, resume=True, **change)


def test_data_that_was_moved_is_the_same_data(
    small_backbone: Path, flowers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.safetensors"
    monkeypatch.chdir(tmp_path)
    fit_until(small_backbone, "flowers", out, stop=3)
    moved = tmp_path / "elsewhere" / "flowers"
    moved.parent.mkdir()
    flowers.rename(moved)
    # The third step was not in a checkpoint yet.
    assert fit_until(small_backbone, moved, out, resume=True) == 4


def test_masks_of_other_names_or_sizes_are_other_data(tmp_path: Path) -> None:
    for i in range(4):
        for folder in ("images", "masks"):
            (tmp_path / folder).mkdir(exist_ok=True)
            Image.new("L", (16 + 8 * i, 16), i % 2).save(tmp_path / folder / f"{i}.png")
    before = samples_of(load(tmp_path, kind="segmentation")["train"])
    assert before == samples_of(load(tmp_path, kind="segmentation")["train"])
    first, last = (tmp_path / "masks" / f"{i}.png" for i in (0, 3))
    first.write_bytes(last.read_bytes())
    assert before != samples_of(load(tmp_path, kind="segmentation")["train"])
