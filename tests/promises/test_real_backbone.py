"""The real ViT-Ti/16: every layout is the same backbone, and it sees what it saw elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from engram import ViT, from_transformers, load_backbone
from engram.images.preprocessing import Preprocessing, normalise
from engram.images.views import evaluation_view


@pytest.fixture(scope="module")
def weights(assets: Path) -> Path:
    return assets / "weights" / "vit_tiny_patch16_224"


@pytest.fixture(scope="module")
def backbone(weights: Path) -> ViT:
    return load_backbone(weights / "timm.safetensors")


@pytest.fixture(scope="module")
def reference(weights: Path) -> dict[str, Tensor]:
    return load_file(weights / "reference.safetensors")


def test_a_real_model_in_memory_is_the_same_backbone_and_mostly_the_same_memory(
    backbone: ViT, weights: Path, reference: dict[str, Tensor]
) -> None:
    model = transformers.ViTForImageClassification.from_pretrained(weights / "transformers")
    processor = transformers.AutoImageProcessor.from_pretrained(weights / "transformers")
    ours = from_transformers(model, processor=processor)
    assert ours.fingerprint == backbone.fingerprint
    assert ours.preprocessing == load_backbone(weights / "transformers").preprocessing
    assert ours.labels is not None
    assert len(ours.labels) == 1000
    theirs = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
    sizes = {n: t.numel() for n, t in ours.state_dict().items()}
    shared = sum(
        sizes[n] for n, t in ours.state_dict().items() if t.untyped_storage().data_ptr() in theirs
    )
    assert shared / sum(sizes.values()) > 0.75  # all but queries, keys and values
    pixels = next(t for t in reference.values() if t.ndim == 4)[:2]
    with torch.no_grad():
        torch.testing.assert_close(ours(pixels), model(pixels).logits, atol=1e-4, rtol=0)


def test_both_layouts_are_the_same_backbone(backbone: ViT, weights: Path) -> None:
    other = load_backbone(weights / "transformers")
    assert other.fingerprint == backbone.fingerprint
    assert other.config.head == backbone.config.head
    assert (other.config.heads, other.config.eps) == (backbone.config.heads, backbone.config.eps)
    assert other.labels is not None
    assert len(other.labels) == 1000
    assert backbone.preprocessing == Preprocessing((224, 224), 248)
    assert other.preprocessing == Preprocessing((224, 224), None)  # as its own file says
    assert sum(p.numel() for p in backbone.parameters()) == 5_717_416


def test_agrees_with_transformers_here(
    backbone: ViT, weights: Path, reference: dict[str, Tensor]
) -> None:
    pixels = reference["pixel_values"][:2]
    model = transformers.ViTForImageClassification.from_pretrained(weights / "transformers").eval()
    with torch.no_grad():
        tokens = model.vit(pixels).last_hidden_state
        logits = model(pixels).logits
    assert (backbone.tokens(pixels) - tokens).abs().max().item() <= 1e-5
    assert (backbone(pixels) - logits).abs().max().item() <= 1e-5


def test_agrees_with_the_reference(backbone: ViT, reference: dict[str, Tensor]) -> None:
    """Logits within 1e-4, and each token within 1e-4 of its length.

    Single numbers of a token are as large as 39, where fp32 itself is no more exact than 3e-4:
    that far the stored tokens are from those in fp64, and from transformers' on another processor.
    """
    tokens, expected = backbone.tokens(reference["pixel_values"]), reference["tokens"]
    assert ((tokens - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item() <= 1e-4
    assert (tokens - expected).abs().max().item() <= 5e-4
    assert (tokens - expected).abs().mean().item() <= 1e-5
    logits = backbone(reference["pixel_values"])
    assert (logits - reference["logits"]).abs().max().item() <= 1e-4


def test_our_own_pixels_give_the_same_top_1(
    backbone: ViT, reference: dict[str, Tensor], assets: Path, weights: Path
) -> None:
    with safe_open(weights / "reference.safetensors", "pt") as file:
        images = json.loads(file.metadata()["images"])
    assert backbone.preprocessing is not None
    views = [evaluation_view(assets / "data" / image, backbone.preprocessing) for image in images]
    pixels = normalise(torch.from_numpy(np.stack(views)), backbone.preprocessing)
    assert (pixels - reference["pixel_values"]).abs().mean().item() < 0.02
    assert torch.equal(backbone(pixels).argmax(1), reference["logits"].argmax(1))


def test_googles_layout_is_the_same_backbone(backbone: ViT, weights: Path, tmp_path: Path) -> None:
    """Written from timm's file by its own names, so that no table of ours is on both sides."""
    timm = {n: t.numpy() for n, t in load_file(weights / "timm.safetensors").items()}
    out: dict[str, Any] = {
        "embedding/kernel": timm["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": timm["patch_embed.proj.bias"],
        "cls": timm["cls_token"],
        "Transformer/posembed_input/pos_embedding": timm["pos_embed"],
        "Transformer/encoder_norm/scale": timm["norm.weight"],
        "Transformer/encoder_norm/bias": timm["norm.bias"],
        "head/kernel": timm["head.weight"].T,
        "head/bias": timm["head.bias"],
    }
    for i in range(12):
        here, there = f"blocks.{i}.", f"Transformer/encoderblock_{i}/"
        attention = there + "MultiHeadDotProductAttention_1/"
        kernels = timm[here + "attn.qkv.weight"].reshape(3, 3, 64, 192)  # part, head, d, D
        biases = timm[here + "attn.qkv.bias"].reshape(3, 3, 64)
        for part, name in enumerate(("query", "key", "value")):
            out[f"{attention}{name}/kernel"] = kernels[part].transpose(2, 0, 1)
            out[f"{attention}{name}/bias"] = biases[part]
        out[attention + "out/kernel"] = timm[here + "attn.proj.weight"].T.reshape(3, 64, 192)
        out[attention + "out/bias"] = timm[here + "attn.proj.bias"]
        for ours, theirs in (("norm1", "LayerNorm_0"), ("norm2", "LayerNorm_2")):
            out[f"{there}{theirs}/scale"] = timm[f"{here}{ours}.weight"]
            out[f"{there}{theirs}/bias"] = timm[f"{here}{ours}.bias"]
        for ours, theirs in (("fc1", "Dense_0"), ("fc2", "Dense_1")):
            out[f"{there}MlpBlock_3/{theirs}/kernel"] = timm[f"{here}mlp.{ours}.weight"].T
            out[f"{there}MlpBlock_3/{theirs}/bias"] = timm[f"{here}mlp.{ours}.bias"]
    np.savez(tmp_path / "Ti_16.npz", **out)
    google = load_backbone(tmp_path / "Ti_16.npz")
    assert google.fingerprint == backbone.fingerprint
    assert google.config == backbone.config
    pixels = torch.randn(1, 3, 224, 224)
    assert torch.equal(google(pixels), backbone(pixels))
