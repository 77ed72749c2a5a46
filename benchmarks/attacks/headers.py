"""Engrams with odd headers and correct hashes: inspected, attached and asked about an image."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

import engram
from benchmarks.attacks.isolated import run_isolated
from benchmarks.attacks.odd import oddly_changed
from benchmarks.attacks.record import Record
from engram.images.preprocessing import Preprocessing
from engram.images.views import evaluation_view
from engram.model import MemoryViT
from engram.store.describe import describe_engram
from engram.store.format import parse_engram, parse_header
from engram.vit import ViT

FILE = "odd.safetensors"
IMAGE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)


def make_backbone() -> ViT:
    backbone = engram.random_backbone(image_size=16, patch=4, width=16, depth=2, heads=2)
    backbone.preprocessing = Preprocessing((16, 16))
    return backbone


def good_engrams(backbone: ViT) -> list[bytes]:
    """Files of all kinds of task and several regimes."""
    model = MemoryViT(backbone)
    model.add_task("first", ["rose", "tulip", "é"], cells=3)
    model.add_task("child", 4, regime="masked+adapter", extends=["first"], adapter_width=2)
    model.add_task("head", 2, regime="mlp-head")
    model.add_task("labels", ["a", "b"], kind="multilabel")
    model.add_task("numbers", ["a", "b"], kind="regression")
    model.add_task("pixels", ["a", "b"], kind="segmentation", values=[0, 1])
    recipe = {"lr": 0.1, "seeds": [1, 2], "data": "photos"}
    with tempfile.TemporaryDirectory() as folder:
        return [
            model.save(
                name, Path(folder) / FILE, metrics={"val": {"accuracy": 0.5}}, recipe=recipe
            ).read_bytes()
            for name in model.tasks
        ]


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """What safetensors wrote about the file, and the bytes of its tensors."""
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(data: bytes, header: Any) -> bytes:
    """The file with another header and with the hashes that belong to it."""
    outer, tensors = header_of(data)
    with suppress(Exception):  # most odd headers describe no engram, so they have no content hash
        found = parse_header(Path(FILE), header, safetensors.torch.load(data))
        header = {**header, "content": found.content}
    text = json.dumps(header)
    digest = hashlib.sha256(text.encode()).hexdigest()
    outer["__metadata__"] = {"engram": text, "sha256": digest}
    written = json.dumps(outer).encode()
    return struct.pack("<Q", len(written)) + written + tensors


def attack(backbone: ViT, data: bytes) -> None:
    """What a user does with a file: inspect it, attach it, ask it about an image."""
    found = parse_engram(data, FILE)
    document = describe_engram(found, len(data)).document
    json.dumps(document)
    model = MemoryViT(backbone)
    model.attach(found)
    view = torch.from_numpy(evaluation_view(IMAGE, model.preprocessing))
    with torch.inference_mode():
        model(view[None].permute(0, 3, 1, 2).float() / 255)


def run(count: int) -> Record:
    rng, backbone = random.Random(0), make_backbone()
    good = good_engrams(backbone)
    headers = [json.loads(header_of(data)[0]["__metadata__"]["engram"]) for data in good]
    cases = []
    for i in range(count):
        which = i % len(good)
        place, header = oddly_changed(headers[which], rng)
        cases.append((f"{headers[which]['task']['name']}, {place}", (good[which], header)))
    return run_isolated(cases, lambda case: attack(backbone, with_header(*case)))
