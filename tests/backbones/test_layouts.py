"""Names of tensors that only some files have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.backbones import (
    google_names,
)

from engram import EngramError, load_backbone, random_backbone


def test_a_prefixed_tower_is_the_same_backbone(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """Files of older versions of transformers call their tensors vision_model.…"""
    for family in ("clip-vision", "siglip-vision"):
        folder = saved(family)
        tensors = load_file(folder / "model.safetensors")
        tensors = {f"vision_model.{name}": tensor for name, tensor in tensors.items()}
        tensors["vision_model.embeddings.position_ids"] = torch.arange(17)[None]
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        assert load_backbone(tmp_path).fingerprint == load_backbone(folder).fingerprint


def test_a_missing_part_of_googles_is_named(tmp_path: Path) -> None:
    names = google_names(random_backbone())
    query = "Transformer/encoderblock_1/MultiHeadDotProductAttention_1/query/bias"
    del names[query], names["Transformer/encoderblock_2/LayerNorm_0/scale"]
    np.savez(tmp_path / "a.npz", **names)
    with pytest.raises(EngramError) as error:
        load_backbone(tmp_path / "a.npz")
    assert query in str(error.value)
    assert "Transformer/encoderblock_2/LayerNorm_0/scale" in str(error.value)
