"""The same work alone, and beside one and two busy threads of other programs.

Every round measures every row under every load, so that all of them see the same machine. The busy
threads are processes that count; nothing else may run meanwhile.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import engram
from benchmarks.serve.malformed import BOUNDARY, form
from benchmarks.serve.soak import Client, Service, make_world
from benchmarks.speed.plan import Plan, backbone_of
from engram.experiments.bench import PLAIN, Workload, make_step, plain_step
from engram.experiments.timing import Say, quartiles
from engram.images.preprocessing import Preprocessing
from engram.methods.method import Cached
from engram.model import MemoryViT
from engram.train.recipe import Recipe

LOADS = (0, 1, 2)  # busy threads
STEP, SOLVING, SERVICE = "a step of auto from the cache", "solving heads", "serve, an answer"
#: The tasks that `engram fit --regime auto` trains together.
_PORTFOLIO = ("masked", "masked", "masked+adapter", "side", "side")
_CLIENTS = 8
_FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY.decode()}"}

Row = Callable[[], float]  # measures once: seconds


def measure_busy(plan: Plan, say: Say) -> dict[str, Any]:
    with ExitStack() as stack:
        rows = _rows(plan, stack)
        for row in rows.values():
            row()  # warm up
        found: dict[str, dict[int, list[float]]] = {
            name: {load: [] for load in LOADS} for name in rows
        }
        rounds = plan.rounds(plan.busy_rounds)
        for number in range(1, rounds + 1):
            for load in LOADS:
                with busy_threads(load):
                    for name, row in rows.items():
                        found[name][load].append(row())
                        words = f"round {number} of {rounds}, {load} busy threads, {name}"
                        say(f"{words}: {1e3 * found[name][load][-1]:.1f} ms")
    return {
        "backbone": plan.big,
        "rows": [_summary(name, times) for name, times in found.items()],
        "plain": _ratios_to_plain(found),
        "rounds": rounds,
    }


@contextmanager
def busy_threads(count: int) -> Iterator[None]:
    """Processes that use a core each, as far as they get one."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        time.sleep(0.2 if count else 0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _summary(name: str, times: dict[int, list[float]]) -> dict[str, Any]:
    """The time alone, and how many times that it takes under each load, within a round."""
    loads = []
    for load in LOADS:
        ratios = [one / alone for one, alone in zip(times[load], times[0], strict=True)]
        low, middle, high = quartiles(ratios)
        loads.append({"busy": load, "ratio": middle, "low": low, "high": high})
    return {"what": name, "seconds": statistics.median(times[0]), "loads": loads}


def _ratios_to_plain(found: dict[str, dict[int, list[float]]]) -> dict[str, list[float]]:
    """The passes of many tasks relative to the plain pass under the same load, in its order."""
    plain = found[PLAIN]
    return {
        name: [
            statistics.median(
                one / base for one, base in zip(times[load], plain[load], strict=True)
            )
            for load in LOADS
        ]
        for name, times in found.items()
        if name.endswith("tasks")
    }


def _rows(plan: Plan, stack: ExitStack) -> dict[str, Row]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    stack.enter_context(patch.dict(os.environ, ENGRAM_CACHE=str(folder / "cache")))
    workload = Workload(backbone_of(plan.big))
    pixels, count = workload.pixels(plan.step_batch), plan.routed
    runs = plan.busy_runs
    return {
        STEP: partial(_timed, auto_step(workload, plan.sweep_batch), runs),
        SOLVING: partial(_timed, solving(plan.small, folder, plan.busy_images), 1),
        PLAIN: partial(_timed, plain_step(workload, plan.step_batch), runs),
        **{
            f"{count} {regime} tasks": partial(
                _timed, partial(_answer, workload.model(count, regime), pixels), runs
            )
            for regime in ("side", "masked")
        },
        SERVICE: stack.enter_context(_service(folder, plan.busy_seconds)),
    }


def _timed(run: Callable[[], object], runs: int) -> float:
    began = time.perf_counter()
    for _ in range(runs):
        run()
    return (time.perf_counter() - began) / runs


def _answer(model: MemoryViT, pixels: Tensor) -> None:
    with torch.inference_mode():
        model(pixels)


def auto_step(workload: Workload, batch: int) -> Callable[[], None]:
    """A step of all tasks that `auto` trains at once, from rows in half precision."""
    backbone, tokens = workload.backbone, workload.tokens
    model = MemoryViT(backbone)
    for i, regime in enumerate(_PORTFOLIO):
        model.add_task(f"task{i}", workload.classes, regime=regime)
    depth = backbone.config.depth
    rows = torch.randn(batch, (depth + 1) * tokens + 1, backbone.config.width).half()

    def logits() -> Iterable[Tensor]:
        seen = [rows[:, i : i + tokens].float() for i in range(0, rows.shape[1] - 1, tokens)]
        cached = Cached(rows[:, -1].float(), seen[:depth], seen[-1])
        return model.from_cache(cached, list(model.tasks)).outputs().values()

    return make_step(logits, [t.parameters() for t in model.tasks.values()], workload.labels(batch))


def solving(shape: str, folder: Path, images: int) -> Callable[[], object]:
    """Solve the heads of a readout from a cache that is filled, which the first call does."""
    backbone = backbone_of(shape)
    size = backbone.config.image_size
    backbone.preprocessing = Preprocessing(size, None)
    rng, data = np.random.default_rng(0), folder / "images.npz"
    pictures = rng.integers(0, 256, (images, *size, 3), dtype=np.uint8)
    np.savez(data, x_train=pictures, y_train=np.arange(images) % 10)
    recipe = Recipe(workers=0, cache="on", calibrate="off", statistics="off")

    def solve() -> None:
        model = MemoryViT(backbone)
        model.add_task("task", 10, regime="readout")
        engram.fit(model, "task", data, recipe)

    return solve


@contextmanager
def _service(folder: Path, seconds: float) -> Iterator[Row]:
    """`engram serve` on pico, and eight clients that ask it at once; the time of an answer."""
    world = make_world(folder)
    service = Service(world.bundle, folder)
    body = form(("image", world.images[1], True))

    def ask(until: float, answers: list[int]) -> None:
        client = Client(service.url)
        while time.monotonic() < until:
            status, answer = client.send("POST", "/v1/predict", body, **_FORM)
            assert status == 200, answer
            answers.append(status)

    def measure() -> float:
        answers: list[int] = []
        began = time.monotonic()
        threads = [
            threading.Thread(target=ask, args=(began + seconds, answers)) for _ in range(_CLIENTS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (time.monotonic() - began) / max(1, len(answers))

    try:
        yield measure
    finally:
        service.stop()
