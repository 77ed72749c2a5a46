"""The sections of a run: each measures one question and returns a JSON document."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from benchmarks.paths import ROOT
from benchmarks.peers import (
    RANK,
    Lora,
    VitPytorch,
    forward_cases,
    installed,
    training_steps,
)
from benchmarks.speed.busy import measure_busy
from benchmarks.speed.command import measure_command, measure_folds
from benchmarks.speed.growth import growth
from benchmarks.speed.plan import Plan, backbone_of
from benchmarks.speed.processes import measure_memory, measure_start
from engram.backbones.shape import BackboneShape
from engram.experiments.bench import (
    PLAIN,
    Measurement,
    Workload,
    cached_limit,
    cached_step,
    forward,
    plain_step,
    steps,
    training,
)
from engram.experiments.timing import Case, Say, compare
from engram.images.preprocessing import Preprocessing
from engram.images.views import evaluation_view
from engram.model import MemoryViT
from engram.train.features.cache import row_bytes

Document = dict[str, Any]
SIDE_STEP = "side, a step from the cache"
ROUTED = ", one for each image"


def measure_forward(plan: Plan, say: Say) -> Document:
    workload = plan.workload(backbone_of(plan.big), 240)
    others = forward_cases(workload, plan.tasks)
    rows = forward(workload, plan.tasks, plan.batches, say, others)
    return {"backbone": plan.big, "cells": workload.cells, "rows": [row.to_dict() for row in rows]}


def measure_training(plan: Plan, say: Say) -> Document:
    """One step at a small batch with its peak memory, and one from the cache at a large batch."""
    workload = plan.workload(backbone_of(plan.big), 130)
    others = training_steps(workload, plan.step_batch)
    rows = [row.to_dict() for row in training(workload, plan.step_batch, say, others)]
    names = [row["what"] for row in rows if row["what"] != PLAIN]
    say("memory of the steps")
    peaks = peaks_of(plan, [name for name in names if not plan.peaks or name in plan.peaks])
    rows = [{**row, "peak": peaks[row["what"]]} if row["what"] in peaks else row for row in rows]
    large = plan.workload(workload.backbone, 90)
    batch = plan.cached_batch
    cases = {
        PLAIN: Case(plain_step(large, batch)),
        "engram, from the cache": Case(cached_step(large, batch), runs=4, of=1),  # as in training
    }
    say(f"from the cache, batch {batch}")
    found = large.compare(cases, say)
    limits = {"engram, from the cache": cached_limit(large)}
    rows += [
        Measurement(name, 1, batch, timing, limits.get(name)).to_dict()
        for name, timing in found.items()
    ]
    return {"backbone": plan.big, "cells": workload.cells, "rows": rows}


def peaks_of(plan: Plan, names: list[str]) -> dict[str, int]:
    """Bytes by which a separate process grows during each of these steps.

    The C library is set to return large blocks at once. By default it keeps some of the freed
    memory, which differs from run to run and hides what the step itself needs.
    """
    command = [sys.executable, "-m", "benchmarks.speed.peak_memory", plan.name, *names]
    settings = {"MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, cwd=ROOT, env=os.environ | settings
    )
    return dict(zip(names, map(int, done.stdout.split()), strict=True))


def measure_sweep(plan: Plan, say: Say) -> Document:
    """Many variants in one pass, compared with one run after the other."""
    rows = []
    for name, seconds in ((plan.small, 45), (plan.big, 90)):
        workload = plan.workload(backbone_of(name), seconds)
        batch, variants = plan.sweep_batch, plan.variants
        few = max(
            batch // 4, 1
        )  # batch of the steps that run the backbone; their time is multiplied
        ways = {**steps(workload, few), **training_steps(workload, few)}
        all_steps, some = variants * batch // few, min(4, variants)
        cases = {
            PLAIN: Case(plain_step(workload, batch)),
            "engram, one pass": Case(cached_step(workload, batch, variants)),
            "engram, run by run from the cache": Case(cached_step(workload, batch), some, variants),
            "engram, run by run with the backbone": Case(ways["engram"](), 1, all_steps),
        }
        if "PEFT LoRA" in ways:
            cases["PEFT LoRA, run by run"] = Case(ways["PEFT LoRA"](), 1, all_steps)
        say(f"{variants} variants on {name}, batch {batch}")
        for what, timing in workload.compare(cases, say).items():
            case = cases[what]
            note = f"{case.runs} of {case.of} steps" if case.scale != 1 else ""
            limit = cached_limit(workload, variants) if what == "engram, one pass" else None
            row = Measurement(what, variants, batch, timing, limit, note)
            rows.append({"backbone": name, **row.to_dict()})
    return {"rows": rows}


def measure_side(plan: Plan, say: Say) -> Document:
    """Side network and readouts: many tasks in a pass, and training from the cache."""
    big, small = backbone_of(plan.big), backbone_of(plan.small)
    regimes = {"side": plan.side_tasks, "readout": plan.readouts}
    workload = plan.workload(big, 180)
    rows = [
        {"backbone": plan.big, **row.to_dict()}
        for row in _many(workload, regimes, plan.side_batch, say)
    ]
    workload = plan.workload(big, 90)
    rows += _cached_side(workload, plan.big, plan.cached_batch, 1, say)
    workload = plan.workload(small, 60)
    rows += _cached_side(workload, plan.small, plan.sweep_batch, plan.variants, say)
    return {"rows": rows}


def _many(
    workload: Workload, regimes: Mapping[str, Sequence[int]], batch: int, say: Say
) -> list[Measurement]:
    """One pass for many tasks, by regime and number of tasks."""
    pixels = workload.pixels(batch)
    cases = {(PLAIN, 0): Case(plain_step(workload, batch))}
    for regime, counts in regimes.items():
        for count in counts:
            cases[regime, count] = Case(partial(workload.model(count, regime), pixels))
    say(f"forward, {' and '.join(regimes)}, batch {batch}")
    with torch.inference_mode():
        found = workload.compare(cases, say)
    limits = {regime: workload.task_costs(regime).share for regime in regimes}
    return [
        Measurement(what, count, batch, timing, 1 + count * limits.get(what, 0))
        for (what, count), timing in found.items()
    ]


def measure_route(plan: Plan, say: Say) -> Document:
    """Another task for each image of a batch, beside all tasks for all images.

    Every pass has another route, as in a service, so nothing that is kept for a selection helps.
    """
    workload = plan.workload(backbone_of(plan.big), 180)
    batch, count = plan.side_batch, plan.routed
    pixels, draw = workload.pixels(batch), random.Random(0)
    names = [f"task{i}" for i in range(count)]

    def routed(model: MemoryViT) -> Callable[[], object]:
        for i in range(0, count, batch):  # what each task keeps
            own = names[i : i + batch]
            model(pixels[: len(own)], route=own)
        return lambda: model(pixels, route=draw.sample(names, min(batch, count)))

    cases = {(PLAIN, 0): Case(plain_step(workload, batch))}
    with torch.inference_mode():
        for regime in ("masked", "masked+adapter", "side"):
            model = workload.model(count, regime)
            cases[f"{regime}{ROUTED}", count] = Case(routed(model))
            if regime != "masked+adapter":
                cases[f"{regime}, all for every image", count] = Case(partial(model, pixels))
        say(f"a task per image, {count} tasks, batch {batch}")
        found = workload.compare(cases, say)
    rows = []
    for (what, tasks), timing in found.items():
        share = 0.0 if what == PLAIN else workload.task_costs(what.split(",")[0]).share
        limit = 1 + share * (1 if what.endswith(ROUTED) else tasks)
        row = Measurement(what, tasks, batch, timing, limit)
        rows.append({"backbone": plan.big, **row.to_dict()})
    return {"backbone": plan.big, "rows": rows}


def _cached_side(
    workload: Workload, backbone: str, batch: int, variants: int, say: Say
) -> list[Document]:
    """A step of some variants from the cache; steps are measured four in a row, as in training."""
    step = cached_step(workload, batch, variants, "side")
    cases = {PLAIN: Case(plain_step(workload, batch)), SIDE_STEP: Case(step, runs=4, of=1)}
    say(f"side networks from the cache on {backbone}, batch {batch}")
    limits = {PLAIN: 1.0, SIDE_STEP: _side_limit(workload, variants)}
    return [
        {"backbone": backbone, **Measurement(what, variants, batch, timing, limits[what]).to_dict()}
        for what, timing in workload.compare(cases, say).items()
    ]


def _side_limit(workload: Workload, variants: int) -> float:
    """The ratio of multiply-accumulates of a step of side networks from the cache.

    Gradients for the rows and for the maps, but none for the backbone's tokens.
    """
    costs, shape = workload.task_costs("side"), BackboneShape.measure(workload.backbone)
    rank: int = workload.model(1, "side").task("task0").method.settings()["rank"]
    taken_in = (shape.depth + 1) * workload.tokens * shape.width * rank
    step = variants * (3 * costs.macs - taken_in)
    return (step + 2 * variants * costs.head_macs) / costs.backbone_macs


def measure_storage(plan: Plan, say: Say) -> Document:
    """The size of one task's file, as each library writes it."""
    workload = Workload(backbone_of(plan.big))
    found: dict[str, Path] = {}
    say("files")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        found["engram"] = workload.model(1).save("task0", folder / "engram.safetensors")
        adapted = workload.model(1, "masked+adapter")
        found["engram, masked+adapter"] = adapted.save("task0", folder / "adapted.safetensors")
        there = installed(workload.backbone)
        if "vit-pytorch" in there:
            theirs = VitPytorch(workload.backbone, 1, workload.classes, workload.cells).tensors()
            found["vit-pytorch, an Adapter without its ViT"] = folder / "vit.safetensors"
            save_file(theirs, folder / "vit.safetensors")
        if "lora" in there:
            lora = Lora(workload.backbone, 1, workload.classes)
            found[f"PEFT LoRA, rank {RANK}"] = lora.save(folder / "lora")
        whole = {name: p.detach().contiguous() for name, p in workload.backbone.named_parameters()}
        found["separate model"] = folder / "full.safetensors"
        save_file(whole, folder / "full.safetensors")
        rows = [{"what": what, "bytes": path.stat().st_size} for what, path in found.items()]
    return {
        "backbone": plan.big,
        "cells": workload.cells,
        "classes": workload.classes,
        "cache_row": row_bytes(
            workload.backbone, Preprocessing(workload.backbone.config.image_size, None)
        ),
        "rows": rows,
    }


def measure_decoding(plan: Plan, say: Say) -> Document:
    """Decoding a JPEG of 500 x 375 pixels to the backbone's input, on one core."""
    say("decoding")
    noise = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    picture = Image.fromarray(noise).resize((500, 375), Image.Resampling.BICUBIC)
    grain = np.random.default_rng(1).normal(0, 8, (375, 500, 3))
    pixels = np.clip(np.asarray(picture) + grain, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    content, preprocessing = file.getvalue(), Preprocessing()
    case = Case(lambda: evaluation_view(io.BytesIO(content), preprocessing), runs=50)
    timing = compare({"decode": case}, seconds=5 / plan.haste, least=plan.least)["decode"]
    return {"seconds": timing.seconds / 50, "rounds": timing.rounds, "bytes": len(content)}


SECTIONS: dict[str, Callable[[Plan, Say], Document]] = {
    "forward": measure_forward,
    "training": measure_training,
    "sweep": measure_sweep,
    "side": measure_side,
    "route": measure_route,
    "storage": measure_storage,
    "growth": growth,
    "decoding": measure_decoding,
    "command": measure_command,
    "folds": measure_folds,
    "busy": measure_busy,
    "memory": measure_memory,
    "start": measure_start,
}
