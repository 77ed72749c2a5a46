"""What the nodes of a cluster do: decode, and answer within a limit of memory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from PIL import Image

import engram
from engram import EngramError, MemoryViT
from engram.cluster.pipeline import Model, Plan, decoded, packed, unpacked
from engram.images.preprocessing import Preprocessing
from engram.inference.bulk.answers import Questions
from engram.inference.bulk.decoders import DecodedItem
from engram.inference.bulk.items import Item
from engram.inference.bulk.settings import BulkSettings

PREPROCESSING = Preprocessing((16, 16), None)
PLAN = Plan(actors=1, gpus=0, memory=0, home="/nowhere", roots=(), isolated=False)


def test_relative_paths_start_where_the_command_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(os.getcwd())  # to come back
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "a.png")
    plan = replace(PLAN, home=str(tmp_path))
    row = decoded(packed(7, (Item("a.png"), Item("b.png"))), PREPROCESSING, plan)
    good, bad = unpacked(row)
    assert (row["number"], good.name, good.view.shape) == (7, "a.png", (16, 16, 3))
    assert "b.png: it cannot be read" in bad.error


def test_a_node_that_does_not_see_the_images_says_so() -> None:
    plan = replace(PLAN, roots=("/mnt/photos",))
    with pytest.raises(EngramError, match="has no /mnt/photos"):
        decoded(packed(0, (Item("/mnt/photos/a.png"),)), PREPROCESSING, plan)


def test_an_actor_ends_when_its_memory_has_grown_past_its_limit(
    cluster: Any, small_trunk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that Ray starts it again, and repeats the batch."""

    def ended(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", ended)
    model = MemoryViT(engram.load_trunk(small_trunk)).eval()
    model.add_task("colours", ["red", "green"])
    questions = [ray.put(Questions(model, ["colours"], BulkSettings()))]
    with pytest.raises(EngramError, match="--memory-per-actor has to be more"):
        Model(questions, replace(PLAN, memory=1e6))
    resident = psutil.Process().memory_info().rss
    actor = Model(questions, replace(PLAN, memory=resident + 200e6))
    view = np.zeros((16, 16, 3), np.uint8)
    row = packed(3, [DecodedItem("a.png", view), DecodedItem("b.png", None, "b.png: broken")])
    answered = actor(row)
    assert answered["number"] == 3
    assert [one["error"] for one in unpacked(answered)] == [None, "b.png: broken"]
    leak = b"\x01" * (300 << 20)
    with pytest.raises(SystemExit):
        actor(row)
    del leak
