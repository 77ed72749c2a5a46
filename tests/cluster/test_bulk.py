"""Bulk prediction on a cluster gives the table of one machine, whatever is lost on the way."""

from __future__ import annotations

import os
import shutil
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image

import engram
from benchmarks.cluster.nodes import processes
from engram import EngramError, MemoryViT
from engram.cluster.bulk import actors_for, answered_on
from engram.cluster.connect import connected
from engram.cluster.settings import ClusterSettings
from engram.inference.bulk.answers import Batch, Questions
from engram.inference.bulk.items import Item
from engram.inference.bulk.job import predict_to
from engram.inference.bulk.settings import BulkSettings

SETTINGS = BulkSettings(rows=10, batch=4, decoders=0, logits=True)
IMAGES = 120


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder, rng = tmp_path / "photos", np.random.default_rng(0)
    folder.mkdir()
    for i in range(IMAGES):
        pixels = rng.integers(0, 256, (12, 10, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:03}.png")
    (folder / "017.png").write_bytes(b"no image")
    return folder


@pytest.fixture
def model(small_trunk: Path) -> MemoryViT:
    torch.manual_seed(0)
    model = MemoryViT(engram.load_trunk(small_trunk)).eval()
    task = model.add_task("colours", ["red", "green", "blue"])
    torch.nn.init.normal_(task.head.weight, std=0.3)
    return model


def test_the_table_is_that_of_one_machine_though_an_actor_is_killed(
    cluster: Any, model: MemoryViT, photos: Path, tmp_path: Path
) -> None:
    """And two parts, which one machine wrote, are not computed again."""
    sources, alone, out = [str(photos)], tmp_path / "alone", tmp_path / "together"
    predict_to(model, sources, alone, SETTINGS)
    out.mkdir()
    for name in ("_job.json", "part-000002.parquet", "part-000007.parquet"):
        shutil.copy(alone / name, out / name)
    killed: list[int] = []

    def kill_one(what: str, done: int, total: int, note: str = "") -> None:
        if done > 40 and not killed:
            actors = (processes(node, "Map(Model)") for node in cluster.list_all_nodes())
            killed.append(next(chain.from_iterable(actors)).pid)
            os.kill(killed[0], signal.SIGKILL)

    result = predict_to(
        model, sources, out, SETTINGS,
        answering=answered_on("ray", sources, ClusterSettings(actors=1)), progress=kill_one,
    )  # fmt: skip
    assert (result.images, result.errors, result.resumed) == (IMAGES, 1, 20)
    assert killed
    tables = [pyarrow.parquet.read_table(folder) for folder in (alone, out)]
    assert tables[0].equals(tables[1])


def test_silence_ends_in_a_sentence(cluster: Any, model: MemoryViT) -> None:
    """Actors need more than a second to start, so it is as if they hung."""
    settings = ClusterSettings(timeout=1, retries=0)
    batches = iter([Batch(0, 0, 0, (Item("a.png"),), True)])
    answering = answered_on("ray", [], settings)
    with pytest.raises(EngramError, match="gave no answer in 1 attempt; at last: no answer for"):
        list(answering(Questions(model, ["colours"], BulkSettings()), batches))


def test_actors_that_leave_no_cpu_are_refused(cluster: Any) -> None:
    with connected("ray") as ray:
        assert actors_for(ray, ClusterSettings()) == 1  # of 2 CPUs
        with pytest.raises(EngramError, match="--actors 2 need 1 CPU each, and one more CPU"):
            actors_for(ray, ClusterSettings(actors=2))
        with pytest.raises(EngramError, match="0 GPUs, and can hold 0 actors"):
            actors_for(ray, ClusterSettings(gpus_per_actor=0.5))


def test_a_job_that_is_done_needs_no_cluster(
    model: MemoryViT, photos: Path, tmp_path: Path
) -> None:
    sources, out = [str(photos)], tmp_path / "answers"
    predict_to(model, sources, out, SETTINGS)
    answering = answered_on("127.0.0.1:1", sources, ClusterSettings())
    assert predict_to(model, sources, out, SETTINGS, answering=answering).resumed == IMAGES
