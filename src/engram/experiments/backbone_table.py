"""The recommended backbones as a table: what they are, which are here, and how fast."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from engram.backbones.load import load_backbone
from engram.backbones.recommended import PICO, RECOMMENDED
from engram.backbones.shape import BackboneShape
from engram.tasks.costs import backbone_macs
from engram.util.description import Description
from engram.util.invocation import program
from engram.vit.vit import ViT, ViTConfig

_BATCH, _PASSES, _SECONDS = 2, 3, 0.15
_COLUMNS = ("name", "parameters", "download", "licence", "images/s", "here")


def list_backbones() -> Description:
    """All recommended backbones and the bundled one; nothing is asked over a network."""
    pico = load_backbone(PICO)
    entries: list[dict[str, Any]] = [
        {
            "name": backbone.name,
            "source": backbone.repo,
            "parameters": backbone.parameters,
            "download": backbone.download,
            "licence": backbone.licence,
            "image_size": backbone.image_size,
            "images_per_second": estimated_speed(backbone.config, backbone.image_size),
            "on_this_machine": backbone.on_this_machine,
            "about": backbone.about,
        }
        for backbone in RECOMMENDED
    ]
    entries.append(
        {
            "name": PICO,
            "source": PICO,
            "parameters": sum(parameter.numel() for parameter in pico.parameters()),
            "download": 0,
            "licence": "Apache-2.0",
            "image_size": pico.config.image_size[0],
            "images_per_second": estimated_speed(pico.config, pico.config.image_size[0]),
            "on_this_machine": True,
            "about": "images of up to 48 pixels",
        }
    )
    rows = [
        *((entry["name"], f"{entry['source']}: {entry['about']}") for entry in entries),
        ("get one", f"{program()} backbones get {RECOMMENDED[0].name}"),
        ("images/s", "of the plain backbone on this CPU, estimated from one layer just now"),
        ("here", "whether it is on this machine and needs no network"),
    ]
    return Description({"backbones": entries}, rows, _COLUMNS, tuple(map(_row, entries)))


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    speed = entry["images_per_second"]
    return (
        entry["name"],
        f"{entry['parameters'] / 1e6:.1f} M",
        f"about {entry['download'] / 1e6:.0f} MB" if entry["download"] else "bundled",
        entry["licence"],
        f"{speed:.{0 if speed >= 10 else 1}f}",
        "yes" if entry["on_this_machine"] else "no",
    )


@torch.inference_mode()
def estimated_speed(config: ViTConfig, side: int) -> float:
    """Images per second of a plain pass on this CPU, from the time of one layer.

    Time does not depend on the values of weights, and all layers take the same.
    """
    size = (side, side)
    one = replace(config, image_size=size, depth=1, head=None)
    with torch.random.fork_rng(devices=[]):
        layer = ViT(one).eval()
    pixels = torch.zeros(_BATCH, 3, *size)
    layer.tokens(pixels)  # the first pass is slower
    times: list[float] = []
    while len(times) < _PASSES or sum(times) < _SECONDS:
        began = time.perf_counter()
        layer.tokens(pixels)
        times.append(time.perf_counter() - began)
    share = backbone_macs(BackboneShape.of(one), size) / backbone_macs(
        BackboneShape.of(config), size
    )
    return _BATCH * share / min(times)
