"""The shapes of tensors show the architecture, and must agree with the configuration."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.support.backbones import (
    refusal,
    timm_names,
    update,
)

from engram import EngramError, load_backbone, random_backbone
from engram.backbones.build import usual_heads


def test_architecture_is_inferred_from_bare_tensors(tmp_path: Path) -> None:
    backbone = random_backbone(image_size=42, patch=14, width=192, depth=2, heads=3, mlp_width=100)
    save_file(timm_names(backbone), tmp_path / "a.safetensors")
    assert load_backbone(tmp_path / "a.safetensors").config == backbone.config


@pytest.mark.parametrize(
    ("width", "heads"),
    [(32, 1), (384, 6), (1024, 16), (1152, 16), (1280, 16), (1408, 16), (1536, 16)],
)
def test_the_number_of_heads_follows_the_width(width: int, heads: int) -> None:
    assert usual_heads(width, swiglu=False) == heads


def test_dinov2_giant_has_24_heads() -> None:
    assert usual_heads(1536, swiglu=True) == 24


def test_images_that_are_not_square(tmp_path: Path) -> None:
    backbone = random_backbone(image_size=32, patch=8)
    save_file(
        {**timm_names(backbone), "pos_embed": torch.randn(1, 1 + 2 * 6, 64)},
        tmp_path / "model.safetensors",
    )
    settings = {"architecture": "vit_tiny", "pretrained_cfg": {"input_size": [3, 16, 48]}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    read = load_backbone(tmp_path)
    assert read.config.image_size == (16, 48)
    assert read.preprocessing is not None
    assert read.preprocessing.size == (16, 48)
    (tmp_path / "config.json").unlink()
    with pytest.raises(EngramError, match="13 position embeddings"):
        load_backbone(tmp_path / "model.safetensors")


def test_a_config_that_does_not_fit_its_tensors(folder: Path) -> None:
    for key, value in {
        "hidden_size": 64, "num_hidden_layers": 3, "patch_size": 16, "intermediate_size": 50,
        "image_size": 64, "num_attention_heads": 5, "hidden_act": "relu",
    }.items():  # fmt: skip
        before = (folder / "config.json").read_text()
        update(folder / "config.json", **{key: value})
        refusal(folder)
        for nonsense in ("x", None, [], -1, {}):
            update(folder / "config.json", **{key: nonsense})
            refusal(folder)
        (folder / "config.json").write_text(before)


def test_models_that_are_no_plain_vit_by_their_tensors(tmp_path: Path) -> None:
    swin = {
        "patch_embed.proj.weight": torch.randn(8, 3, 4, 4),
        "patch_embed.proj.bias": torch.randn(8),
        "layers.0.blocks.0.attn.qkv.weight": torch.randn(24, 8),
        "layers.0.blocks.0.attn.relative_position_bias_table": torch.randn(169, 2),
    }
    convnext = {
        "stem.0.weight": torch.randn(8, 3, 4, 4),
        "stages.0.blocks.0.conv_dw.weight": torch.randn(8, 1, 7, 7),
    }
    beit = timm_names(random_backbone())
    del beit["pos_embed"]
    beit["blocks.0.attn.relative_position_bias_table"] = torch.randn(9, 4)
    for tensors in (swin, convnext, beit):
        save_file(tensors, tmp_path / "a.safetensors")
        text = refusal(tmp_path / "a.safetensors")
        assert "no plain ViT" in text
        assert "pos_embed" in text
    save_file({}, tmp_path / "a.safetensors")
    assert "no plain ViT" in refusal(tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", weights=np.zeros(3))
    assert "no plain ViT" in refusal(tmp_path / "a.npz")
