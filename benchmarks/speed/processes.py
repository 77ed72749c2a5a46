"""Whole processes: how long they take to start, and how much memory commands need."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.paths import BACKBONE
from benchmarks.serve.malformed import BOUNDARY, form
from benchmarks.serve.soak import Client, Service
from benchmarks.speed.command import copied_photographs, drawn_images
from benchmarks.speed.plan import Plan
from engram.backbones.load import load_backbone
from engram.experiments.timing import Case, Say, compare
from engram.model import MemoryViT
from engram.store.compose import compose

_EVERY = 0.1  # seconds between samples
_FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY.decode()}"}


def measure_start(plan: Plan, say: Say) -> dict[str, Any]:
    """Processes that start and end, in turns; the first is what the others are compared with."""
    code = {
        "`import torch`": ("-c", "import torch"),
        "`engram --help`": ("-m", "engram", "--help"),
        '`engram.load_backbone("pico")`': ("-c", "import engram; engram.load_backbone('pico')"),
    }
    cases = {what: Case(partial(_run, arguments)) for what, arguments in code.items()}
    found = compare(cases, seconds=0, least=plan.rounds(plan.starts), say=say)
    rows = [
        {"what": what, "seconds": t.seconds, "ratio": t.ratio, "low": t.low, "high": t.high}
        for what, t in found.items()
    ]
    return {"rows": rows}


def _run(arguments: Sequence[str]) -> None:
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)


def measure_memory(plan: Plan, say: Say) -> dict[str, Any]:
    """The peak of `fit`, and of `predict --out` and `serve` with many tasks."""
    backbone = str(BACKBONE) if plan.real and BACKBONE.exists() else "pico"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        photographs = folder / "photographs"
        make = copied_photographs if backbone != "pico" else drawn_images
        images = make(photographs, plan.memory_images)
        bundle = _bundle(folder, backbone, plan.memory_tasks)
        predict = ("predict", bundle, photographs, "--out", folder / "answers.parquet")
        out = folder / "t.safetensors"
        fit = ("fit", photographs, "--task", "t", "--backbone", backbone, "-o", out)
        rows = []
        for what, arguments in (("engram fit", fit), ("engram predict --out", predict)):
            say(what)
            command = [sys.executable, "-m", "engram", *map(str, arguments), "--json"]
            env = {**os.environ, "ENGRAM_CACHE": str(folder / "cache")}
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env)
            with peak_memory(process.pid) as peak:
                code = process.wait()
            assert code == 0, what
            rows.append({"what": what, **peak()})
        say("engram serve")
        service = Service(bundle, folder)
        with peak_memory(service.process.pid) as peak:
            _ask(service.url, next(photographs.glob("*/*")).read_bytes())
        service.stop()
        rows.append({"what": "engram serve", **peak()})
    return {"backbone": Path(backbone).parent.name or backbone, "tasks": plan.memory_tasks,
            "images": images, "rows": rows}  # fmt: skip


def _bundle(folder: Path, backbone: str, tasks: int) -> Path:
    (folder / "engrams").mkdir()
    model = MemoryViT(load_backbone(backbone))
    for i in range(tasks):
        model.add_task(f"task{i}", 10)
        model.save(f"task{i}", folder / "engrams" / f"task{i}.safetensors")
    return compose(sorted((folder / "engrams").glob("*.safetensors")), folder / "bundle").folder


def _ask(url: str, picture: bytes) -> None:
    """Batches of 16 images from four clients, twice each."""
    body = form(*(("image", picture, True) for _ in range(16)))

    def ask() -> None:
        for _ in range(2):
            status, answer = Client(url).send("POST", "/v1/predict", body, **_FORM)
            assert status == 200, answer

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()


@contextmanager
def peak_memory(pid: int) -> Iterator[Callable[[], dict[str, int]]]:
    """Sample the memory of a process and of all that it started, while the block runs."""
    most, done = {"peak": 0, "own": 0}, threading.Event()

    def sample() -> None:
        while not done.wait(_EVERY):
            with suppress(psutil.Error):
                first = psutil.Process(pid)
                own = first.memory_full_info().pss
                total = own
                for child in first.children(recursive=True):
                    with suppress(psutil.Error):
                        total += child.memory_full_info().pss
                most["own"], most["peak"] = max(most["own"], own), max(most["peak"], total)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield lambda: dict(most)
    finally:
        done.set()
        thread.join()
