"""Bulk prediction on a cluster of three nodes: speed with 1 and 2 actors, and with losses.

    python -m benchmarks.cluster.bulk [alone] [one] [two] [losses] [--images 5000]

The same table is made four times: by one process, on the cluster with one actor, with two, and
with two while an actor is killed and a node is removed. All have to be equal, with every image
once. The nodes are processes of this machine and share its cores. Each run takes a few
minutes and can be measured by itself; the page is written when all have been. It writes
benchmarks/results/cluster_bulk.md; the exit code is 1 if a table differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from PIL import Image

import engram
from benchmarks.cluster.nodes import processes, three_nodes
from benchmarks.paths import BUILD
from benchmarks.report import markdown_table, write_report
from engram.cluster.bulk import answered_on
from engram.cluster.connect import ClusterSettings
from engram.inference.bulk.answering import Answering, Questions, answered_here
from engram.inference.bulk.bulk_settings import BulkSettings
from engram.inference.bulk.predict_to import predict_to
from engram.model import MemoryViT

FOLDER = BUILD / "cluster" / "bulk"
SETTINGS = BulkSettings(rows=100, batch=10, decoders=1, logits=True)
TITLES = {
    "alone": "one process, one more to decode",
    "one": "cluster, 1 actor",
    "two": "cluster, 2 actors",
    "losses": "cluster, 2 actors, with losses",
}
ACTOR = "ModelActor"  # in the title of the processes that hold the model
BROKEN = 5  # images that cannot be read


@dataclass
class Run:
    """One run: when it began, when images were answered, and what was done to it."""

    images: int
    seconds: float = 0.0
    equal: bool = True
    times: list[tuple[float, int]] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)

    @property
    def start(self) -> float:
        """Seconds until the first answer."""
        return self.times[0][0]

    @property
    def rate(self) -> float:
        """Images a second, from the first answer to the last."""
        (first, before), (last, after) = self.times[0], self.times[-1]
        return (after - before) / max(last - first, 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster.bulk", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("runs", nargs="*", choices=[*TITLES, []], help="default: all")
    parser.add_argument("--images", type=int, default=5000)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the nodes end, too
    photos, model = make_photos(given.images), make_model()
    for name in given.runs or TITLES:
        run = measure(name, model, photos, given.images)
        (FOLDER / f"{name}.json").write_text(json.dumps(asdict(run)))
        print(f"{TITLES[name]}: {run.seconds:.0f} s, equal: {run.equal}", *run.losses, sep="\n  ")
        if not run.equal:
            sys.exit(f"The table of {name} is not that of one process.")
    found = {name: FOLDER / f"{name}.json" for name in TITLES}
    if all(path.exists() for path in found.values()):
        write_page({name: Run(**json.loads(path.read_text())) for name, path in found.items()})


def make_photos(images: int) -> Path:
    """So many JPEG files, of which a few are broken."""
    folder, rng = FOLDER / f"photos-{images}", np.random.default_rng(0)
    if not folder.exists():
        making = folder.with_suffix(".new")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        for i in range(images):
            coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
            coarse.resize((256, 192)).save(making / f"{i:06}.jpg")
        for i in range(0, images, max(1, images // BROKEN)):
            (making / f"{i:06}.jpg").write_bytes(b"broken")
        making.rename(folder)
    return folder


def make_model() -> MemoryViT:
    """A small ViT with a task of random weights: work for minutes, and the same each time."""
    torch.manual_seed(0)
    backbone = engram.random_backbone(
        image_size=64, patch=8, width=192, depth=6, heads=3, classes=10
    )
    model = MemoryViT(backbone).eval()
    task = model.add_task("colours", ["red", "green", "blue"], cells=5)
    torch.nn.init.normal_(task.head.weight, std=0.3)
    return model


def measure(name: str, model: MemoryViT, photos: Path, images: int) -> Run:
    """Make the table in one way; it is compared with that of one process, if that is there."""
    run, out = Run(images), FOLDER / name
    shutil.rmtree(out, ignore_errors=True)
    torch.set_num_threads(1)
    if name == "alone":
        answer(run, model, photos, out, answered_here)
    else:
        settings = ClusterSettings(actors=1 if name == "one" else 2)
        with three_nodes() as cluster:
            on = answered_on(cluster.address, [str(photos)], settings)
            trouble = Losses(cluster, run) if name == "losses" else None
            answer(run, model, photos, out, on, trouble)
    expected = pyarrow.parquet.read_table(FOLDER / "alone")
    found = pyarrow.parquet.read_table(out)
    listed = found.column("image").to_pylist()
    once = listed == sorted(map(str, photos.iterdir())) and len(listed) == images
    run.equal = once and found.equals(expected)
    return run


def answer(
    run: Run,
    model: MemoryViT,
    photos: Path,
    out: Path,
    answering: Answering,
    trouble: Callable[[int], object] | None = None,
) -> None:
    began = time.perf_counter()

    def progress(what: str, done: int, total: int, note: str = "") -> None:
        if done:
            run.times.append((time.perf_counter() - began, done))
            if trouble is not None:
                trouble(done)

    questions = Questions(model, list(model.tasks), SETTINGS)
    predict_to(questions, [str(photos)], out, answering=answering, progress=progress)
    run.seconds = time.perf_counter() - began


class Losses:
    """Kills an actor and removes a node with one, each at its time."""

    def __init__(self, cluster: Any, run: Run) -> None:
        self.cluster, self.run = cluster, run
        steps = (self.kill, self.remove)
        self.waiting = [(run.images * (i + 1) // 3, step) for i, step in enumerate(steps)]

    def __call__(self, done: int) -> None:
        if self.waiting and done >= self.waiting[0][0]:
            what = self.waiting[0][1]()
            if what:
                self.run.losses.append(f"after {done:,} images {what}")
                del self.waiting[0]

    def _holders(self) -> list[tuple[Any, Any]]:
        """Nodes and the processes on them that hold the model; those of the head last."""
        head = self.cluster.head_node
        nodes = sorted(self.cluster.list_all_nodes(), key=lambda node: node is head)
        return [(node, one) for node in nodes for one in processes(node, ACTOR)]

    def kill(self) -> str:
        for _, process in self._holders():
            os.kill(process.pid, signal.SIGKILL)
            return "an actor was killed"
        return ""

    def remove(self) -> str:
        for node, _ in self._holders():
            if node is not self.cluster.head_node:
                self.cluster.remove_node(node, allow_graceful=False)
                return "a node with an actor was removed"
        return ""


def write_page(runs: dict[str, Run]) -> None:
    alone, one = runs["alone"], runs["one"]
    rows = [
        [
            TITLES[name],
            f"{run.start:.0f} s",
            f"{run.seconds:.0f} s",
            f"{run.rate:.1f}",
            f"{run.rate / alone.rate:.2f}",
            f"{run.rate / one.rate:.2f}",
            "yes" if run.equal else "no",
        ]
        for name, run in runs.items()
    ]
    head = (
        f"{alone.images:,} images", "first answer", "whole job", "images a second after it",
        "to one process", "to 1 actor", "same table",
    )  # fmt: skip
    write_report("cluster_bulk", "Bulk prediction on a cluster", [
        "A head and two nodes of one CPU each, all on this machine; one thread for each process. "
        f"A ViT of 6 layers and width 192 at 64 pixels, {BROKEN} images that cannot be read.",
        "", *markdown_table(head, rows), "",
        f"With losses: {'; '.join(runs['losses'].losses)}.",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
