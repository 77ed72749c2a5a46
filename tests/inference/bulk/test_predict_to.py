"""Answers about many images: the same as those of predict, none twice, none lost."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import shutil
import signal
import tarfile
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from tests.support.nursery import Nursery
from tests.support.runs import written

import engram
from engram import EngramError, MemoryViT
from engram.inference.bulk.answering import Questions
from engram.inference.bulk.bulk_settings import BulkSettings
from engram.inference.bulk.decoders import Item
from engram.inference.bulk.predict_to import predict_to


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
def model(small_backbone: Path) -> MemoryViT:
    torch.manual_seed(0)
    model = MemoryViT(engram.load_backbone(small_backbone)).eval()
    for kind in ("classification", "multilabel", "regression", "segmentation"):
        task = model.add_task(kind, ["one", "two", "three"], kind=kind)
        torch.nn.init.normal_(task.head.weight, std=0.3)
    task = model.add_task("anomaly", 1, kind="anomaly", regime="patchcore", bank=5)
    torch.nn.init.normal_(task.head.weight, std=0.3)
    return model


SETTINGS = BulkSettings(rows=4, batch=3, decoders=0)


def ask(
    model: MemoryViT, settings: BulkSettings = SETTINGS, masks: Path | None = None
) -> Questions:
    return Questions(model, list(model.tasks), settings, masks)


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".csv":
        return list(csv.DictReader(path.open(newline="")))
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return rows


def _records(cell: Any) -> Any:
    return json.loads(cell) if isinstance(cell, str) else cell


@pytest.mark.parametrize("name", ["answers.parquet", "answers.jsonl", "answers.csv", "folder"])
def test_answers_are_those_of_predict(
    model: MemoryViT, photos: Path, tmp_path: Path, name: str
) -> None:
    result = predict_to(ask(model), [str(photos)], tmp_path / name)
    assert (result.images, result.errors, result.resumed) == (25, 1, 0)
    rows = rows_of(tmp_path / name)
    paths = sorted(str(path) for path in photos.iterdir())
    assert [row["image"] for row in rows] == paths
    for row, expected in zip(rows, engram.predict(model, paths), strict=True):
        if "error" in expected:
            assert row["error"] == expected["error"]
            continue
        assert not row.get("error")
        for task in ("classification", "multilabel", "segmentation"):
            theirs = expected["tasks"][task]
            theirs = theirs["classes"] if task == "segmentation" else theirs
            for one, other in zip(_records(row[f"{task}.top"]), theirs, strict=True):
                assert one == pytest.approx(other, abs=3e-5)
        best = expected["tasks"]["classification"][0]
        assert row["classification"] == best["class"]
        assert float(row["classification.probability"]) == pytest.approx(
            best["probability"], abs=1e-5
        )
        present = [one["class"] for one in expected["tasks"]["multilabel"] if one["present"]]
        assert row["multilabel"] == ("; ".join(present) if name.endswith(".csv") else present)
        assert row["segmentation"] == expected["tasks"]["segmentation"]["classes"][0]["class"]
        found = expected["tasks"]["anomaly"]
        assert row["anomaly"] == ("anomalous" if found["anomalous"] else "good")
        assert float(row["anomaly.score"]) == pytest.approx(found["score"], abs=3e-5)
        for number in expected["tasks"]["regression"]:
            value = float(row[f"regression.{number['name']}"])
            assert value == pytest.approx(number["value"], abs=3e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


def test_logits_embeddings_and_masks(model: MemoryViT, photos: Path, tmp_path: Path) -> None:
    settings = BulkSettings(rows=10, decoders=0, logits=True, embed=True)
    out = tmp_path / "a.parquet"
    predict_to(ask(model, settings, tmp_path / "masks"), [str(photos / "00.png")], out)
    [row] = rows_of(out)
    preprocessing = model.preprocessing
    view = engram.images.evaluation_view(photos / "00.png", preprocessing)
    pixels = engram.images.normalise(torch.from_numpy(view)[None], preprocessing)
    with torch.inference_mode():
        logits, vectors = model(pixels)["classification"][0], model.embed(pixels)
    assert row["classification.logits"] == pytest.approx(logits.tolist(), abs=1e-2)
    assert row["base.embedding"] == pytest.approx(vectors["base"][0].tolist(), abs=1e-5)
    mask = Path(row["segmentation.mask"])
    assert mask.parent == tmp_path / "masks"
    assert Image.open(mask).size == tuple(reversed(pixels.shape[2:]))
    assert Path(row["anomaly.map"]).read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_job_goes_on_and_computes_nothing_twice(
    model: MemoryViT, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole.parquet", tmp_path / "a.parquet"
    predict_to(ask(model), [str(photos)], whole)

    def stop(what: str, done: int, total: int, note: str = "") -> None:
        if done == 11:  # in the third part
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(engram.errors.Interrupted, match="8 images are kept"):
        predict_to(ask(model), [str(photos)], out, progress=stop)
    assert not out.exists()
    seen: list[int] = []
    run = model.with_familiarity

    def counted(pixels: torch.Tensor, *more: Any) -> Any:
        seen.append(len(pixels))
        return run(pixels, *more)

    monkeypatch.setattr(model, "with_familiarity", counted)
    result = predict_to(ask(model), [str(photos)], out)
    assert (result.images, result.resumed) == (25, 8)
    assert sum(seen) == 25 - 8
    assert rows_of(out) == rows_of(whole)


def test_another_job_is_not_continued(model: MemoryViT, photos: Path, tmp_path: Path) -> None:
    source, out = Path(shutil.copytree(photos, tmp_path / "photos")), tmp_path / "answers"
    predict_to(ask(model), [str(source)], out)
    (source / "00.png").rename(source / "99.png")
    with pytest.raises(EngramError, match="added, removed or renamed"):
        predict_to(ask(model), [str(source)], out)
    with pytest.raises(EngramError, match="top_k"):
        predict_to(ask(model, BulkSettings(rows=4, decoders=0, top_k=1)), [str(source)], out)
    assert predict_to(ask(model), [str(source)], out, overwrite=True).resumed == 0


def test_what_is_there_is_not_replaced_by_itself(
    model: MemoryViT, photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a.jsonl"
    out.write_text("mine\n")
    with pytest.raises(EngramError, match="--overwrite"):
        predict_to(ask(model), [str(photos)], out)
    assert out.read_text() == "mine\n"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(EngramError, match="not empty"):
        predict_to(ask(model), [str(photos)], tmp_path / "full", overwrite=True)
    with pytest.raises(EngramError, match=r"\.parquet, \.jsonl or \.csv"):
        predict_to(ask(model), [str(photos)], tmp_path / "a.xlsx")


def test_kill_9_at_any_time_loses_nothing(
    model: MemoryViT, photos: Path, tmp_path: Path, nursery: Nursery, small_backbone: Path
) -> None:
    task = model.save("classification", tmp_path / "classification.safetensors")
    out = tmp_path / "a.jsonl"
    command = ("predict", task, photos, "--out", out, "--rows", "2", "--batch", "2")
    for parts in (1, 4):
        some = written(tmp_path, "a.jsonl.parts/part-*", files=parts)
        running = nursery.start(*command, hold=some)
        running.signal_when(signal.SIGKILL, some)
    running = nursery.start(*command, "--json").wait()
    assert running.code == 0, running.stderr
    document = json.loads(running.stdout)
    assert document["images"] == 25
    images = [row["image"] for row in rows_of(out)]
    assert images == sorted(str(path) for path in photos.iterdir())


@pytest.mark.parametrize("changed", [False, True])
def test_kill_9_when_the_table_is_in_place_leaves_a_finished_job(
    model: MemoryViT,
    photos: Path,
    tmp_path: Path,
    nursery: Nursery,
    small_backbone: Path,
    changed: bool,
) -> None:
    task = model.save("classification", tmp_path / "classification.safetensors")
    out = tmp_path / "a.jsonl"
    command = ("predict", task, photos, "--out", out, "--decoders", "0")
    there = written(tmp_path, "a.jsonl", files=1, more=0)
    nursery.start(*command, hold=there).signal_when(signal.SIGKILL, there)
    assert (tmp_path / "a.jsonl.parts").exists()
    whole = out.read_bytes()
    if changed:
        out.unlink()
        out.write_bytes(whole + b"mine")
    running = nursery.start(*command, "--json").wait()
    if changed:
        assert (running.code, out.read_bytes()) == (2, whole + b"mine")
        assert "exists" in running.stderr
        return
    assert running.code == 0, running.stderr
    document = json.loads(running.stdout)
    assert (document["images"], document["resumed"], out.read_bytes()) == (25, 25, whole)
    assert not (tmp_path / "a.jsonl.parts").exists()


@pytest.mark.parametrize("decoders", [0, 1])
def test_few_large_members_of_an_archive_are_in_memory(
    model: MemoryViT, photos: Path, tmp_path: Path, decoders: int
) -> None:
    size, zeros = 5 << 24, gzip.compress(bytes(1 << 24))  # each more than may be held at once
    pieces = []
    for i in range(6):
        info = tarfile.TarInfo(f"{i}.png")
        info.size = size
        pieces.append(gzip.compress(info.tobuf()) + zeros * 5)
    source = tmp_path / "a.tar.gz"
    source.write_bytes(b"".join(pieces) + gzip.compress(bytes(1024)))
    settings = replace(SETTINGS, decoders=decoders)
    predict_to(ask(model, settings), [str(photos / "00.png")], tmp_path / "first.jsonl")
    tracemalloc.start()
    result = predict_to(ask(model, settings), [str(source)], tmp_path / "a.jsonl")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (result.images, result.errors) == (6, 6)
    assert peak < (1.5 + decoders) * size  # one, and a copy on its way to the decoder


def packed(photos: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w:gz" if archive.suffix == ".gz" else "w") as tar:
        for path in sorted(photos.iterdir()):
            tar.add(path, path.name)
    return archive


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_a_job_on_a_damaged_archive_goes_on_after_repair(
    model: MemoryViT, photos: Path, tmp_path: Path, name: str
) -> None:
    source, out = packed(photos, tmp_path / name), tmp_path / "answers.jsonl"
    whole = tmp_path / "whole.jsonl"
    predict_to(ask(model), [str(source)], whole)
    good = source.read_bytes()
    source.write_bytes(good[: len(good) // 2])
    with pytest.raises(EngramError, match=r"damaged at byte .* images are kept"):
        predict_to(ask(model), [str(source)], out)
    assert not out.exists()
    source.write_bytes(good)
    result = predict_to(ask(model), [str(source)], out)
    assert (result.images, result.resumed > 4) == (25, True)
    assert [row["image"] for row in rows_of(out)] == [row["image"] for row in rows_of(whole)]


def test_answers_from_an_archive_with_a_wrong_checksum_are_not_kept(
    model: MemoryViT, photos: Path, tmp_path: Path
) -> None:
    archive, out = packed(photos, tmp_path / "a.tar.gz"), tmp_path / "answers"
    good = archive.read_bytes()
    archive.write_bytes(good[:-8] + bytes(4) + good[-4:])
    first = str(photos / "00.png")
    with pytest.raises(EngramError, match=r"a\.tar\.gz is damaged"):
        predict_to(ask(model), [*[first] * 5, str(archive)], out)
    assert len(list(out.glob("part-*"))) == 1  # its four images are not of the archive
    archive.write_bytes(good)
    assert predict_to(ask(model), [*[first] * 5, str(archive)], out).resumed == 4


@pytest.mark.parametrize("decoders", [0, 1])
def test_asking_to_stop_ends_a_job_that_waits_for_its_sources(
    model: MemoryViT,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    decoders: int,
) -> None:
    def endless(sources: object, *more: object) -> Iterator[Item]:
        yield Item(str(photos / "00.png"))
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            time.sleep(0.01)

    monkeypatch.setattr("engram.inference.bulk.predict_to.read_items", endless)
    settings = BulkSettings(decoders=decoders)
    with pytest.raises(engram.errors.Interrupted):
        predict_to(ask(model, settings), [str(photos)], tmp_path / "a.jsonl")


def test_two_jobs_on_one_output_lose_nothing(
    model: MemoryViT, photos: Path, tmp_path: Path, nursery: Nursery, small_backbone: Path
) -> None:
    task = model.save("classification", tmp_path / "classification.safetensors")
    out = tmp_path / "a.jsonl"
    command = ("predict", task, photos, "--out", out, "--rows", "2", "--decoders", "0")
    codes = [running.wait().code for running in [nursery.start(*command) for _ in range(2)]]
    assert sorted(codes) == [0, 2]
    images = [row["image"] for row in rows_of(out)]
    assert images == sorted(str(path) for path in photos.iterdir())


def test_sigterm_ends_a_job_that_waits_for_its_list(
    model: MemoryViT, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Waiting(io.StringIO):
        """A standard input that says five names, and then nothing more."""

        def readline(self, size: int | None = -1, /) -> str:
            if line := super().readline(-1 if size is None else size):
                return line
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait()
            return ""

    monkeypatch.setattr("sys.stdin", Waiting("".join(f"{photos}/{i:02}.png\n" for i in range(5))))
    with pytest.raises(engram.errors.Interrupted, match="continue"):
        predict_to(ask(model), ["-"], tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.csv"])
def test_hostile_entries_are_rows_with_errors(
    model: MemoryViT, photos: Path, tmp_path: Path, name: str
) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "self.png").symlink_to(tmp_path / "self.png")
    odd = tmp_path / os.fsdecode(b"\xff.png")
    odd.write_bytes((photos / "00.png").read_bytes())
    with open(tmp_path / "sparse.png", "wb") as file:
        file.truncate(10**12)
    bad = ["/dev/zero", "pipe.png", "self.png", "sparse.png", "reference://x", "a\0b", "x" * 70_000]
    lines = [*map(os.fsencode, bad), b"\xff.png", os.fsencode(photos / "01.png")]
    (tmp_path / "list.txt").write_bytes(b"\n".join(lines))
    result = predict_to(ask(model), [str(tmp_path / "list.txt")], tmp_path / name)
    assert (result.images, result.errors) == (9, 7)
    assert [bool(row.get("error")) for row in rows_of(tmp_path / name)] == [True] * 7 + [False] * 2
