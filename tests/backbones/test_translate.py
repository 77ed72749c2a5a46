"""A tensor that is missing, surplus, of a wrong shape or not finite is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.backbones import (
    refusal,
    timm_names,
)

from engram import random_backbone


def test_every_missing_tensor_is_named(tmp_path: Path, saved: Callable[[str], Path]) -> None:
    """Whichever tensor of whichever family is gone: nothing loads, and the error names it."""
    for family in ("vit-classes", "deit-teacher", "dinov2-registers", "clip-full", "siglip-vision"):
        folder = saved(family)
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        for name in tensors:
            if name.startswith(("text", "logit", "visual_projection")) or "mask_token" in name:
                continue  # not needed; without its projection a CLIP has no head
            rest = {other: tensor for other, tensor in tensors.items() if other != name}
            save_file(rest, tmp_path / "model.safetensors")
            bare = name.removeprefix("vit.").removeprefix("deit.").removeprefix("vision_model.")
            assert bare.replace("in_proj_", "q.") in refusal(tmp_path), (family, name)
    tensors = timm_names(random_backbone())
    for name in tensors:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        save_file(rest, tmp_path / "a.safetensors")
        text = refusal(tmp_path / "a.safetensors")
        # Without the token a file may be of a ViT that has none, were there not its position.
        assert name in text or (name == "cls_token" and "17 position embeddings" in text)


def test_surplus_tensors_and_wrong_shapes_are_named(tmp_path: Path) -> None:
    tensors = timm_names(random_backbone())
    file = tmp_path / "a.safetensors"
    save_file({**tensors, "blocks.1.attn.q_norm.weight": torch.ones(4)}, file)
    assert "blocks.1.attn.q_norm.weight" in refusal(file)
    for name, tensor in tensors.items():
        if tensor.ndim < 2:
            save_file({**tensors, name: tensor.new_zeros(3)}, file)
            assert name in refusal(file, heads=4)
    for name in ("blocks.1.attn.qkv.weight", "blocks.0.mlp.fc1.weight", "head.weight"):
        for shape in ((7, 9), (3,), (0, 64), ()):
            save_file({**tensors, name: torch.zeros(shape)}, file)
            assert any(part in refusal(file, heads=4) for part in (name, "blocks.0", "head"))
    for shape in ((64, 1, 8, 8), (64, 3, 8, 4), (64, 3, 64), (0, 3, 8, 8)):
        save_file({**tensors, "patch_embed.proj.weight": torch.zeros(shape)}, file)
        assert "patch" in refusal(file, heads=4)
    for name in ("pos_embed", "cls_token"):
        for shape in ((), (0, 64), (1, 99, 64), (1, 1, 3)):
            save_file({**tensors, name: torch.zeros(shape)}, file)
            refusal(file, heads=4)
    save_file({**tensors, "norm.weight": torch.ones(64, dtype=torch.int32)}, file)
    assert "quantised" in refusal(file)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_none(value: float, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "vit.encoder.layer.1.attention.attention.key.weight"
    tensors[name][3, 4] = value
    save_file(tensors, folder / "model.safetensors")
    assert name in refusal(folder)
