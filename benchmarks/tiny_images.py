"""Two ideas for images of 28 to 32 pixels, which are blurred at 224: on validation images.

    OMP_NUM_THREADS=1 python -m benchmarks.tiny_images

sharpened   an unsharp mask (3 pixels, 100 %) after images are enlarged: another view of them, whose
            pass only tasks with the same view could share
derived     a backbone of their own, made once and without labels: cells that every token of the ViT
            reads are trained so that photographs which were shrunk to 24 to 64 pixels and enlarged
            again give the tokens of the originals. ViT and cells are then a backbone with a
            fingerprint of its own, and all tasks on small images could share its pass
weights     the same with the weights of the layers in place of cells: a ViT of the usual shape

With each, `auto` learns from 1,000 images of CIFAR-10 and of fashion and from blood cells, and is
compared with `auto` as it is and with `memory`, on a real ViT-Ti/16. No test image is read. The
cells learn from the training images of pets, flowers, textures, leaves and waste, for about ten
minutes of one core; they are kept in build/derived, and training continues from a checkpoint.
Finished runs are lines of results/tiny_images.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageFilter
from torch import Tensor, nn

from benchmarks.paper.records import Record, Records
from benchmarks.paper.runs import datasets
from benchmarks.paths import ASSETS, BUILD, RESULTS, require_backbone
from benchmarks.report import markdown_table, write_report
from engram.data.datasets import Dataset, Splits, load
from engram.data.source import Arrays
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.methods import FullMemory
from engram.model import MemoryViT
from engram.train.features.cache import Cache
from engram.train.fit import fit
from engram.train.recipe import Recipe
from engram.train.search.auto import auto
from engram.vit.layers import Block, LayerHook, merge_heads
from engram.vit.vit import ViT

RECORDS = Records(RESULTS / "tiny_images.jsonl")
PHOTOGRAPHS = ("pets", "flowers", "textures", "leaves", "waste")
SETS = ("cifar10", "fashion", "bloodcells")
CELLS, STEPS, BATCH, RATE, WEIGHTS_RATE = 20, 600, 16, 3e-3, 1e-4
SIDES = (24, 32, 40, 48, 64)  # of a shrunk photograph
SEEDS = (0, 1, 2)
HOW = {
    "plain": "`auto`",
    "sharpened": "`auto`, sharpened images",
    "derived": "`auto`, backbone with derived cells",
    "weights": "`auto`, backbone with derived weights",
    "memory": "`memory`, in a pass of its own",
}


class DerivedViT(ViT):
    """A ViT whose every token reads cells, too."""

    cells: nn.Parameter

    @classmethod
    def of(cls, vit: ViT, cells: Tensor) -> DerivedViT:
        vit.__class__ = cls  # everything else stays what it is
        assert isinstance(vit, DerivedViT)
        vit.cells = nn.Parameter(cells)
        return vit

    def encode(self, x: Tensor, size: object, hook: LayerHook | None = None) -> Tensor:
        for layer, block in enumerate(self.layers):
            x = block(x, partial(self._attend, layer=layer, hook=hook))
        return x

    def _attend(self, block: Block, normed: Tensor, layer: int, hook: LayerHook | None) -> Tensor:
        if hook is not None:
            hook(layer, normed)
        q, k, v = block.project(normed, None)
        cell_k, cell_v = block.keys_values(block.norm1(self.cells[layer]).unsqueeze(0))
        k = torch.cat([k, cell_k.expand(len(k), -1, -1, -1)], 2)
        v = torch.cat([v, cell_v.expand(len(v), -1, -1, -1)], 2)
        return merge_heads(F.scaled_dot_product_attention(q, k, v))


@torch.inference_mode()
def compute(self: Cache, images: Tensor) -> Tensor:
    """Rows of the cache (`Cache.compute`), of a backbone that has an `encode` of its own."""
    assert self.keeps == "all", self.keeps
    pixels, layers = normalise(images, self.preprocessing), list[Tensor]()
    raw = self.backbone.encode(
        self.backbone.embed(pixels), pixels.shape[-2:], lambda _, tokens: layers.append(tokens)
    )
    final = self.backbone.norm(raw)
    return torch.cat([*layers, final, self.backbone.pool(final).unsqueeze(1)], dim=1).half()


# The derived backbones


@cache
def photographs() -> Tensor:
    """All photographs as uint8 (images, 3, 256, 256), of which crops are taken."""
    kept = BUILD / "derived" / "photographs.pt"
    if not kept.exists():
        view = datasets.backbone(224, raw=True).preprocessing
        assert view is not None
        large = replace(view, size=(256, 256), resize=256)
        sets = [load(ASSETS / "data" / name)["train"] for name in PHOTOGRAPHS]
        images = [evaluation_view(one.read(i), large) for one in sets for i in range(len(one))]
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(torch.from_numpy(np.stack(images)).movedim(-1, 1).contiguous(), kept)
    found: Tensor = torch.load(kept, weights_only=True, mmap=True)
    return found


def batches(seed: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Photographs of 224 pixels (images, height, width, 3), and the same shrunk and enlarged."""
    images = photographs()
    for step in range(first, STEPS):
        draw = np.random.default_rng([seed, step])
        chosen = images[torch.from_numpy(draw.integers(len(images), size=BATCH))]
        top, left = draw.integers(33, size=2).tolist()
        chosen = chosen[:, :, top : top + 224, left : left + 224].float()
        chosen = chosen.flip(-1) if draw.random() < 0.5 else chosen
        side = int(draw.choice(SIDES))
        small = F.interpolate(chosen, (side, side), mode="bicubic", antialias=True)
        small = small.round().clamp(0, 255)
        shown = F.interpolate(small, (224, 224), mode="bicubic").round().clamp(0, 255)
        yield tuple(x.to(torch.uint8).movedim(1, -1) for x in (chosen, shown))  # type: ignore[misc]


def with_cells(seed: int) -> ViT:
    """A backbone whose cells give photographs of few pixels the tokens of the originals."""
    vit = datasets.backbone(224).requires_grad_(False)
    torch.manual_seed(seed)
    config = vit.config
    derived = DerivedViT.of(vit, torch.randn(config.depth, CELLS, config.width) * 0.02)
    return derive(derived, f"cells-{seed}", seed, RATE)


def with_weights(seed: int) -> ViT:
    """The same, of the usual architecture: the weights of its layers are trained instead."""
    vit = datasets.backbone(224)
    for block in vit.layers:
        block.requires_grad_(True)
    return derive(vit, f"weights-{seed}", seed, WEIGHTS_RATE)


def derive(derived: ViT, name: str, seed: int, rate: float) -> ViT:
    """Train what requires a gradient, or continue."""
    kept = BUILD / "derived" / f"{name}.pt"
    plain = datasets.backbone(224).requires_grad_(False)
    trained = {n: p for n, p in derived.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), rate, weight_decay=0.0)
    first, losses = 0, list[float]()
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        first, losses = state["step"], state["losses"]
        derived.load_state_dict(state["trained"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
    recipe = Recipe(steps=STEPS)
    assert plain.preprocessing is not None
    show = partial(normalise, preprocessing=plain.preprocessing)
    for step, (whole, small) in enumerate(batches(seed, first), start=first):
        optimizer.param_groups[0]["lr"] = recipe.rate_at(step, STEPS, rate)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                wanted = plain.norm(plain.encode(plain.embed(show(whole)), (224, 224))).float()
                start = plain.embed(show(small))
            found = derived.norm(derived.encode(start, (224, 224))).float()
        error = (found - wanted).square().mean(-1) / wanted.var(-1)
        loss = error[:, 0].mean() + error[:, 1:].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if (step + 1) % 50 == 0:
            print(name, step + 1, f"{np.mean(losses[-50:]):.4f}", flush=True)
            state = {"step": step + 1, "losses": losses, "optimizer": optimizer.state_dict(),
                     "trained": {n: p.detach() for n, p in trained.items()}}  # fmt: skip
            torch.save(state, kept.with_suffix(".new"))
            kept.with_suffix(".new").replace(kept)
    return derived.requires_grad_(False)


# What tasks learn


def sharpened(data: Dataset) -> Dataset:
    """Images at 224 pixels, sharpened there."""
    view = datasets.squashed(224)
    mask = ImageFilter.UnsharpMask(radius=3, percent=100, threshold=0)
    images = [Image.fromarray(evaluation_view(data.read(i), view)) for i in range(len(data))]
    pixels = torch.from_numpy(np.stack([np.asarray(image.filter(mask)) for image in images]))
    rows = Arrays(pixels, f"{data.name}-{data.split}-sharpened")
    return replace(data, rows=rows, order=np.arange(len(data)))


def trained(name: str, how: str, seed: int) -> Record:
    """Validation accuracy of `auto` on the plain or derived backbone, or of `memory`."""
    splits: Splits = datasets.splits(name, 224, 1_000)
    splits = replace(splits, test=None)
    vit = datasets.backbone(224)
    if how == "sharpened":
        splits = replace(splits, train=sharpened(splits["train"]), val=sharpened(splits["val"]))
    if how in DERIVED:
        vit = DERIVED[how](seed)
    vit.requires_grad_(False)
    recipe = Recipe(workers=0, seed=seed, data_seed=seed, refit=False)
    model = MemoryViT(vit)
    if how == "memory":
        model.add(splits.task_spec("task", FullMemory(cells=5)), seed=seed)
        own = recipe.but(epochs=10, batch=32, micro_batch=32, lr=1e-3, precision="bf16",
                         ema=0.0, patience=0, evaluations=1)  # fmt: skip
        found = fit(model, "task", splits, own)
        return {"accuracy": found.metrics["val"]["accuracy"], "regimes": {}}
    derived = mock.patch.object(Cache, "compute", compute)
    with derived if how == "derived" else nullcontext():
        result = auto(model, "task", splits, recipe)
    regimes: dict[str, float] = {}
    for one in result.tried:
        if not one.dropped:
            regimes[one.regime] = max(regimes.get(one.regime, 0.0), one.value)
    return {"accuracy": result.metrics["val"]["accuracy"], "kept": result.regime,
            "regimes": regimes}  # fmt: skip


DERIVED = {"derived": with_cells, "weights": with_weights}


def record_name(name: str, how: str, seed: int) -> str:
    return f"{name}, {how}, {seed}"


def page() -> list[str]:
    rows = []
    for how, title in HOW.items():
        cells_of = []
        for name in SETS:
            found = [RECORDS.get(record_name(name, how, seed)) for seed in SEEDS]
            each = [_shown(one) for one in found if one is not None]
            cells_of.append(" / ".join(each))
        rows += [[title, *cells_of]] if any(cells_of) else []
    return [_ABOUT, "", *markdown_table(["", *SETS], rows)]


def _shown(record: Record) -> str:
    """Accuracy of what was kept, and of the solved heads."""
    solved = [record["regimes"].get(name) for name in ("head", "readout")]
    more = ", ".join(f"{100 * one:.1f}" for one in solved if one is not None)
    return f"{100 * record['accuracy']:.1f}" + (f" ({more})" if more else "")


_ABOUT = """
Accuracy in per cent on validation images, by seed: the estimate for what `auto` kept, which allows
for the choice, and in brackets the solved head and the solved readout. 1,000 training and 1,000
validation images of CIFAR-10 and of fashion, 480 and 120 of blood cells.
""".strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tiny_images", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--table", action="store_true", help="only write the page")
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    given = parser.parse_args()
    if not given.table:
        require_backbone()
        torch.set_num_threads(1)
        for seed in SEEDS[: given.seeds]:
            for how in HOW:
                for name in SETS:
                    called = record_name(name, how, seed)
                    if called not in RECORDS:
                        record = trained(name, how, seed)
                        RECORDS.append(called, record)
                        print(called, record, flush=True)
    write_report("tiny_images", "Images of 28 to 32 pixels", page())


if __name__ == "__main__":
    main()
