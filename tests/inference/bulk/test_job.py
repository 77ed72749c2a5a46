"""Answers about many images: the same as those of predict, none twice, none lost."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from tests.support.nursery import Nursery

import engram
from engram import EngramError, MemoryViT
from engram.inference.bulk.job import predict_to
from engram.inference.bulk.settings import BulkSettings


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for i in range(25):
        pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02}.png")
    (folder / "07.png").write_bytes(b"no image")
    return folder


@pytest.fixture
def model(small_trunk: Path) -> MemoryViT:
    torch.manual_seed(0)
    model = MemoryViT(engram.load_trunk(small_trunk)).eval()
    for kind in ("classification", "multilabel", "regression", "segmentation"):
        task = model.add_task(kind, ["one", "two", "three"], kind=kind)
        torch.nn.init.normal_(task.head.weight, std=0.3)
    return model


SETTINGS = BulkSettings(rows=4, batch=3, decoders=0)


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".csv":
        return list(csv.DictReader(path.open(newline="")))
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return rows


@pytest.mark.parametrize("name", ["answers.parquet", "answers.jsonl", "answers.csv", "folder"])
def test_answers_are_those_of_predict(
    model: MemoryViT, photos: Path, tmp_path: Path, name: str
) -> None:
    result = predict_to(model, [str(photos)], tmp_path / name, SETTINGS)
    assert (result.images, result.errors, result.resumed) == (25, 1, 0)
    rows = rows_of(tmp_path / name)
    paths = sorted(str(path) for path in photos.iterdir())
    assert [row["image"] for row in rows] == paths
    for row, expected in zip(rows, engram.predict(model, paths), strict=True):
        if "error" in expected:
            assert row["error"] == expected["error"]
            continue
        assert not row.get("error")
        best = expected["tasks"]["classification"][0]
        if name.endswith(".csv"):
            assert row["classification"] == best["class"]
            assert float(row["classification.probability"]) == pytest.approx(
                best["probability"], abs=1e-5
            )
            continue
        for task in ("classification", "multilabel", "regression"):
            for ours, theirs in zip(row[task], expected["tasks"][task], strict=True):
                assert ours == pytest.approx(theirs, abs=3e-5)
        classes = row["segmentation"]["classes"]
        assert classes[0]["class"] == expected["tasks"]["segmentation"]["classes"][0]["class"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


def test_logits_embeddings_and_masks(model: MemoryViT, photos: Path, tmp_path: Path) -> None:
    settings = BulkSettings(rows=10, decoders=0, logits=True, embed=True)
    out = tmp_path / "a.parquet"
    predict_to(model, [str(photos / "00.png")], out, settings, masks=tmp_path / "masks")
    [row] = rows_of(out)
    preprocessing = model.preprocessing
    view = engram.images.evaluation_view(photos / "00.png", preprocessing)
    pixels = engram.images.normalise(torch.from_numpy(view)[None], preprocessing)
    with torch.inference_mode():
        logits, vectors = model(pixels)["classification"][0], model.embed(pixels)
    assert row["classification.logits"] == pytest.approx(logits.tolist(), abs=1e-2)
    assert row["base.embedding"] == pytest.approx(vectors["base"][0].tolist(), abs=1e-5)
    mask = Path(row["segmentation"]["mask"])
    assert mask.parent == tmp_path / "masks"
    assert Image.open(mask).size == tuple(reversed(row["segmentation"]["size"]))


def test_an_interrupted_job_goes_on_and_computes_nothing_twice(
    model: MemoryViT, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole.parquet", tmp_path / "a.parquet"
    predict_to(model, [str(photos)], whole, SETTINGS)

    def stop(what: str, done: int, total: int, note: str = "") -> None:
        if done == 11:  # in the third part
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(engram.errors.Interrupted, match="8 images are kept"):
        predict_to(model, [str(photos)], out, SETTINGS, progress=stop)
    assert not out.exists()
    seen: list[int] = []
    run = model.forward

    def counted(pixels: torch.Tensor, *more: Any) -> Any:
        seen.append(len(pixels))
        return run(pixels, *more)

    monkeypatch.setattr(model, "forward", counted)
    result = predict_to(model, [str(photos)], out, SETTINGS)
    assert (result.images, result.resumed) == (25, 8)
    assert sum(seen) == 25 - 8
    assert rows_of(out) == rows_of(whole)


def test_another_job_is_not_continued(model: MemoryViT, photos: Path, tmp_path: Path) -> None:
    source, out = Path(shutil.copytree(photos, tmp_path / "photos")), tmp_path / "answers"
    predict_to(model, [str(source)], out, SETTINGS)
    (source / "00.png").rename(source / "99.png")
    with pytest.raises(EngramError, match="added, removed or renamed"):
        predict_to(model, [str(source)], out, SETTINGS)
    with pytest.raises(EngramError, match="top_k"):
        predict_to(model, [str(source)], out, BulkSettings(rows=4, decoders=0, top_k=1))
    assert predict_to(model, [str(source)], out, SETTINGS, overwrite=True).resumed == 0


def test_what_is_there_is_not_replaced_by_itself(
    model: MemoryViT, photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a.jsonl"
    out.write_text("mine\n")
    with pytest.raises(EngramError, match="--overwrite"):
        predict_to(model, [str(photos)], out, SETTINGS)
    assert out.read_text() == "mine\n"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(EngramError, match="not empty"):
        predict_to(model, [str(photos)], tmp_path / "full", SETTINGS, overwrite=True)
    with pytest.raises(EngramError, match=r"\.parquet, \.jsonl or \.csv"):
        predict_to(model, [str(photos)], tmp_path / "a.xlsx", SETTINGS)


def test_kill_9_at_any_time_loses_nothing(
    model: MemoryViT, photos: Path, tmp_path: Path, nursery: Nursery, small_trunk: Path
) -> None:
    task = model.save("classification", tmp_path / "classification.safetensors")
    out = tmp_path / "a.jsonl"
    command = ("predict", task, photos, "--out", out, "--rows", "2", "--batch", "2")
    for parts in (1, 4):
        running = nursery.start(*command)
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("a.jsonl.parts/part-*"))) < parts and running.code is None:
            assert time.monotonic() < deadline, running.stderr
            time.sleep(0.005)
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
    running = nursery.start(*command, "--json").wait()
    assert running.code == 0, running.stderr
    document = json.loads(running.stdout)
    assert document["images"] == 25
    images = [row["image"] for row in rows_of(out)]
    assert images == sorted(str(path) for path in photos.iterdir())
