"""What a backbone can be: sizes that no backbone has are refused, those of real ones are not."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from engram import load_backbone, random_backbone, save_backbone
from engram.backbones.shape import CONFIG, MAX_PATCHES
from engram.util.schema import Invalid


@pytest.mark.parametrize("options", [{}, {"registers": 3}, {"layer_scale": True}, {"classes": 0}])
def test_the_configuration_of_a_real_backbone_is_taken(options: dict[str, Any]) -> None:
    CONFIG.check(asdict(random_backbone(**options).config), "")


@pytest.mark.parametrize(
    "change",
    [
        {"width": 0},
        {"depth": 10**9},
        {"image_size": []},
        {"image_size": [10**9, 10**9]},
        {"patch": 1.5},
        {"eps": float("nan")},
        {"activation": "relu"},
        {"heads": True},
    ],
)
def test_a_size_that_no_backbone_has_is_refused(change: dict[str, Any]) -> None:
    config = asdict(random_backbone().config)
    with pytest.raises(Invalid, match=next(iter(change))):
        CONFIG.check({**config, **change}, "")


def test_the_largest_number_of_patches_is_one_that_backbones_have() -> None:
    assert MAX_PATCHES > (518 // 14) ** 2  # DINOv2 at its own size


def test_a_backbone_without_prefix_tokens_comes_back(tmp_path: Path) -> None:
    backbone = random_backbone(class_token=False)
    assert (
        load_backbone(save_backbone(backbone, tmp_path / "vit")).fingerprint == backbone.fingerprint
    )
