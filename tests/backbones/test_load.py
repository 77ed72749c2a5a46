"""The weights of every library are the same backbone, which answers as the original model does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.backbones import (
    FAMILIES,
    ONE_SIZE,
    TIMM,
    google_names,
    mae,
    mae_reference,
    near,
    randomised,
    reference,
    timm_names,
    timm_tensors,
)
from torch import nn

import engram
from engram import EngramError, MemoryViT, load_backbone, random_backbone, save_backbone
from engram.images.preprocessing import Preprocessing
from engram.train.features.cache import Cache
from engram.vit.vit import HeadConfig

# transformers


@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_transformers(
    family: str, made: Callable[[str], nn.Module], saved: Callable[[str], Path]
) -> None:
    model, folder = made(family), saved(family)
    backbone = load_backbone(folder)
    assert not backbone.training
    assert not any(p.requires_grad for p in backbone.parameters())
    assert backbone.source == str(folder)
    others = () if family in ONE_SIZE else ((48, 48), (24, 40), (16, 64))
    for size in ((32, 32), *others):
        pixels = torch.randn(2, 3, *size)
        tokens, answer = reference(model, pixels, native=size == (32, 32))
        near(backbone.tokens(pixels), tokens)
        if answer is not None:
            near(backbone(pixels), answer)
        else:
            assert backbone.head is None


def test_a_projection_is_an_embedding_and_has_no_classes(saved: Callable[[str], Path]) -> None:
    """CLIP's 512 numbers are not 512 classes."""
    for family in ("clip-projection", "clip-full", "aimv2-full"):
        backbone = load_backbone(saved(family))
        assert backbone.class_names == ()
        assert backbone(torch.randn(1, 3, 32, 32)).shape == (1, 7)
    assert len(load_backbone(saved("clip-classes")).class_names) == 5


@pytest.mark.parametrize("family", ["siglip-vision", "aimv2-head"])
def test_tasks_read_the_pooling_of_a_model_without_a_class_token(
    family: str, made: Callable[[str], nn.Module], saved: Callable[[str], Path]
) -> None:
    """Live, as statistics, and from the cache, in place of the mean of the patches."""
    model = MemoryViT(load_backbone(saved(family))).eval()
    regimes = {"plain": "head", "thin": "side", "statistics": "readout", "all": "full"}
    for name, regime in regimes.items():
        model = model if regime != "full" else MemoryViT(model.backbone).eval()
        model.add_task(name, 3, regime=regime)
        pixels = torch.randn(2, 3, 32, 32)
        with torch.no_grad():
            theirs = made(family)(pixels).pooler_output
            ours = model.embed(pixels, [name])[name][:, : theirs.shape[1]]
        assert (ours - theirs).abs().max() < 1e-5
    cache = Cache(model.backbone, Preprocessing((32, 32)), keeps="statistics")
    rows = cache.compute(torch.randint(0, 255, (2, 32, 32, 3), dtype=torch.uint8))
    pooled = cache.features(rows).pooled
    statistics = cache.features(rows).statistics
    assert statistics is not None
    assert torch.equal(statistics[:, : len(pooled[0])], pooled)


def test_another_pooling_is_another_backbone(saved: Callable[[str], Path]) -> None:
    backbone = load_backbone(saved("siglip-vision"))
    before = backbone.fingerprint
    with torch.no_grad():
        backbone.head.pool.probe.add_(1)
    assert backbone.fingerprint != before


def test_agrees_with_the_encoder_of_mae(tmp_path: Path) -> None:
    model = mae()
    model.save_pretrained(tmp_path)
    pixels = torch.randn(2, 3, 32, 32)
    near(load_backbone(tmp_path).tokens(pixels), mae_reference(model, pixels))


@pytest.mark.parametrize("family", ["vit-classes", "clip-full", "dinov2-swiglu"])
def test_shards_are_one_model(
    family: str, made: Callable[[str], nn.Module], saved: Callable[[str], Path], tmp_path: Path
) -> None:
    model, folder = made(family), saved(family)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert load_backbone(tmp_path).fingerprint == load_backbone(folder).fingerprint
    shard = next(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(EngramError, match=shard.name):
        load_backbone(tmp_path)


# timm


@pytest.mark.parametrize("family", TIMM)
def test_timm_and_transformers_are_the_same_backbone(
    family: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = saved(family)
    config = json.loads((folder / "config.json").read_text())
    small = family.startswith(("clip", "dinov3", "aimv2"))
    config["layer_norm_eps"] = 1e-5 if small else 1e-6
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    backbone = load_backbone(tmp_path / "theirs")

    names = timm_tensors(family, backbone)
    save_file(names, tmp_path / "model.safetensors")
    settings = {"num_classes": 0, "model_args": {"num_heads": 4}, **TIMM[family]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    timm = load_backbone(tmp_path)

    assert timm.fingerprint == backbone.fingerprint
    assert timm.config.antialias
    assert timm.config == replace(backbone.config, antialias=True, head=timm.config.head)
    pixels = torch.randn(2, 3, 32, 32)
    assert torch.equal(timm.tokens(pixels), backbone.tokens(pixels))
    if timm.head is not None:
        near(timm(pixels), backbone(pixels))
        assert timm.class_names == backbone.class_names  # none of a projection
    else:
        assert backbone.head is None or family == "dinov2-swiglu"

    bare = tmp_path / "some_name.safetensors"
    (tmp_path / "model.safetensors").rename(bare)
    activation = "quick_gelu" if "quick" in backbone.config.activation else None
    if family == "siglip-no-head":
        activation = "gelu_tanh"  # nothing in the tensors shows it
    alone = load_backbone(bare, heads=4, activation=activation)
    assert alone.fingerprint == backbone.fingerprint
    assert alone.config == timm.config


def test_timm_pools_the_mean_behind_a_norm(tmp_path: Path) -> None:
    """timm's fc_norm: no final norm, the mean of the patches, a norm, the classifier."""
    head = HeadConfig(classes=5, pooling="mean", norm=True)
    backbone = randomised(random_backbone(final_norm=False, head=head, prefix_positions=0))
    save_file(timm_names(backbone), tmp_path / "a.safetensors")
    read = load_backbone(tmp_path / "a.safetensors", heads=4)
    pixels = torch.randn(2, 3, 32, 32)
    assert read.config == backbone.config
    assert torch.equal(read(pixels), backbone(pixels))


# Google


@pytest.mark.parametrize("hidden", [False, True])
def test_googles_npz_is_the_same_backbone(hidden: bool, tmp_path: Path) -> None:
    backbone = randomised(random_backbone(heads=8, head=HeadConfig(classes=5, hidden=hidden)))
    np.savez(tmp_path / "a.npz", **google_names(backbone))
    read = load_backbone(tmp_path / "a.npz")
    assert read.config == backbone.config  # the heads are in the shapes
    assert read.fingerprint == backbone.fingerprint
    pixels = torch.randn(2, 3, 32, 32)
    assert torch.equal(read(pixels), backbone(pixels))
    assert read.preprocessing == Preprocessing((32, 32), None, "bilinear")


# Our own layout


def test_our_own_layout_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = randomised(random_backbone(layer_scale=True, classes=3))
    backbone.preprocessing = Preprocessing((32, 48), None, "bilinear", (0.1, 0.2, 0.3))
    backbone.labels = ("a", "b", "c")
    save_backbone(backbone, tmp_path / "pico")
    read = load_backbone(tmp_path / "pico")
    assert read.fingerprint == backbone.fingerprint
    assert (read.config, read.labels) == (backbone.config, backbone.labels)
    assert read.preprocessing == backbone.preprocessing
    assert sorted(p.name for p in (tmp_path / "pico").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    monkeypatch.setattr("engram.backbones.load.BUNDLED", tmp_path)
    assert load_backbone("pico").fingerprint == backbone.fingerprint
    assert load_backbone("pico").source == "pico"

    save_backbone(backbone, tmp_path / "half", dtype=torch.float16)
    half = load_backbone(tmp_path / "half")
    assert half.norm.weight.dtype == torch.float32
    near(half.tokens(torch.ones(1, 3, 32, 32)), backbone.tokens(torch.ones(1, 3, 32, 32)), 0.05)
    small, large = (tmp_path / n / "model.safetensors" for n in ("half", "pico"))
    assert small.stat().st_size < 0.6 * large.stat().st_size


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"engram_backbone": 2}, "newer version"),
        ({"config": None}, "cannot be understood"),
        ({"config": {}}, "image_size"),
        ({"depth": 3}, "blocks.3"),
        ({"depth": 10**12}, "depth is 1000000000000"),
        ({"depth": 999}, "999 layers"),
        ({"depth": "4"}, "cannot be understood"),
        ({"heads": 0}, "heads is 0"),
        ({"heads": 7}, "7 heads"),
        ({"activation": "relu"}, "relu"),
        ({"image_size": 32}, "cannot be understood"),
        ({"image_size": [64, 64]}, "position"),
        ({"head": {"classes": 10, "pooling": "best"}}, "best"),
        ({"prefix_positions": 2}, "2 positions for 1 tokens"),
        ({"surprise": 1}, "surprise"),
        ({"preprocessing": {"size": [0, 0]}}, "size"),
        ({"preprocessing": {"surprise": 1}}, "surprise"),
    ],
)
def test_our_own_layout_damaged(change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    save_backbone(random_backbone(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value in change.items():
        (config if key in config else config["config"])[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngramError, match=expected):
        load_backbone(tmp_path)


# All of them


def test_half_precision_is_read_as_fp32(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for dtype in (torch.float16, torch.bfloat16):
        save_file({n: t.to(dtype) for n, t in tensors.items()}, folder / "model.safetensors")
        backbone = load_backbone(folder)
        assert {p.dtype for p in backbone.parameters()} == {torch.float32}


def test_the_backbone_does_not_depend_on_its_file(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file(timm_names(random_backbone()), file)
    backbone = load_backbone(file)
    before = backbone.tokens(torch.ones(1, 3, 32, 32))
    file.write_bytes(b"\0" * file.stat().st_size)
    assert torch.equal(backbone.tokens(torch.ones(1, 3, 32, 32)), before)


def test_public_names() -> None:
    assert engram.load_backbone is load_backbone
    assert {"load_backbone", "save_backbone"} <= set(engram.__all__)
