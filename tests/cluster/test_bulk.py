"""Bulk prediction on a cluster gives the table of one machine, whatever is lost on the way."""

from __future__ import annotations

import os
import shutil
import signal
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
from engram.cluster.bulk import ModelActor, answered_on
from engram.cluster.connect import ClusterSettings
from engram.inference.bulk.answering import ItemBatch, Questions
from engram.inference.bulk.bulk_settings import BulkSettings
from engram.inference.bulk.decoders import Item
from engram.inference.bulk.predict_to import predict_to

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
def model(small_backbone: Path) -> MemoryViT:
    torch.manual_seed(0)
    model = MemoryViT(engram.load_backbone(small_backbone)).eval()
    task = model.add_task("colours", ["red", "green", "blue"])
    torch.nn.init.normal_(task.head.weight, std=0.3)
    return model


def ask(model: MemoryViT) -> Questions:
    return Questions(model, ["colours"], SETTINGS)


class Losses:
    """Told of the progress, kills an actor, and later removes a node."""

    def __init__(self, cluster: Any) -> None:
        self.cluster, self.node = (
            cluster,
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20),
        )
        self.waiting = [(30, self.kill), (60, self.remove)]

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        if self.waiting and done > self.waiting[0][0]:
            self.waiting.pop(0)[1]()

    def kill(self) -> None:
        nodes = self.cluster.list_all_nodes()
        actors = [one for node in nodes for one in processes(node, "ModelActor")]
        os.kill(actors[0].pid, signal.SIGKILL)

    def remove(self) -> None:
        self.cluster.remove_node(self.node, allow_graceful=False)


def test_the_table_is_that_of_one_machine_whatever_is_lost(
    cluster: Any, model: MemoryViT, photos: Path, tmp_path: Path
) -> None:
    """And two parts, which one machine wrote, are not computed again."""
    sources, alone, out = [str(photos)], tmp_path / "alone", tmp_path / "together"
    predict_to(ask(model), sources, alone)
    out.mkdir()
    for name in ("_job.json", "part-000002.parquet", "part-000007.parquet"):
        shutil.copy(alone / name, out / name)
    losses, settings = Losses(cluster), ClusterSettings(actors=2)
    on = answered_on("ray", sources, settings)
    result = predict_to(ask(model), sources, out, answering=on, progress=losses)
    assert (result.images, result.errors, result.resumed) == (IMAGES, 1, 20)
    assert losses.waiting == []
    tables = [pyarrow.parquet.read_table(folder) for folder in (alone, out)]
    assert tables[0].equals(tables[1])


def test_silence_ends_in_a_sentence(cluster: Any, model: MemoryViT) -> None:
    """With no time to answer, it is as if all actors hung."""
    settings = ClusterSettings()
    object.__setattr__(settings, "timeout", 0.0)  # shorter than a user may ask for
    batches = iter([ItemBatch(0, 0, (Item("a.png"),))])
    with pytest.raises(EngramError, match="no answer for 0 seconds"):
        list(answered_on("ray", [], settings)(ask(model), batches))


def test_actors_that_no_node_can_hold_are_refused(cluster: Any, model: MemoryViT) -> None:
    batches = iter([ItemBatch(0, 0, (Item("a.png"),))])
    answering = answered_on("ray", [], ClusterSettings(gpus_per_actor=0.5))
    with pytest.raises(EngramError, match=r"1 CPUs and 0.5 GPUs"):
        list(answering(ask(model), batches))


def test_a_job_that_is_done_needs_no_cluster(
    model: MemoryViT, photos: Path, tmp_path: Path
) -> None:
    sources, out = [str(photos)], tmp_path / "answers"
    predict_to(ask(model), sources, out)
    answering = answered_on("127.0.0.1:1", sources, ClusterSettings())
    assert predict_to(ask(model), sources, out, answering=answering).resumed == IMAGES


def test_relative_paths_start_where_the_command_was_run(
    model: MemoryViT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(os.getcwd())  # to come back
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "a.png")
    actor = ModelActor(ask(model), str(tmp_path), (), False)
    good, bad = actor.rows((Item("a.png"), Item("b.png")))
    assert (good["image"], good["error"]) == ("a.png", None)
    assert "b.png: the file does not exist" in bad["error"]


def test_a_node_that_does_not_see_the_images_says_so(model: MemoryViT) -> None:
    questions = ask(model)
    with pytest.raises(EngramError, match="has no /mnt/photos"):
        ModelActor(questions, "/nowhere", ("/mnt/photos",), False).rows(())
