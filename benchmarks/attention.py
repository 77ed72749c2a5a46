"""How much of an attention map is on the animal, for several ways to draw one: pets, ViT-Ti/16.

    python -m benchmarks.attention

It trains a masked and a side task on the pets, and compares maps of half of the test images with
the data's own trimaps: the share of the map that is on the animal (border pixels count nowhere),
and how often the brightest patch is on it. `uniform` is a map that is the same everywhere. It takes
about five minutes on two idle cores and writes benchmarks/results/attention.md. It needs the assets
folder (../shared, or ENGRAM_ASSETS).
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import engram
from benchmarks.command import run_engram
from benchmarks.paths import ASSETS, BACKBONE, require_backbone
from benchmarks.report import markdown_table, write_report
from engram.images.preprocessing import normalise
from engram.methods import Masked
from engram.methods.forward import FastPass
from engram.model.passes import task_inputs
from engram.vit.layers import Block

COLUMNS = ("map", "of", "on the animal", "brightest patch on it", "in the four corners")
WHO = {"masked": "a masked task", "base": "the ViT itself", "side": "a side task"}


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.attention", description=str(__doc__).splitlines()[0]
    ).parse_args()
    require_backbone()
    with tempfile.TemporaryDirectory() as temporary:
        model = engram.load_model(trained(Path(temporary)), BACKBONE)
    maps, masks = measure(model)
    rows = [[*name, *scores(found, masks)] for name, found in maps.items()]
    title = "Attention maps and the trimaps of 370 pets (ViT-Ti/16)"
    write_report("attention", title, markdown_table(COLUMNS, rows))


def trained(folder: Path) -> list[Path]:
    files = []
    for regime in ("masked", "side"):
        files.append(folder / f"{regime}.safetensors")
        run_engram(
            *("fit", ASSETS / "data" / "pets", "--task", regime, "--backbone", BACKBONE),
            *("--regime", regime, "--epochs", "8", "-o", files[-1]),
            cache=folder / "cache",
        )
    return files


@torch.inference_mode()
def measure(model: engram.MemoryViT) -> tuple[Mapping[tuple[str, str], Tensor], Tensor]:
    """Maps (images, rows, columns) by what they are, and of each patch the share of each class."""
    pets = engram.data.load(
        f"{ASSETS / 'data' / 'pets'}::{ASSETS / 'data' / 'pets_masks'}",
        kind="segmentation", classes=["pet", "background"], values=[1, 2], ignore=3,
    )["test"]  # fmt: skip
    parts: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    masks = []
    for batch in engram.data.Loader(pets.subset(range(0, len(pets), 2)), model.preprocessing, 32):
        classes = torch.stack([batch.labels == 0, batch.labels == 1], 1).float()
        masks.append(F.avg_pool2d(classes, model.backbone.config.patch))
        pixels = normalise(batch.images, model.preprocessing)
        for who in WHO:
            for method in ("weights", "contribution"):
                found = model.attention(pixels, who, method)
                if who == "side":
                    parts[method, who].append(found[:, 0])
                    continue
                parts[f"{method}, all layers", who].append(found.sum(1))
                parts[f"{method}, last third", who].append(found[:, -4:].sum(1))
            if who != "side":
                parts["rollout", who].append(rollout(model, pixels, who))
    maps = {name: torch.cat(found) for name, found in parts.items()}
    for who in ("masked", "base"):
        weights = maps["weights, last third", who]
        less = (weights - weights.mean(0)).clamp(min=0)
        maps["weights, last third, minus the mean over images", who] = less
    maps["uniform", "masked"] = torch.ones_like(maps["rollout", "masked"])
    order = sorted(maps, key=lambda name: (list(WHO).index(name[1]), name[0]))
    return {(name, WHO[who]): maps[name, who] for name, who in order}, torch.cat(masks)


def rollout(model: engram.MemoryViT, pixels: Tensor, who: str) -> Tensor:
    """Attention rollout (Abnar and Zuidema, 2020) of a class token: (images, rows, columns)."""
    backbone, x = model.backbone, model.backbone.embed(pixels)
    rotation = backbone.rotation(pixels.shape[-2:], x.shape[1])
    layers: list[Tensor] = []

    def see(layer: int, normed: Tensor) -> None:
        q, k, _ = backbone.layers[layer].project(normed, rotation)
        layers.append((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1).mean(1))

    backbone.encode(x, pixels.shape[-2:], see)
    reads: list[tuple[Tensor, Tensor]] = []

    def watch(block: Block, weights: Tensor, values: Tensor, read: Tensor) -> None:
        n = values.shape[2]
        of_backbone, itself, _ = weights.mean(1)[:, 0].tensor_split([n, n + 1], dim=1)
        total = of_backbone.sum(1, keepdim=True) + itself
        reads.append((of_backbone / total, itself / total))

    if who != "base":
        memory = Masked.memory(task_inputs(model, [who]), backbone)
        memory.hook = watch
        FastPass(memory, x.shape[1], rotation).run(backbone, x, 0)
    flow = torch.eye(x.shape[1]).expand(len(x), -1, -1)
    own = x.new_zeros(len(x), x.shape[1])
    for layer, weights in enumerate(layers):
        if reads:
            of_backbone, itself = reads[layer]
            own = 0.5 * own + 0.5 * ((of_backbone.unsqueeze(1) @ flow)[:, 0] + itself * own)
        flow = 0.5 * flow + 0.5 * weights @ flow
    patches = (own if reads else flow[:, 0])[:, backbone.config.prefix :]
    return patches.reshape(len(x), *backbone.config.grid)


def scores(maps: Tensor, masks: Tensor) -> list[str]:
    """As a row of the table; `masks` (images, 2, rows, columns) are of animal and background."""
    animal, other = masks.unbind(1)
    shown = (animal.sum((1, 2)) > 0) & (other.sum((1, 2)) > 0)
    on, off = ((maps * part).sum((1, 2)) for part in (animal, other))
    share = (on / (on + off).clamp(min=1e-12))[shown].mean()
    top = maps.flatten(1).argmax(1, keepdim=True)
    hit = animal.flatten(1).gather(1, top) > other.flatten(1).gather(1, top)
    corners = maps[:, [0, 0, -1, -1], [0, -1, 0, -1]].sum(1) / maps.sum((1, 2)).clamp(min=1e-12)
    return [f"{float(number):.1%}" for number in (share, hit.float().mean(), corners.mean())]


if __name__ == "__main__":
    main()
