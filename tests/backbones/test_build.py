"""What the caller overrides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.backbones import (
    update,
)

from engram import EngramError, load_backbone
from engram.images.preprocessing import Preprocessing

CROP = {
    "size": {"shortest_edge": 36},
    "crop_size": {"height": 32, "width": 32},
    "do_center_crop": True,
    "resample": 3,
}


def test_sizes_and_preprocessing_can_be_overridden(folder: Path) -> None:
    update(folder / "preprocessor_config.json", **CROP)
    native = load_backbone(folder)
    larger = load_backbone(folder, image_size=64)
    assert larger.preprocessing is not None
    assert (larger.preprocessing.size, larger.preprocessing.resize) == ((64, 64), 72)
    assert larger.fingerprint == native.fingerprint
    assert larger.config.image_size == (32, 32)
    assert larger.tokens(torch.randn(1, 3, 64, 64)).shape == (1, 65, 32)
    wide = load_backbone(folder, image_size=(16, 40)).preprocessing
    assert wide is not None
    assert wide.size == (16, 40)
    mine = Preprocessing((24, 24), None, "nearest")
    assert load_backbone(folder, preprocessing=mine).preprocessing == mine
    for options in ({"image_size": 33}, {"image_size": (32, 0)},
                    {"preprocessing": Preprocessing((33, 32), None)}):  # fmt: skip
        with pytest.raises(EngramError, match="multiples of its patch size 8"):
            load_backbone(folder, **options)  # type: ignore[arg-type]
    update(folder / "preprocessor_config.json", do_rescale=False)
    with pytest.raises(EngramError, match="give `preprocessing`"):
        load_backbone(folder)
    assert load_backbone(folder, preprocessing=mine).preprocessing == mine


def test_antialias_can_be_chosen(folder: Path) -> None:
    pixels = torch.randn(1, 3, 16, 16)
    plain, chosen = load_backbone(folder), load_backbone(folder, antialias=True)
    assert not plain.config.antialias
    assert (plain.tokens(pixels) - chosen.tokens(pixels)).abs().max() > 1e-3
