"""Features are computed once, whatever crashes, renames or runs beside it."""

from __future__ import annotations

import json
import os
import signal
import stat
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.runs import written
from tests.support.training import filled, learned
from torch import Tensor

import engram
from engram import EngramError, MemoryViT, Recipe, load_backbone, random_backbone
from engram.data.datasets import load
from engram.errors import Notice
from engram.images.preprocessing import Preprocessing, normalise
from engram.images.views import evaluation_view
from engram.train.features import caches
from engram.train.features.cache import Cache, Keeps, View, contents_of, row_bytes
from engram.train.features.caches import default_root
from engram.vit.vit import ViT, ViTConfig

QUICK = Recipe(steps=20, batch=16, evaluations=2, workers=0, cache="on")


def pixels_of(photos: Path, kept: Cache) -> Tensor:
    dataset = load(photos)["train"]
    views = [
        evaluation_view(dataset.sample_name(i), kept.preprocessing) for i in range(len(dataset))
    ]
    return normalise(torch.from_numpy(np.stack(views)), kept.preprocessing)


def assert_near(stored: Tensor, direct: Tensor) -> None:
    """Within what half precision loses."""
    assert (direct - stored).abs().max().item() <= 2e-3 * direct.abs().max().item()


@pytest.mark.parametrize("keeps", ["layers", "keys"])
def test_logits_from_the_cache_are_the_models(
    keeps: Keeps, small_backbone: Path, noise: Path
) -> None:
    kept = filled(small_backbone, noise, keeps)
    model = MemoryViT(kept.backbone)
    model.add_task("parent", 3, 2, seed=0)
    model.add_task("child", 4, 3, extends=["parent"], seed=1)
    model.add_task("head", 5, regime="head", seed=2)
    for task in model.tasks.values():
        torch.nn.init.normal_(task.head.weight)
    contents, pixels = contents_of(load(noise)["train"]), pixels_of(noise, kept)
    rows = kept.read(contents)
    cached = kept.features(rows)
    assert cached.final is None
    names = ["child", "parent", "head"]
    with torch.no_grad():
        direct, stored = model(pixels, tasks=names), model.from_cache(cached, names).outputs()
    for name in names:
        assert_near(stored[name], direct[name])
    only = kept.read(contents, only_pooled=True)
    assert torch.equal(only[:, 0].float(), cached.pooled)


def test_a_pass_in_half_precision_is_near_and_kept_apart(small_backbone: Path, noise: Path) -> None:
    kept = filled(small_backbone, noise)
    half = Cache(kept.backbone, kept.preprocessing, dtype=torch.bfloat16)
    assert half.folder != kept.folder
    dataset = load(noise)["train"]
    contents = contents_of(dataset)
    half.fill(dataset, contents)
    exact, rounded = (one.read(contents).float() for one in (kept, half))
    difference = (rounded - exact).abs().max() / exact.abs().max()
    assert 1e-3 < difference < 3e-2  # bf16 has eight bits


def test_logits_of_tasks_that_read_the_final_tokens_are_the_models(
    small_backbone: Path, noise: Path
) -> None:
    kept = filled(small_backbone, noise, "all")
    model = MemoryViT(kept.backbone)
    model.add_task("parent", 3, 2, regime="side", seed=0)
    model.add_task("child", 4, 3, regime="side", extends=["parent"], seed=1)
    model.add_task("both", 4, 3, regime="side+readout", rank=4, seed=2)
    model.add_task("readout", 3, regime="readout", seed=3)
    model.add_task("grid", 3, regime="readout", grid=True, seed=3)
    model.add_task("masked", 3, seed=4)
    for regime in ("masked", "side", "head"):
        model.add_task(f"{regime}-mask", 3, kind="segmentation", regime=regime, seed=5)
    for task in model.tasks.values():
        torch.nn.init.normal_(task.head.weight)
    torch.nn.init.normal_(model.task("child").side.parents)
    contents, pixels = contents_of(load(noise)["train"]), pixels_of(noise, kept)
    names = list(model.tasks)
    rows = kept.read(contents)
    cached = kept.features(rows)
    assert cached.final is not None
    assert cached.final.shape == cached.layers[0].shape == (12, kept.tokens, 32)
    with torch.no_grad():
        direct = model(pixels, tasks=names)
        stored = model.from_cache(cached, names, kept.preprocessing.size).outputs()
        for name in names:
            assert_near(stored[name], direct[name])
        everything = model.from_cache(cached, ["grid"], kept.preprocessing.size).vectors()["grid"]
        assert_near(everything, model.embed(pixels, ["grid"])["grid"])
    only = kept.features(kept.read(contents, only_pooled=True))
    assert list(only.layers) == []
    assert torch.equal(only.final, cached.final)


def test_the_final_tokens_alone_are_enough_for_heads_on_patches(
    small_backbone: Path, noise: Path
) -> None:
    kept = filled(small_backbone, noise, "final")
    model = MemoryViT(kept.backbone)
    torch.nn.init.normal_(model.add_task("mask", 3, kind="segmentation", regime="head").head.weight)
    cached = kept.features(kept.read(contents_of(load(noise)["train"])))
    with torch.no_grad():
        direct = model(pixels_of(noise, kept), ["mask"])["mask"]
        inputs = model.from_cache(cached, ["mask"], kept.preprocessing.size)
        assert_near(inputs.outputs()["mask"], direct)


def test_statistics_are_kept_in_little_space(small_backbone: Path, noise: Path) -> None:
    kept = filled(small_backbone, noise, "statistics")
    model = MemoryViT(kept.backbone)
    model.add_task("readout", 3, regime="readout")
    model.add_task("last", 2, regime="readout", layers=2)
    model.add_task("grid", 2, regime="readout", grid=True)
    model.add_task("head", 3, regime="head")
    for task in model.tasks.values():
        torch.nn.init.normal_(task.head.weight)
    rows, pixels = kept.read(contents_of(load(noise)["train"])), pixels_of(noise, kept)
    cached = kept.features(rows)
    assert (list(cached.layers), cached.final) == ([], None)
    with torch.no_grad():
        statistics, direct = model.embed(pixels, ["grid"])["grid"], model(pixels, [*model.tasks])
        assert_near(cached.statistics, statistics)
        assert_near(cached.pooled, model.backbone.pool(model.backbone.tokens(pixels)))
        for given in (cached, replace(cached, statistics=statistics)):
            for name, logits in model.from_cache(given, [*model.tasks]).outputs().items():
                assert_near(logits, direct[name])
    b16 = ViTConfig((224, 224), patch=16, width=768, depth=12, heads=12, mlp_width=3072)
    with torch.device("meta"):
        backbone, size = ViT(b16), Preprocessing((224, 224), None)
    assert row_bytes(backbone, size, "statistics") == 135_168
    assert row_bytes(backbone, size) == 3_632_640
    assert row_bytes(backbone, size, "all") == 3_935_232
    assert row_bytes(backbone, size, "keys") == 7_263_744


# What is stored


def test_names_do_not_matter_but_contents_do(
    small_backbone: Path, noise: Path, computed: list[int]
) -> None:
    filled(small_backbone, noise)
    assert sum(computed) == 12
    (noise / "a").rename(noise / "c")
    (noise / "b" / "0.png").rename(noise / "b" / "zero.png")
    filled(small_backbone, noise)
    assert sum(computed) == 12
    Image.new("RGB", (16, 16), "red").save(noise / "b" / "1.png")
    filled(small_backbone, noise)
    assert sum(computed) == 13


def test_trainings_that_start_together_compute_each_image_once(
    small_backbone: Path, noise: Path, computed: list[int]
) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: filled(small_backbone, noise), range(3)))
    assert sum(computed) == 12


def test_a_cache_is_for_one_backbone_preprocessing_and_view(small_backbone: Path) -> None:
    backbone = load_backbone(small_backbone)
    other = random_backbone(image_size=16, patch=4, width=32, depth=2, heads=2, seed=1)
    plain, sharp = Preprocessing((16, 16), None), Preprocessing((16, 16), None, "lanczos")
    folders = {
        Cache(backbone, plain).folder,
        Cache(other, plain).folder,
        Cache(backbone, sharp).folder,
        Cache(backbone, plain, View("inception", number=0)).folder,
        Cache(backbone, plain, View("inception", number=1)).folder,
        Cache(backbone, plain, keeps="all").folder,
        Cache(backbone, plain, keeps="final").folder,
        Cache(backbone, plain, keeps="statistics").folder,
    }
    assert len(folders) == 8
    assert Cache(load_backbone(small_backbone), plain).folder in folders


def test_tensors_that_are_read_in_another_way_have_another_cache(small_backbone: Path) -> None:
    ways = [{}, {"heads": 1}, {"activation": "quick_gelu"}]
    backbones = [load_backbone(small_backbone, **way) for way in ways]
    assert len({backbone.fingerprint for backbone in backbones}) == 1
    assert (
        len({Cache(backbone, Preprocessing((16, 16), None)).folder for backbone in backbones}) == 3
    )


def test_rows_that_were_stored_before_there_were_other_kinds_are_found(
    small_backbone: Path,
) -> None:
    kept = Cache(load_backbone(small_backbone), Preprocessing((16, 16), None))
    about = json.loads((kept.folder / "meta.json").read_text())
    assert about.keys() == {
        *("format", "backbone", "fingerprint", "heads", "activation", "antialias"),
        *("preprocessing", "view", "row_bytes"),
    }


def test_a_torn_end_is_ignored_and_computed_again(
    small_backbone: Path, noise: Path, computed: list[int]
) -> None:
    kept = filled(small_backbone, noise)
    contents = contents_of(load(noise)["train"])
    whole = kept.read(contents)
    [data], [index] = kept.folder.glob("*.data"), kept.folder.glob("*.index")
    os.truncate(data, data.stat().st_size - kept.row_bytes - 3)  # the last row, part of one more
    os.truncate(index, index.stat().st_size - 7)  # and part of the last line
    torn = Cache(kept.backbone, kept.preprocessing)
    assert sum(content in torn for content in contents) == 10
    computed.clear()
    assert torch.equal(filled(small_backbone, noise).read(contents), whole)
    assert sum(computed) == 2


def zeroed_quarter(data: Path, index: Path) -> None:
    size = data.stat().st_size
    with open(data, "r+b") as file:
        file.seek(size // 4)
        file.write(bytes(size // 4))


def flipped_bit(data: Path, index: Path) -> None:
    with open(data, "r+b") as file:
        file.seek(1000)
        byte = file.read(1)[0]
        file.seek(1000)
        file.write(bytes([byte ^ 64]))


def rotated_index(data: Path, index: Path) -> None:
    lines = index.read_text().splitlines(keepends=True)
    index.write_text("".join([*lines[1:], lines[0]]))


def swapped_hashes(data: Path, index: Path) -> None:
    """Every line keeps its checksum, but two name each other's image."""
    lines = [line.split() for line in index.read_text().splitlines()]
    lines[0][0], lines[1][0] = lines[1][0], lines[0][0]
    index.write_text("".join(f"{content} {check}\n" for content, check in lines))


@pytest.mark.parametrize("damage", [zeroed_quarter, flipped_bit, rotated_index, swapped_hashes])
def test_a_damaged_row_is_found_and_computed_again(
    damage: Callable[[Path, Path], None], small_backbone: Path, noise: Path
) -> None:
    splits, recipe = load(noise), QUICK.but(steps=2)
    before = learned(small_backbone, splits, recipe)
    data = max(default_root().glob("*/*.data"), key=lambda path: path.stat().st_size)
    damage(data, data.with_suffix(".index"))
    with pytest.warns(Notice, match="is damaged"):
        after = learned(small_backbone, splits, recipe)
    assert all(torch.equal(before[name], after[name]) for name in before)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)  # what was damaged is not found again
        learned(small_backbone, splits, recipe)


def test_only_the_owner_may_read_the_cache(small_backbone: Path, noise: Path) -> None:
    kept = filled(small_backbone, noise)
    assert stat.S_IMODE(kept.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept.folder.iterdir()} == {0o600}


def test_a_crash_while_filling_loses_no_more_than_a_batch(
    nursery: Any, small_backbone: Path, own_cache: Path, tmp_path: Path, computed: list[int]
) -> None:
    arguments = [
        *("fit", "digits", "--task", "digits", "--backbone", small_backbone, "--workers", 0),
        *("-o", tmp_path / "digits.safetensors", "--steps", 2, "--cache", "on"),
        *("--regime", "masked"),
    ]

    def lines() -> int:
        return sum(path.stat().st_size // 74 for path in own_cache.glob("*/*.index"))

    some = written(own_cache, "*/*.index", size=200 * 74, more=500 * 74)
    run = nursery.start(*arguments, hold=some)
    run.signal_when(signal.SIGKILL, some)
    stored = lines()
    assert 200 <= stored < 1700
    learned(small_backbone, load("digits"), QUICK.but(steps=1))
    images = len(load("digits")["train"])
    assert sum(computed) == images - stored
    assert lines() == images


def test_several_processes_fill_one_cache_at_once(
    nursery: Any, small_backbone: Path, colours: Path, own_cache: Path, tmp_path: Path
) -> None:
    outs = [tmp_path / f"{i}.safetensors" for i in range(3)]
    runs = [
        nursery.start(
            *("fit", colours, "--task", "t", "--backbone", small_backbone, "-o", out),
            *("--steps", 4, "--batch", 16, "--workers", 0, "--cache", "on"),
        )
        for out in outs
    ]
    for run in runs:
        assert run.wait().code == 0, run.stderr
    assert len({engram.inspect(out).content for out in outs}) == 1
    [about] = caches.info()
    assert 60 <= about["images"] <= 180  # what two computed at once is stored twice


def test_reading_holds_little_memory(own_cache: Path) -> None:
    """Over 96 MB of rows in batches of 3 MB, less than 24 MB more than before."""
    backbone = random_backbone(image_size=64, patch=4, width=64, depth=3, heads=2)
    kept = Cache(backbone, Preprocessing((64, 64), None))
    count = 96_000_000 // kept.row_bytes
    names = [f"{i:064x}" for i in range(1, count + 1)]
    row = np.arange(kept.row_bytes // 2, dtype=np.float16)
    with open(kept.folder / "w.data", "wb") as file:
        for _ in range(count):
            file.write(row.data)
    (kept.folder / "w.index").write_text("".join(f"{name} 00000000\n" for name in names))
    kept.refresh()

    def resident() -> int:
        text = Path("/proc/self/status").read_text()
        return 1024 * int(text.split("VmRSS:")[1].split()[0])

    size = 3_000_000 // kept.row_bytes
    kept.read(names[:size])
    before, most = resident(), 0
    for start in range(0, count, size):
        batch = kept.read(names[start : start + size])
        assert batch[0, 0, 0] == 0
        most = max(most, resident() - before)
    assert most < 24_000_000


def test_a_folder_that_cannot_be_written_is_a_sentence(
    small_backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ENGRAM_CACHE", str(tmp_path / "file"))
    with pytest.raises(EngramError, match="ENGRAM_CACHE"):
        Cache(load_backbone(small_backbone), Preprocessing((16, 16), None))


def test_no_rows_are_a_batch_too(small_backbone: Path, photos: Path) -> None:
    """As one of several processes has it, or where no image of a batch can be read."""
    kept = filled(small_backbone, photos)
    assert kept.read([]).shape == (0, *kept.shape)
    assert kept.read([], only_pooled=True).shape == (0, 1, kept.shape[1])
