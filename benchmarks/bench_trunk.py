"""The trunk's forward pass beside transformers' ViT with SDPA, same shape, same pixels.

    python benchmarks/bench_trunk.py

Takes about two minutes on two cores. Expected: a ratio of 1.0 within noise at both batch sizes.
"""

from __future__ import annotations

from functools import partial

import torch
from transformers import ViTConfig, ViTForImageClassification

from timing import compare, report, vit_b32

torch.set_num_threads(2)
ours = vit_b32()
theirs = ViTForImageClassification(
    ViTConfig(image_size=224, patch_size=32, num_labels=1000, attn_implementation="sdpa")
).eval()
lines = ["| batch | transformers, ms | Engram, ms | ratio | quartiles |", "|---|---|---|---|---|"]
for batch, rounds in ((1, 40), (16, 11)):
    pixels = torch.randn(batch, 3, 224, 224)
    with torch.inference_mode():
        found = compare({"them": partial(theirs, pixels), "us": partial(ours, pixels)}, rounds)
    us, them = found["us"], found["them"]
    lines.append(
        f"| {batch} | {1e3 * them.seconds:.1f} | {1e3 * us.seconds:.1f} | {us.ratio:.3f} "
        f"| {us.low:.3f} to {us.high:.3f} |"
    )
report("trunk", "The trunk beside transformers' ViT (ViT-B/32)", lines)
