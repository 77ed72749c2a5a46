"""Training from the cache: one step, and sixteen variants in one pass.

    python benchmarks/bench_training.py

Takes about five minutes on two cores. Ratios are to the plain trunk's forward for the same images,
in the same run; forward, backward and update together. Targets: a cached step 0.08 at batch 128
and 0.2 at batch 16 (ViT-B/32); sixteen variants 0.35 an image on ViT-Ti/16 and 0.8 on ViT-B/32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from engram import MemoryViT
from engram.vit import ViT
from timing import compare, report, vit_b32, vit_ti16

torch.set_num_threads(2)


def cached_step(trunk: ViT, batch: int, variants: int = 1) -> Callable[[], None]:
    """A step of several variants from rows as the cache gives them: half precision, all layers."""
    model = MemoryViT(trunk)
    names = [f"task{i}" for i in range(variants)]
    for name in names:
        model.add_task(name, classes=10, cells=5)
    optimizers = [torch.optim.AdamW(model.task(name).parameters(), 1e-3) for name in names]
    config = trunk.config
    tokens = config.prefix + config.grid[0] * config.grid[1]
    rows = torch.randn(batch, config.depth * tokens + 1, config.width).half()
    labels = torch.randint(0, 10, (batch,))

    def step() -> None:
        layers = [rows[:, i : i + tokens].float() for i in range(0, rows.shape[1] - 1, tokens)]
        logits = model.from_cache(layers, rows[:, -1].float(), names)
        sum(F.cross_entropy(logits[name], labels) for name in names).backward()
        for name, optimizer in zip(names, optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.task(name).parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step


def plain(trunk: ViT, batch: int) -> Callable[[], object]:
    pixels = torch.randn(batch, 3, 224, 224)

    def forward() -> None:
        with torch.inference_mode():
            trunk(pixels)

    return forward


lines = ["| from the cache | batch | ratio | quartiles | target |", "|---|---|---|---|---|"]
for name, make, cases in (
    ("ViT-B/32", vit_b32, ((128, 1, "0.08"), (16, 1, "0.20"), (64, 16, "0.80"))),
    ("ViT-Ti/16", vit_ti16, ((64, 1, ""), (64, 16, "0.35"))),
):
    trunk = make()
    for batch, variants, target in cases:
        functions = {"plain": plain(trunk, batch), "step": cached_step(trunk, batch, variants)}
        timing = compare(functions, 8)["step"]
        what = f"{name}, one task" if variants == 1 else f"{name}, {variants} variants"
        lines.append(
            f"| {what} | {batch} | {timing.ratio:.3f} | {timing.low:.3f} to {timing.high:.3f} "
            f"| {target} |"
        )
report("training", "Training from the cache, as a share of the trunk's forward", lines)
