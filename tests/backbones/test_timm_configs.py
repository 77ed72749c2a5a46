"""Models of timm that have rotary positions or other norms: tiny ones, and what timm computed.

The oracle is timm's own code, which is not installed here: scripts/record_timm.py recorded it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.backbones import RECORDS, near, refusal, timm_record

from engram import load_backbone, save_backbone


@pytest.mark.parametrize("name", RECORDS)
def test_agrees_with_timm(name: str, tmp_path: Path) -> None:
    record = timm_record(name)
    backbone = load_backbone(record.save(tmp_path))
    for pixels, tokens, answer in record.cases:
        near(backbone.tokens(pixels), tokens, 1e-5 * max(1.0, tokens.abs().max().item()))
        if backbone.head is not None:
            near(backbone(pixels), answer)
        else:
            assert "head.weight" not in record.weights


@pytest.mark.parametrize("name", RECORDS)
def test_comes_back_from_our_own_layout(name: str, tmp_path: Path) -> None:
    backbone = load_backbone(timm_record(name).save(tmp_path))
    read = load_backbone(save_backbone(backbone, tmp_path / "ours"))
    assert (read.config, read.fingerprint) == (backbone.config, backbone.fingerprint)
    pixels = torch.randn(1, 3, 8, 12)
    assert torch.equal(read.tokens(pixels), backbone.tokens(pixels))


@pytest.mark.parametrize("name", RECORDS)
def test_tensors_alone_show_the_family(name: str, tmp_path: Path) -> None:
    record = timm_record(name)
    backbone = load_backbone(record.save(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "bare.safetensors")
    bare = load_backbone(tmp_path / "bare.safetensors", heads=2)
    if name.startswith("eva02"):  # the angles that it spans are always those of 16 patches
        assert bare.config.rotary is not None
        assert bare.config.rotary.span == 16
    else:
        assert bare.fingerprint == backbone.fingerprint


def test_dinov3_under_the_names_of_meta(tmp_path: Path) -> None:
    """As timm's checkpoint_filter_fn reads them: a mask takes the bias of keys away."""
    for name in ("dinov3", "dinov3-gated"):
        record, theirs = timm_record(name), {}
        for key, tensor in record.weights.items():
            for ours, meta in (
                ("reg_token", "storage_tokens"),
                ("gamma_1", "ls1.gamma"),
                ("gamma_2", "ls2.gamma"),
                ("mlp.fc1_g", "mlp.w1"),
                ("mlp.fc1_x", "mlp.w2"),
                ("mlp.fc2", "mlp.w3" if name == "dinov3-gated" else "mlp.fc2"),
            ):
                key = key.replace(ours, meta)
            if key.endswith("q_bias"):
                v = record.weights[key.replace("q_bias", "v_bias")]
                bias = torch.cat([tensor, torch.ones_like(v), v])
                theirs[key.replace("q_bias", "qkv.bias")] = bias
                theirs[key.replace("q_bias", "qkv.bias_mask")] = torch.full_like(bias, torch.nan)
            elif not key.endswith("v_bias"):
                theirs[key] = tensor
        theirs["rope_embed.periods"] = torch.ones(2)
        theirs["mask_token"] = torch.zeros(1, 16)
        save_file(theirs, tmp_path / "meta.safetensors")
        backbone = load_backbone(record.save(tmp_path))
        assert (
            load_backbone(tmp_path / "meta.safetensors", heads=2).fingerprint
            == backbone.fingerprint
        )


def test_aimv2_under_the_names_of_apple(tmp_path: Path) -> None:
    """As timm's checkpoint_filter_fn reads them."""
    record, theirs = timm_record("aimv2"), {}
    for key, tensor in record.weights.items():
        for ours, apple in (
            ("patch_embed.", "preprocessor.patchifier."),
            ("pos_embed", "preprocessor.pos_embed"),
            ("blocks.", "backbone.blocks."),
            ("norm1", "norm_1"),
            ("norm2", "norm_2"),
            ("fc1_g", "fc1"),
            ("fc1_x", "fc3"),
        ):
            key = key.replace(ours, apple)
        theirs[f"backbone.post_backbone_{key}" if key.startswith("norm.") else key] = tensor
    (tmp_path / "apple").mkdir()
    save_file(theirs, tmp_path / "apple" / "model.safetensors")
    config = {"model_type": "aimv2", "num_attention_heads": 2, "rms_norm_eps": 1e-5}
    (tmp_path / "apple" / "config.json").write_text(json.dumps(config))
    backbone, apple = load_backbone(record.save(tmp_path)), load_backbone(tmp_path / "apple")
    assert (apple.fingerprint, apple.config) == (backbone.fingerprint, backbone.config)


@pytest.mark.parametrize(("width", "heads"), [(384, 6), (1024, 16), (1280, 20), (4096, 32)])
def test_dinov3_has_heads_of_its_own(width: int, heads: int, tmp_path: Path) -> None:
    """As timm has them: of 64 numbers, and of 128 in the largest."""
    record, wide = timm_record("dinov3"), {}
    for key, tensor in record.weights.items():
        if key.startswith("blocks.1."):
            continue
        shape = [width if side % 16 == 0 else side for side in tensor.shape]
        if "qkv" in key:
            shape = [3 * width, width]
        if key.startswith("patch_embed") and tensor.ndim == 4:
            shape = [width, 3, 16, 16]
        wide[key] = torch.zeros(shape, dtype=torch.float16)
    save_file(wide, tmp_path / "wide.safetensors")
    assert load_backbone(tmp_path / "wide.safetensors").config.heads == heads


@pytest.mark.parametrize(
    "kind",
    ["swin_tiny_patch4_window7_224", "convnext_tiny", "beit_base_patch16_224",
     "beitv2_base_patch16_224", "eva02_enormous_patch14_clip_224", "vit_base_patch16_rpn_224",
     "vit_base_resnet50_384", "vit_relpos_base_patch16_224", "vit_base_patch16_rope_224",
     "vit_pe_spatial_base_patch16_512", "vit_pe_lang_large_patch14_448",
     "vit_base_patch16_sapiens2", "naflexvit_base_patch16_siglip"],
)  # fmt: skip
def test_models_that_are_no_plain_vit_by_name(kind: str, tmp_path: Path) -> None:
    record = timm_record("dinov3")
    record.config["architecture"] = kind
    assert f"'{kind}'" in refusal(record.save(tmp_path))
