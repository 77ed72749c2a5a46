"""The whole `engram fit` command, compared with one plain pass over the same photographs.

On one CPU, the settings that the command finds are compared with those given by hand; on small
datasets, five folds with one share held out.

    python -m benchmarks.speed.command BACKBONE FOLDER

prints the seconds of that pass: reading, decoding and the backbone, without starting Python. The
time of the command counts everything, from the start of the process to its report.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.command import run_engram
from benchmarks.paths import ASSETS, BACKBONE, DINOV2_SMALL, ROOT
from benchmarks.speed.plan import Plan
from engram.backbones.load import load_backbone
from engram.data.datasets import load
from engram.data.loader import Loader
from engram.experiments.bench import PLAIN, Measurement
from engram.experiments.timing import Say, Timing
from engram.images.preprocessing import Preprocessing, normalise
from engram.train.recipe import Recipe

_BATCH = 32


@dataclass(frozen=True)
class Run:
    """One `engram fit` with these flags; `one_cpu`: it may use a single CPU of the machine."""

    what: str
    flags: tuple[str, ...]
    one_cpu: bool = False


@dataclass(frozen=True)
class Comparison:
    """Runs on the same photographs, relative to the first, or to a plain pass."""

    shape: str
    backbone: str
    photographs: int
    runs: tuple[Run, ...]
    plain: bool = True


MASKED = Run("engram fit, masked", ("--regime", "masked"))
AUTO = Run("engram fit, auto", ("--regime", "auto"))


def comparisons(plan: Plan) -> list[Comparison]:
    """What is run; the quick plans measure the bundled backbone only."""
    if not plan.real:
        return [Comparison("pico", "pico", plan.photographs, (MASKED, AUTO))]
    vit, few = ("ViT-Ti/16", str(BACKBONE)), 300
    full = Run("engram fit, auto, --precision fp32", ("--precision", "fp32"))
    dinov2 = Comparison("DINOv2-small", str(DINOV2_SMALL), 600, (AUTO, full))
    one_cpu = (
        Run("one CPU, --threads 1 --workers 1", ("--threads", "1", "--workers", "1"), True),
        Run("one CPU", (), True),
    )
    return [
        Comparison(*vit, plan.photographs, (MASKED, AUTO, full)),
        *([dinov2] if DINOV2_SMALL.exists() else []),
        Comparison(*vit, few, one_cpu, plain=False),
    ]


def measure_command(plan: Plan, say: Say) -> dict[str, Any]:
    """One run of each command; no row where the assets are missing."""
    if plan.real and not BACKBONE.exists():
        say(f"there is no {BACKBONE}: the whole command is not measured")
        return {"rows": []}
    rows: list[dict[str, Any]] = []
    for one in comparisons(plan):
        with tempfile.TemporaryDirectory() as temporary:
            photographs = Path(temporary) / "photographs"
            count = (copied_photographs if plan.real else drawn_images)(
                photographs, one.photographs
            )
            times: dict[str, float] = {}
            if one.plain:
                say(f"a plain pass of {one.shape} over {count} photographs")
                times[PLAIN] = _plain_pass(one.backbone, photographs)
            for run in one.runs:
                say(f"{one.shape}, {count} photographs: {run.what}")
                times[run.what] = _fit(run, one.backbone, photographs, Path(temporary) / "out")
        first = next(iter(times.values()))
        for what, seconds in times.items():
            ratio = seconds / first
            timing = Timing(seconds, ratio, ratio, ratio, 1)
            rows.append({"backbone": one.shape, **Measurement(what, 1, count, timing).to_dict()})
    return {"rows": rows}


#: Datasets of the assets, and the images of each that are held out in folds or once.
FOLD_SETS, FOLD_IMAGES = ("pets", "textures", "leaves", "waste", "xray", "bloodcells"), 300
IN_FOLDS = "five folds, mean of datasets"


def measure_folds(plan: Plan, say: Say) -> dict[str, Any]:
    """`engram fit` in five folds, relative to one share, on several datasets in turn."""
    if plan.real and not BACKBONE.exists():
        say(f"there is no {BACKBONE}: folds are not measured")
        return {"rows": []}
    backbone = str(BACKBONE) if plan.real else "pico"
    rows: list[dict[str, Any]] = []
    for name in FOLD_SETS if plan.real else ("noise",):
        with tempfile.TemporaryDirectory() as temporary:
            images, out = Path(temporary) / name, Path(temporary) / "out"
            if plan.real:
                found = sorted((ASSETS / "data" / name / "train").glob("*/*"))
                chosen = np.random.default_rng(0).permutation(len(found))[:FOLD_IMAGES]
                count = _copied([found[i] for i in chosen], images)
            else:
                count = drawn_images(images, plan.photographs)
            seconds: list[float] = []
            for folds in (1, 5):
                say(f"{name}, {count} images, --folds {folds}")
                run = Run(name, ("--folds", str(folds)))
                seconds.append(_fit(run, backbone, images, out))
        ratio = seconds[1] / seconds[0]
        timing = Timing(seconds[1], ratio, ratio, ratio, 1)
        rows.append(Measurement(f"five folds, {name}", 1, count, timing).to_dict())
    ratios = [row["ratio"] for row in rows]
    low, high = np.percentile(ratios, (25, 75)).tolist()
    whole = sum(row["seconds"] for row in rows)
    timing = Timing(whole, float(np.mean(ratios)), low, high, len(rows))
    return {"rows": [*rows, Measurement(IN_FOLDS, 1, 0, timing).to_dict()]}


def _fit(run: Run, backbone: str, photographs: Path, out: Path) -> float:
    """The seconds of a command, with an empty cache."""
    cpus = os.sched_getaffinity(0)
    began = time.perf_counter()
    try:
        if run.one_cpu:
            os.sched_setaffinity(0, [min(cpus)])  # the command inherits it
        run_engram(
            "fit", photographs, "--task", "photographs", "--backbone", backbone,
            "-o", out / "photographs.safetensors", *run.flags, cache=out / "cache",
        )  # fmt: skip
    finally:
        os.sched_setaffinity(0, cpus)
    seconds = time.perf_counter() - began
    shutil.rmtree(out)
    return seconds


def copied_photographs(folder: Path, count: int) -> int:
    """Photographs of the assets folder, as a folder of classes."""
    folders = [ASSETS / "data" / name for name in ("pets", "flowers")]
    return _copied(
        [path for each in folders for path in sorted(each.glob("*/*/*.jpg"))][:count], folder
    )


def _copied(paths: Sequence[Path], folder: Path) -> int:
    """Copies of the images SPLIT/CLASS/NAME, as a folder of classes."""
    for path in paths:
        target = folder / path.parent.name / f"{path.parent.parent.name}-{path.name}"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return len(paths)


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
