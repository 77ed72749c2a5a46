"""Preprocessing, labels and architecture as the configurations of each library say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from safetensors.torch import save_file
from tests.support.backbones import (
    refusal,
    timm_names,
    update,
)

from engram import load_backbone, random_backbone
from engram.images.preprocessing import Preprocessing

SQUASH = {"size": {"height": 32, "width": 48}, "resample": 2}
CROP = {
    "size": {"shortest_edge": 36},
    "crop_size": {"height": 32, "width": 32},
    "do_center_crop": True,
    "resample": 3,
}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Preprocessing((32, 32), None, "bilinear")),
        (SQUASH, Preprocessing((32, 48), None, "bilinear")),
        (CROP, Preprocessing((32, 32), 36, "bicubic")),
        ({"size": 32, "resample": 1}, Preprocessing((32, 32), None, "lanczos")),
        (
            {"size": 40, "crop_size": 32, "do_center_crop": True, "resample": 3},
            Preprocessing((32, 32), 40, "bicubic"),
        ),
        ({"size": {"shortest_edge": 32}}, Preprocessing((32, 32), 32, "bilinear")),
        ({**CROP, "do_center_crop": False}, Preprocessing((32, 32), 32, "bicubic")),
        (
            {"size": {"height": 40, "width": 40}, "crop_size": 32, "do_center_crop": True},
            Preprocessing((32, 32), 40, "bilinear"),
        ),
        (
            {"size": 32, "image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]},
            Preprocessing((32, 32), None, "bilinear", (0.1, 0.2, 0.3), (1, 2, 3)),
        ),
        (
            {"size": 32, "do_normalize": False},
            Preprocessing((32, 32), None, "bilinear", (0, 0, 0), (1, 1, 1)),
        ),
        ({"size": 37}, Preprocessing((32, 32), None, "bilinear")),  # 37 is no multiple of 8
    ],
)
def test_preprocessing_comes_with_the_weights(
    settings: dict[str, Any], expected: Preprocessing, folder: Path
) -> None:
    if settings:
        update(folder / "preprocessor_config.json", **settings)
    assert load_backbone(folder).preprocessing == expected
    if settings:
        (folder / "preprocessor_config.json").unlink()
        update(folder / "processor_config.json", image_processor=settings)
        assert load_backbone(folder).preprocessing == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Preprocessing((32, 32), 35)),
        ({"input_size": [3, 32, 32], "crop_pct": 0.8}, Preprocessing((32, 32), 40)),
        ({"crop_pct": 1.0, "interpolation": "bilinear"}, Preprocessing((32, 32), 32, "bilinear")),
        ({"crop_mode": "squash", "crop_pct": 1.0}, Preprocessing((32, 32), None)),
        (
            {"input_size": [3, 48, 48], "mean": [0, 0, 0], "std": [1, 1, 1]},
            Preprocessing((48, 48), 52, "bicubic", (0, 0, 0), (1, 1, 1)),
        ),
    ],
)
def test_preprocessing_of_timm(
    settings: dict[str, Any], expected: Preprocessing, tmp_path: Path
) -> None:
    save_file(timm_names(random_backbone()), tmp_path / "model.safetensors")
    config = {"architecture": "vit_tiny", "pretrained_cfg": settings, "label_names": list("abc")}
    for form in (config, {**config, **settings, "pretrained_cfg": None}):  # older repositories
        (tmp_path / "config.json").write_text(json.dumps(form))
        backbone = load_backbone(tmp_path)
        assert backbone.preprocessing == expected
        assert backbone.labels is None  # three names for ten classes
    config["label_names"] = [f"class {i}" for i in range(10)]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_backbone(tmp_path).labels == tuple(f"class {i}" for i in range(10))


def test_labels(folder: Path) -> None:
    assert load_backbone(folder).labels is None
    update(folder / "config.json", id2label={"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"})
    assert load_backbone(folder).labels is None
    update(folder / "config.json", id2label={"2": "c", "0": "a", "1": "b"})
    assert load_backbone(folder).labels == ("a", "b", "c")


@pytest.mark.parametrize("kind", ["swin", "convnext", "beit", "resnet", "timm_swin"])
def test_models_that_are_no_plain_vit_by_name(kind: str, folder: Path) -> None:
    update(folder / "config.json", model_type=kind)
    assert f"'{kind}'" in refusal(folder)


def test_naflex_is_refused_with_what_to_take_instead(folder: Path) -> None:
    update(folder / "config.json", model_type="siglip2")
    assert "google/siglip2-base-patch16-224" in refusal(folder)


def test_a_gated_mlp_with_another_activation_is_refused(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    for family, activation in (("dinov3-gated", "gelu"), ("dinov3", "silu"), ("aimv2", "gelu")):
        copytree(saved(family), tmp_path / family)
        update(tmp_path / family / "config.json", hidden_act=activation)
        assert "MLP" in refusal(tmp_path / family)
