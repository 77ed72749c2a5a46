"""The classes of a head that was trained on ImageNet-1k have names, and those of no other head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.support.backbones import VIT, google_names, update

from engram import ViT, from_transformers, load_backbone, random_backbone
from engram.backbones.build import imagenet_names

WEIGHTS = "weights/vit_tiny_patch16_224"


@pytest.fixture(scope="module")
def named(assets: Path) -> ViT:
    """A ViT whose folder has the names of its classes."""
    return load_backbone(assets / WEIGHTS / "transformers")


def test_every_layout_of_a_known_model_gives_the_same_names(
    assets: Path, named: ViT, tmp_path: Path
) -> None:
    np.savez(tmp_path / "Ti_16.npz", **google_names(named))
    for file in (assets / WEIGHTS / "timm.safetensors", tmp_path / "Ti_16.npz"):
        backbone = load_backbone(file)
        assert backbone.labels == named.labels
        assert backbone.class_names[309] == "bee"
        assert backbone.fingerprint == named.fingerprint  # names are no part of the weights


def test_a_transformers_folder_with_placeholders_gets_the_names(
    assets: Path, named: ViT, tmp_path: Path
) -> None:
    for file in (assets / WEIGHTS / "transformers").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    update(tmp_path / "config.json", id2label={str(i): f"LABEL_{i}" for i in range(1000)})
    assert load_backbone(tmp_path).labels == named.labels
    own = {str(i): f"mine {i}" for i in range(1000)}
    update(tmp_path / "config.json", id2label=own)  # what the folder says comes first
    assert load_backbone(tmp_path).labels == tuple(own.values())


def test_the_same_classes_in_another_order_have_no_names(assets: Path, tmp_path: Path) -> None:
    tensors = load_file(assets / WEIGHTS / "timm.safetensors")
    head = tensors["head.weight"]
    orders = (torch.randperm(1000), torch.arange(1000).roll(1), torch.arange(999, -1, -1))
    assert [imagenet_names(head[order]) for order in orders] == [None] * 3
    save_file({**tensors, "head.weight": head[orders[0]]}, tmp_path / "other.safetensors")
    assert load_backbone(tmp_path / "other.safetensors").class_names[309] == "309"


@pytest.mark.parametrize("width", [8, 64, 768])
def test_an_unknown_head_of_a_thousand_classes_has_no_names(width: int) -> None:
    assert imagenet_names(torch.randn(1000, width)) is None
    assert imagenet_names(torch.ones(1000, width)) is None
    assert imagenet_names(torch.full((1000, width), torch.nan)) is None
    assert random_backbone(classes=1000).labels is None
    config = transformers.ViTConfig(**VIT, num_labels=1000)
    assert from_transformers(transformers.ViTForImageClassification(config)).labels is None
