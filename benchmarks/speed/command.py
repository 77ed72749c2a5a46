"""The whole `engram fit` command, compared with one plain pass over the same photographs.

    python -m benchmarks.speed.command BACKBONE FOLDER

prints the seconds of that pass: reading, decoding and the backbone, without starting Python. The
time of the command counts everything, from the start of the process to its report.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.command import run_engram
from benchmarks.paths import ASSETS, BACKBONE, ROOT
from benchmarks.speed.plan import Plan
from engram.backbones.load import load_backbone
from engram.data.datasets import load
from engram.data.loader import Loader
from engram.experiments.bench import PLAIN, Measurement, Say, Timing
from engram.images.preprocessing import Preprocessing, normalise
from engram.train.recipe import Recipe

COMMANDS = {"masked": ("--regime", "masked"), "auto": ("--regime", "auto")}
_BATCH = 32


def measure_command(plan: Plan, say: Say) -> dict[str, Any]:
    """One run of each command, by the regime; no row where the assets are missing."""
    if plan.real and not BACKBONE.exists():
        say(f"there is no {BACKBONE}: the whole command is not measured")
        return {"rows": []}
    backbone = str(BACKBONE) if plan.real else "pico"
    with tempfile.TemporaryDirectory() as temporary:
        photographs = Path(temporary) / "photographs"
        count = (copied_photographs if plan.real else drawn_images)(photographs, plan.photographs)
        say(f"a plain pass over {count} photographs")
        plain = _plain_pass(backbone, photographs)
        rows = [_row(PLAIN, count, plain, plain)]
        for what, flags in COMMANDS.items():
            say(f"engram fit, {what}")
            out = Path(temporary) / what
            began = time.perf_counter()
            run_engram(
                "fit", photographs, "--task", "photographs", "--backbone", backbone,
                "-o", out / "photographs.safetensors", *flags, cache=out / "cache",
            )  # fmt: skip
            rows.append(_row(f"engram fit, {what}", count, time.perf_counter() - began, plain))
            shutil.rmtree(out)
    shape = "ViT-Ti/16" if plan.real else backbone
    return {"rows": [{"backbone": shape, **row} for row in rows]}


def _row(what: str, count: int, seconds: float, plain: float) -> dict[str, Any]:
    ratio = seconds / plain
    return Measurement(what, 1, count, Timing(seconds, ratio, ratio, ratio, 1)).to_dict()


def copied_photographs(folder: Path, count: int) -> int:
    """Photographs of the assets folder, as a folder of classes."""
    folders = [ASSETS / "data" / name for name in ("pets", "flowers")]
    found = [path for each in folders for path in sorted(each.glob("*/*/*.jpg"))][:count]
    for path in found:
        target = folder / path.parent.name / f"{path.parent.parent.name}-{path.name}"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return len(found)


def drawn_images(folder: Path, count: int) -> int:
    """Noise in two classes."""
    noise = np.random.default_rng(0)
    for i in range(count):
        target = folder / "ab"[i % 2] / f"{i}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(target)
    return count


def _plain_pass(backbone: str, folder: Path) -> float:
    """In a process of its own, like the commands."""
    command = [sys.executable, "-m", "benchmarks.speed.command", backbone, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT)
    return float(done.stdout)


@torch.inference_mode()
def main(name: str, folder: str) -> None:
    backbone = load_backbone(name)
    preprocessing = backbone.preprocessing or Preprocessing(backbone.config.image_size, None)
    dataset = load(folder)["train"]
    began = time.perf_counter()
    loader = Loader(dataset, preprocessing, _BATCH, workers=Recipe().workers)
    for batch in loader.epoch(0):
        backbone.tokens(normalise(batch.images, preprocessing))
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main(*sys.argv[1:])
