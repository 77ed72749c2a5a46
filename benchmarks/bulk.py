"""Bulk prediction against the plain forward pass, and its memory over 100,000 images.

    python -m benchmarks.bulk [--images 1500] [--many 100000]

Speed: images a second of `engram predict --out`, as it reports them, on JPEG photographs (a real
ViT-Ti/16 with one task), next to those of the plain backbone on pixels that are in memory already;
both in turn, medians of three rounds. Memory: that of the command and its decoder as they go over
many small images in an archive. It takes about ten minutes on two idle cores, needs the assets
folder (../shared, or ENGRAM_ASSETS), and writes benchmarks/results/bulk.md.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image

import engram
from benchmarks.paths import ASSETS, BACKBONE, require_backbone
from benchmarks.report import markdown_table, write_report
from engram.model import MemoryViT

ROUNDS, BATCH, TARGET = 3, 32, 0.9


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bulk", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--many", type=int, default=100_000)
    given = parser.parse_args()
    require_backbone()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = speed(folder, given.images)
        memory = peaks(folder, given.many)
    write_report("bulk", "Bulk prediction", [
        *markdown_table(("ViT-Ti/16, one masked task, JPEG photographs", "images a second"), rows),
        "", *markdown_table(("small images in an archive", "resident memory"), memory),
    ])  # fmt: skip


def speed(folder: Path, images: int) -> list[list[str]]:
    """The plain backbone and the command in turn."""
    model = MemoryViT(engram.load_backbone(BACKBONE)).eval()
    model.add_task("pets", 37)
    task = model.save("pets", folder / "pets.safetensors")
    photographs = sorted((ASSETS / "data" / "pets").rglob("*.jpg"))
    listing = folder / "list.txt"
    listing.write_text("\n".join(map(str, islice(cycle(photographs), images))))
    pixels = torch.rand(BATCH, 3, *model.preprocessing.size)
    plain, bulk = [], []
    for i in range(ROUNDS):
        plain.append(plain_rate(model, pixels, images))
        command = predict_command(
            task, listing, folder / f"{i}.parquet", "--backbone", str(BACKBONE)
        )
        answer = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        bulk.append(json.loads(answer)["images_per_second"])
    ratios = [b / p for b, p in zip(bulk, plain, strict=True)]
    return [
        ["the plain backbone, pixels in memory", f"{statistics.median(plain):.1f}"],
        ["`engram predict --out`, JPEG files", f"{statistics.median(bulk):.1f}"],
        [
            "ratio (target)",
            f"{statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f} "
            f"(at least {TARGET})",
        ],
    ]


def predict_command(task: Path, source: Path, out: Path, *flags: str) -> list[str]:
    begin = [sys.executable, "-m", "engram", "predict", str(task), str(source), "-o", str(out)]
    return [*begin, "--batch", str(BATCH), "--json", *flags]


def plain_rate(model: MemoryViT, pixels: torch.Tensor, images: int) -> float:
    began = time.perf_counter()
    with torch.inference_mode():
        for _ in range(images // BATCH):
            model.backbone.tokens(pixels)
    return images // BATCH * BATCH / (time.perf_counter() - began)


def peaks(folder: Path, many: int) -> list[list[str]]:
    """The memory of the command and its decoder as it goes over many images."""
    model = MemoryViT(engram.load_backbone("pico"))
    model.add_task("small", 3)
    task = model.save("small", folder / "small.safetensors")
    archive = small_images(folder / "many.tar", many)
    out = folder / "many"
    command = predict_command(task, archive, out)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    own, seen = psutil.Process(process.pid), list[tuple[int, float]]()
    while process.poll() is None:
        time.sleep(2)
        done = 1024 * len(list(out.glob("part-*")))
        family = [own, *own.children(recursive=True)] if own.is_running() else []
        memory = sum(one.memory_info().rss for one in family if one.is_running())
        if done and memory:
            seen.append((done, memory / 1e6))
    if process.returncode:
        sys.exit(f"engram predict ended with exit code {process.returncode}.")
    tenths = [max(1, many * part // 10) for part in (1, 3, 5, 7, 9)]
    rows = []
    for tenth in tenths:
        near = min(seen, key=lambda one: abs(one[0] - tenth))
        rows.append([f"after {near[0]:,}", f"{near[1]:,.0f} MB"])
    return [*rows, ["largest", f"{max(memory for _, memory in seen):,.0f} MB"]]


def small_images(path: Path, many: int) -> Path:
    """An archive of so many images of 32 pixels; a hundred different ones, again and again."""
    rng, files = np.random.default_rng(0), []
    for _ in range(100):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file, "PNG")
        files.append(file.getvalue())
    with tarfile.open(path, "w") as archive:
        for i in range(many):
            info = tarfile.TarInfo(f"{i:07}.png")
            info.size = len(files[i % 100])
            archive.addfile(info, io.BytesIO(files[i % 100]))
    return path


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
