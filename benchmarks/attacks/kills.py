"""SIGKILL of `fit` and `sweep` over all kinds of feed; each is resumed to the same weights."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import engram
from benchmarks.attacks.headers import make_backbone
from benchmarks.attacks.record import Record

ROUNDS = 5  # kills of one configuration before it may finish
STEPS = ("--steps", "24", "--batch", "8", "--checkpoint-seconds", "0")
GRID = ("--lr", "0.01,0.03", "--cells", "1,2")
MASKED = ("--regime", "masked")
#: Every kind of feed: cached or decoded anew, augmented, several views, with and without workers.
CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "fit, cache": ("fit", *MASKED, "--cache", "on", "--workers", "0"),
    "fit, auto, workers": ("fit", "--regime", "auto", "--cache", "on", "--workers", "2"),
    "fit, no cache": ("fit", *MASKED, "--cache", "off", "--workers", "0", "--augment", "none"),
    "fit, augmented, workers": (
        *("fit", *MASKED, "--augment", "pad-crop", "--workers", "2", "--ema", "0.9"),
    ),
    "fit, several views": ("fit", *MASKED, "--augment", "inception", "--views", "3"),
    "sweep, cache": ("sweep", *GRID, "--cache", "on", "--workers", "0"),
    "sweep, augmented, workers": ("sweep", *GRID, "--augment", "pad-crop", "--workers", "2"),
    "sweep, one by one": ("sweep", "--regime", "head", "--lr", "0.01,0.03", "--workers", "2"),
}


def make_photographs(folder: Path) -> Path:
    """Three classes of 16 images that differ in colour."""
    rng = np.random.default_rng(0)
    for i, name in enumerate(("red", "green", "blue")):
        (folder / name).mkdir(parents=True)
        for j in range(16):
            pixels = rng.integers(0, 120, (20, 20, 3), dtype=np.uint8)
            pixels[..., i] += 120
            Image.fromarray(pixels).save(folder / name / f"{j}.png")
    return folder


# Processes


def start_command(arguments: Sequence[str], log: str, cache: str) -> None:
    """In a forked process: run `engram` with these arguments."""
    from engram.cli.main import main

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ["ENGRAM_CACHE"] = cache
    multiprocessing.set_start_method("fork", force=True)  # as in a process of the command line
    os._exit(main(list(arguments)))


def children_of(pid: int) -> set[int]:
    """All processes below this one."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = {int(child) for child in task.read_text().split()}
        except OSError:
            continue
        found |= children.union(*(children_of(child) for child in children))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def orphans_after(workers: set[int], seconds: float = 10) -> set[int]:
    """The workers that still live after this time."""
    deadline = time.monotonic() + seconds
    while (left := {pid for pid in workers if is_alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@dataclass
class Bench:
    """Where runs are started: a process that has loaded everything forks one for each command."""

    folder: Path
    context: Any

    def start(self, out: Path, flags: Sequence[str], *more: str) -> Any:
        command, *rest = flags
        arguments = [
            command, str(self.folder / "photographs"), "--task", "colours",
            "--backbone", str(self.folder / "backbone"), "-o", str(out), *STEPS, *rest, *more,
        ]  # fmt: skip
        log, cache = str(self.folder / "log"), str(self.folder / f"cache-{out.stem}")
        process = self.context.Process(target=start_command, args=(arguments, log, cache))
        process.start()
        return process

    def last_words(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-300:]


def kill_after(process: Any, seconds: float) -> tuple[bool, set[int]]:
    """SIGKILL a run after a while: whether it was still running, and workers that outlive it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.exitcode is None:
        time.sleep(0.005)
    workers = children_of(process.pid) if process.exitcode is None else set()
    process.kill()
    process.join()
    return process.exitcode == -9, orphans_after(workers)


def attack(
    bench: Bench, name: str, flags: Sequence[str], kills: int, rng: random.Random, record: Record
) -> None:
    """Kill one configuration at random moments, resume it, and compare it with a whole run."""
    whole, killed = (bench.folder / f"{kind}.safetensors" for kind in ("whole", "killed"))
    began = time.monotonic()
    process = bench.start(whole, flags)
    process.join()
    if process.exitcode != 0:
        record.add(name, f"it does not run: {bench.last_words()}")
        return
    seconds = time.monotonic() - began
    problems: list[str | None] = []
    while len(problems) < kills:
        process = bench.start(killed, flags, "--resume")
        hit, orphans = kill_after(process, rng.uniform(0.05, 0.9) * seconds / (1 + len(problems)))
        if hit:
            problems.append(f"the workers {orphans} outlive it" if orphans else None)
    process = bench.start(killed, flags, "--resume")
    process.join()
    if process.exitcode != 0:
        problems[-1] = f"it does not resume: {bench.last_words()}"
    elif engram.inspect(killed).content != engram.inspect(whole).content:
        problems[-1] = "the resumed run has other weights"
    for problem in problems:
        record.add(name, problem)


def clear(folder: Path) -> None:
    """Remove what the runs of a configuration wrote."""
    for path in (*folder.glob("whole*"), *folder.glob("killed*"), *folder.glob("cache-*")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def run(count: int) -> Record:
    record, rng = Record(), random.Random(4)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engram.cli.main", "torch", "engram.report.run_page"])
    names = list(CONFIGURATIONS)[: max(1, -(-count // ROUNDS))]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), context)
        make_photographs(bench.folder / "photographs")
        engram.save_backbone(make_backbone(), bench.folder / "backbone")
        for i, name in enumerate(names):
            kills = count // len(names) + (i < count % len(names))
            attack(bench, name, CONFIGURATIONS[name], kills, rng, record)
            clear(bench.folder)
    return record
