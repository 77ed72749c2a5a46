"""Backbones with odd configurations, in the layouts of transformers, timm and Engram itself."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import engram
from benchmarks.attacks.headers import make_backbone
from benchmarks.attacks.isolated import run_isolated
from benchmarks.attacks.odd import oddly_changed
from benchmarks.attacks.record import Record

WIDTH, DEPTH, PATCH, SIDE, HIDDEN = 16, 2, 4, 16, 32
TOKENS = 1 + (SIDE // PATCH) ** 2
Files = dict[str, Any]  # the JSON files of a folder by name


def linear(name: str, out: int, into: int) -> dict[str, Tensor]:
    return {f"{name}.weight": torch.randn(out, into) / 8, f"{name}.bias": torch.zeros(out)}


def norm(name: str) -> dict[str, Tensor]:
    return {f"{name}.weight": torch.ones(WIDTH), f"{name}.bias": torch.zeros(WIDTH)}


def patches(name: str) -> dict[str, Tensor]:
    weight = torch.randn(WIDTH, 3, PATCH, PATCH) / 8
    return {f"{name}.weight": weight, f"{name}.bias": torch.zeros(WIDTH)}


def transformers_folder(folder: Path) -> Files:
    tensors = {
        "embeddings.cls_token": torch.zeros(1, 1, WIDTH),
        "embeddings.position_embeddings": torch.randn(1, TOKENS, WIDTH),
        **patches("embeddings.patch_embeddings.projection"),
        **norm("layernorm"),
    }
    for i in range(DEPTH):
        layer = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            tensors |= linear(f"{layer}.attention.attention.{part}", WIDTH, WIDTH)
        tensors |= linear(f"{layer}.attention.output.dense", WIDTH, WIDTH)
        tensors |= linear(f"{layer}.intermediate.dense", HIDDEN, WIDTH)
        tensors |= linear(f"{layer}.output.dense", WIDTH, HIDDEN)
        tensors |= norm(f"{layer}.layernorm_before") | norm(f"{layer}.layernorm_after")
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "vit", "architectures": ["ViTModel"], "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH, "num_attention_heads": 2, "intermediate_size": HIDDEN,
        "hidden_act": "gelu", "image_size": SIDE, "patch_size": PATCH, "num_channels": 3,
        "qkv_bias": True, "layer_norm_eps": 1e-12, "id2label": {"0": "a", "1": "b"},
    }  # fmt: skip
    processor = {
        "size": {"height": SIDE, "width": SIDE}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "rescale_factor": 1 / 255, "resample": 2, "do_resize": True, "do_normalize": True,
    }  # fmt: skip
    return {"config.json": config, "preprocessor_config.json": processor}


def timm_folder(folder: Path) -> Files:
    tensors = {
        "cls_token": torch.zeros(1, 1, WIDTH),
        "pos_embed": torch.randn(1, TOKENS, WIDTH),
        **patches("patch_embed.proj"),
        **norm("norm"),
        **linear("head", 3, WIDTH),
    }
    for i in range(DEPTH):
        block = f"blocks.{i}"
        tensors |= linear(f"{block}.attn.qkv", 3 * WIDTH, WIDTH)
        tensors |= linear(f"{block}.attn.proj", WIDTH, WIDTH)
        tensors |= linear(f"{block}.mlp.fc1", HIDDEN, WIDTH)
        tensors |= linear(f"{block}.mlp.fc2", WIDTH, HIDDEN)
        tensors |= norm(f"{block}.norm1") | norm(f"{block}.norm2")
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architecture": "vit_tiny_patch16_224", "num_classes": 3, "num_features": WIDTH,
        "global_pool": "token", "model_args": {"num_heads": 2},
        "label_names": ["a", "b", "c"],
        "pretrained_cfg": {
            "input_size": [3, SIDE, SIDE], "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 0.9,
            "interpolation": "bicubic", "crop_mode": "center", "num_classes": 3,
        },
    }  # fmt: skip
    return {"config.json": config}


def own_folder(folder: Path) -> Files:
    engram.save_backbone(make_backbone(), folder)
    return {"config.json": json.loads((folder / "config.json").read_text())}


def attack(case: tuple[Path, Files]) -> None:
    """Load the backbone and run it on one image of its size."""
    source, files = case
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(source / "model.safetensors", folder)
        for file, document in files.items():
            (folder / file).write_text(json.dumps(document))
        backbone = engram.load_backbone(folder)
        height, width = backbone.config.image_size
        with torch.inference_mode():
            backbone.tokens(torch.zeros(1, 3, height, width))


def run(count: int) -> Record:
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as name:
        sources = []
        for make in (transformers_folder, timm_folder, own_folder):
            folder = Path(name) / make.__name__
            folder.mkdir()
            sources.append((folder, make(folder)))
            attack(sources[-1])  # unchanged, it has to load
        cases = []
        for i in range(count):
            folder, files = sources[i % len(sources)]
            file = rng.choice(sorted(files))
            place, changed = oddly_changed(files[file], rng)
            cases.append((f"{folder.name}, {file} {place}", (folder, {**files, file: changed})))
        return run_isolated(cases, attack)
