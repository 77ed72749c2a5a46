"""What the trunk feeds to tasks is computed once, whatever crashes, renames or runs beside it."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import engram
from engram import EngramError, MemoryViT, Recipe, load_trunk, random_trunk
from engram.cli import main as cli
from engram.data.datasets import Splits, load
from engram.errors import Notice
from engram.images.preprocessing import Preprocessing, normalise
from engram.images.views import evaluation_view
from engram.train import cache
from engram.train.cache import Cache, View, contents_of
from engram.train.feeds import CacheFeed, TrunkFeed, open_feed
from engram.util.processes import Team

QUICK = Recipe(steps=20, batch=16, evaluations=2, workers=0, cache="on")


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images the trunk ran on for the cache, batch by batch."""
    counts: list[int] = []
    rows = Cache.compute

    def counted(self: Cache, images: Tensor) -> Tensor:
        counts.append(len(images))
        return rows(self, images)

    monkeypatch.setattr(Cache, "compute", counted)
    return counts


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for i in range(6):
            pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "photos"


def learn(trunk: Path, splits: Splits, recipe: Recipe, **settings: Any) -> dict[str, Tensor]:
    model = MemoryViT(load_trunk(trunk))
    model.add_task("t", splits.classes, 3, seed=0, **settings)
    engram.fit(model, "t", splits, recipe)
    return model.task("t").tensors()


def filled(trunk: Path, photos: Path) -> Cache:
    dataset = load(photos)["train"]
    model = load_trunk(trunk)
    assert model.preprocessing is not None
    kept = Cache(model, model.preprocessing)
    assert kept.fill(dataset, contents_of(dataset), batch=4) == {}
    return kept


# Agreement


@pytest.mark.parametrize("regime", ["masked", "masked+adapter", "head", "mlp-head"])
def test_learning_from_the_cache_is_learning_from_the_trunk(
    regime: str, small_trunk: Path, colours: Path
) -> None:
    """Within what half precision loses: 5e-4 of the largest change after 20 steps of SGD."""
    splits, recipe = load(colours), QUICK.but(optimizer="sgd", lr=0.1)
    first = MemoryViT(load_trunk(small_trunk))
    start = first.add_task("t", splits.classes, 3, seed=0, regime=regime).tensors()
    cached = learn(small_trunk, splits, recipe, regime=regime)
    plain = learn(small_trunk, splits, recipe.but(cache="off"), regime=regime)
    moved = max((plain[name] - start[name]).abs().max().item() for name in plain)
    assert moved > 0.05
    for name in plain:
        assert (cached[name] - plain[name]).abs().max().item() <= 5e-4 * moved, name


def test_tensors_that_are_read_in_another_way_have_another_cache(small_trunk: Path) -> None:
    ways = [{}, {"heads": 1}, {"activation": "quick_gelu"}]
    trunks = [load_trunk(small_trunk, **way) for way in ways]
    assert len({trunk.fingerprint for trunk in trunks}) == 1
    assert len({Cache(trunk, Preprocessing((16, 16), None)).folder for trunk in trunks}) == 3


def test_a_picture_that_is_there_twice_keeps_the_mask_of_its_own_view(
    small_trunk: Path, tmp_path: Path
) -> None:
    values = np.random.default_rng(0).integers(0, 2, (16, 16), dtype=np.uint8)
    for folder, pixels in (("images", np.repeat(values[..., None] * 255, 3, 2)), ("masks", values)):
        (tmp_path / folder).mkdir()
        for i in range(6):
            Image.fromarray(pixels).save(tmp_path / folder / f"{i}.png")
    splits = load(tmp_path, kind="segmentation")
    model = MemoryViT(load_trunk(small_trunk))
    model.add_task("t", **splits.task)
    recipe = Recipe(augment="inception", views=1, workers=0, batch=8)
    made = open_feed(model, ["t"], splits.with_validation(), recipe, Team())
    [item] = made.epoch(0, 0)
    whole = TrunkFeed(made.plan)
    [plain] = whole.epoch(0, 0)
    assert torch.equal(item.labels, plain.labels)
    kept = made.views[0]
    rows = kept.compute(plain.inputs)
    assert torch.equal(item.inputs, rows)


def test_logits_from_the_cache_are_the_models(small_trunk: Path, photos: Path) -> None:
    kept = filled(small_trunk, photos)
    model = MemoryViT(kept.trunk)
    model.add_task("parent", 3, 2, seed=0)
    model.add_task("child", 4, 3, extends=["parent"], seed=1)
    model.add_task("head", 5, regime="head", seed=2)
    for task in model.tasks.values():
        torch.nn.init.normal_(task.head.weight)
    dataset = load(photos)["train"]
    views = [
        evaluation_view(dataset.sample_name(i), kept.preprocessing) for i in range(len(dataset))
    ]
    pixels = normalise(torch.from_numpy(np.stack(views)), kept.preprocessing)
    layers, pooled = kept.split(kept.read(contents_of(dataset)))
    names = ["child", "parent", "head"]
    with torch.no_grad():
        direct, stored = model(pixels, tasks=names), model.from_cache(layers, pooled, names)
    for name in names:
        scale = direct[name].abs().max().item()
        assert (direct[name] - stored[name]).abs().max().item() <= 2e-3 * scale
    only = kept.read(contents_of(dataset), only_pooled=True)
    assert torch.equal(only[:, 0].float(), pooled)


def test_a_second_task_never_runs_the_trunk(
    small_trunk: Path, colours: Path, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = load(colours)
    learn(small_trunk, splits, QUICK)
    assert sum(computed) == 60  # every image once, validation included
    for name in ("embed", "encode", "tokens"):
        monkeypatch.setattr(engram.ViT, name, lambda *_: pytest.fail("the trunk ran"))
    learn(small_trunk, splits, QUICK.but(lr=0.01, data_seed=3))  # another split of the same images
    assert sum(computed) == 60


# What is stored


def test_names_do_not_matter_but_contents_do(
    small_trunk: Path, photos: Path, computed: list[int]
) -> None:
    filled(small_trunk, photos)
    assert sum(computed) == 12
    (photos / "a").rename(photos / "c")
    (photos / "b" / "0.png").rename(photos / "b" / "zero.png")
    filled(small_trunk, photos)
    assert sum(computed) == 12
    Image.new("RGB", (16, 16), "red").save(photos / "b" / "1.png")
    filled(small_trunk, photos)
    assert sum(computed) == 13


def test_a_cache_is_for_one_trunk_preprocessing_and_view(small_trunk: Path) -> None:
    trunk = load_trunk(small_trunk)
    other = random_trunk(image_size=16, patch=4, width=32, depth=2, heads=2, seed=1)
    plain, sharp = Preprocessing((16, 16), None), Preprocessing((16, 16), None, "lanczos")
    folders = {
        Cache(trunk, plain).folder,
        Cache(other, plain).folder,
        Cache(trunk, sharp).folder,
        Cache(trunk, plain, View("inception", number=0)).folder,
        Cache(trunk, plain, View("inception", number=1)).folder,
    }
    assert len(folders) == 5
    assert Cache(load_trunk(small_trunk), plain).folder in folders


def test_a_torn_end_is_ignored_and_computed_again(
    small_trunk: Path, photos: Path, computed: list[int]
) -> None:
    kept = filled(small_trunk, photos)
    contents = contents_of(load(photos)["train"])
    whole = kept.read(contents)
    [data], [index] = kept.folder.glob("*.data"), kept.folder.glob("*.index")
    os.truncate(data, data.stat().st_size - kept.row_bytes - 3)  # the last row, part of one more
    os.truncate(index, index.stat().st_size - 7)  # and part of the last line
    torn = Cache(kept.trunk, kept.preprocessing)
    assert sum(content in torn for content in contents) == 10
    computed.clear()
    assert torch.equal(filled(small_trunk, photos).read(contents), whole)
    assert sum(computed) == 2


def test_a_crash_while_filling_loses_no_more_than_a_batch(
    nursery: Any, small_trunk: Path, own_cache: Path, tmp_path: Path, computed: list[int]
) -> None:
    arguments = [
        *("fit", "digits", "--task", "digits", "--backbone", small_trunk, "--workers", 0),
        *("-o", tmp_path / "digits.safetensors", "--steps", 2, "--cache", "on"),
    ]

    def lines() -> int:
        return sum(path.stat().st_size // 65 for path in own_cache.glob("*/*.index"))

    run = nursery.start(*arguments)
    run.signal_when(signal.SIGKILL, lambda: lines() >= 200)
    stored = lines()
    assert 200 <= stored < 1700
    learn(small_trunk, load("digits"), QUICK.but(steps=1))
    images = len(load("digits")["train"])
    assert sum(computed) == images - stored
    assert lines() == images


def test_several_processes_fill_one_cache_at_once(
    nursery: Any, small_trunk: Path, colours: Path, own_cache: Path, tmp_path: Path
) -> None:
    outs = [tmp_path / f"{i}.safetensors" for i in range(3)]
    runs = [
        nursery.start(
            *("fit", colours, "--task", "t", "--backbone", small_trunk, "-o", out),
            *("--steps", 4, "--batch", 16, "--workers", 0, "--cache", "on"),
        )
        for out in outs
    ]
    for run in runs:
        assert run.wait().code == 0, run.stderr
    assert len({engram.inspect(out).content for out in outs}) == 1
    [about] = cache.info(own_cache)
    assert 60 <= about["images"] <= 180  # what two computed at once is stored twice


def test_reading_holds_little_memory(own_cache: Path) -> None:
    """Over 96 MB of rows in batches of 3 MB, less than 24 MB more than before."""
    trunk = random_trunk(image_size=64, patch=4, width=64, depth=3, heads=2)
    kept = Cache(trunk, Preprocessing((64, 64), None))
    count = 96_000_000 // kept.row_bytes
    names = [f"{i:064x}" for i in range(count)]
    row = np.arange(kept.row_bytes // 2, dtype=np.float16)
    with open(kept.folder / "w.data", "wb") as file:
        for _ in range(count):
            file.write(row.data)
    (kept.folder / "w.index").write_text("".join(f"{name}\n" for name in names))
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


# Where it is used


def feed(trunk: Path, splits: Splits, recipe: Recipe, regime: str = "masked", **more: Any) -> Any:
    model = MemoryViT(load_trunk(trunk))
    model.add_task("t", splits.classes, regime=regime)
    return open_feed(model, ["t"], splits.with_validation(), recipe, Team(), **more)


def test_the_cache_is_used_where_it_can_be(small_trunk: Path, colours: Path) -> None:
    splits, auto = load(colours), Recipe(workers=0)
    assert isinstance(feed(small_trunk, splits, auto), CacheFeed)
    assert isinstance(feed(small_trunk, splits, auto, "head"), CacheFeed)
    for recipe, regime, more in (
        (auto.but(cache="off"), "masked", {}),
        (auto.but(augment="auto"), "masked", {}),
        (auto, "memory", {}),
        (auto, "full", {}),
        (auto, "masked", {"transform": np.asarray}),
    ):
        assert isinstance(feed(small_trunk, splits, recipe, regime, **more), TrunkFeed)
    with pytest.warns(Notice, match=r"^The cache is not used: it would .* cache_gb is 1e-06\."):
        assert isinstance(feed(small_trunk, splits, auto.but(cache_gb=1e-6)), TrunkFeed)


def test_a_run_says_that_its_pictures_do_not_fit_the_cache(
    nursery: Any, small_trunk: Path, colours: Path, tmp_path: Path
) -> None:
    out = tmp_path / "t.safetensors"
    done = nursery.run(
        *("fit", colours, "--task", "t", "--backbone", small_trunk, "-o", out, "--json"),
        *("--steps", 1, "--workers", 0, "--cache-gb", 1e-6),
    )
    assert done.code == 0, done.stderr
    assert re.fullmatch(r"The cache is not used: it would take .+ every epoch\.\n", done.stderr)
    assert json.loads(done.stdout)["path"] == str(out)


def test_a_full_disk_is_no_place_for_a_cache_unless_it_is_there_already(
    small_trunk: Path, colours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits, auto = load(colours), Recipe(workers=0)
    monkeypatch.setattr("engram.train.feeds.room", lambda: 1000)
    with pytest.warns(Notice, match="GB are free"):
        assert isinstance(feed(small_trunk, splits, auto), TrunkFeed)
    with pytest.raises(EngramError, match=r"The cache cannot be used: it would take .* are free"):
        feed(small_trunk, splits, auto.but(cache="on"))
    monkeypatch.setattr("engram.train.feeds.room", lambda: 10**12)
    assert isinstance(feed(small_trunk, splits, auto), CacheFeed)
    monkeypatch.setattr("engram.train.feeds.room", lambda: 1000)
    assert isinstance(feed(small_trunk, splits, auto), CacheFeed)


@pytest.mark.parametrize(
    ("settings", "regime", "expected"),
    [
        ({"cache_gb": 1e-6}, "masked", "GB, and cache_gb is 1e-06. Use cache auto or off."),
        ({"augment": "inception"}, "masked", "augment is inception, which is random every time"),
        ({}, "memory", "the regime changes the trunk's own tokens"),
        ({"augment": "auto", "views": 2, "cache": "off"}, "masked", "views live in the cache"),
        ({"augment": "auto", "views": 2, "cache": "auto"}, "full", "not possible here"),
    ],
)
def test_a_cache_that_cannot_be_is_a_sentence(
    settings: dict[str, Any], regime: str, expected: str, small_trunk: Path, colours: Path
) -> None:
    recipe = Recipe(**{"workers": 0, "cache": "on", **settings})
    with pytest.raises(EngramError) as caught:
        feed(small_trunk, load(colours), recipe, regime)
    assert expected in str(caught.value)


def test_views_are_the_epochs_of_augmentation(
    small_trunk: Path, colours: Path, computed: list[int]
) -> None:
    """The first two epochs see what augmented training would, and the third the first again."""
    splits = load(colours)
    recipe = Recipe(
        steps=6, batch=20, workers=0, augment="pad-crop", optimizer="sgd", lr=0.1, evaluations=1
    )
    fixed = learn(small_trunk, splits, recipe.but(views=2))
    assert sum(computed) == 2 * 54 + 6
    fresh = learn(small_trunk, splits, recipe)
    for name in fixed:
        assert (fixed[name] - fresh[name]).abs().max().item() <= 1e-4, name
    longer = recipe.but(steps=12)
    again = learn(small_trunk, splits, longer.but(views=2))
    assert sum(computed) == 2 * 54 + 6
    fresh = learn(small_trunk, splits, longer)
    assert max((again[name] - fresh[name]).abs().max().item() for name in fresh) > 1e-4


def test_a_folder_that_cannot_be_written_is_a_sentence(
    small_trunk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ENGRAM_CACHE", str(tmp_path / "file"))
    with pytest.raises(EngramError, match="set ENGRAM_CACHE to a folder that can be written"):
        Cache(load_trunk(small_trunk), Preprocessing((16, 16), None))


def test_the_commands_show_and_clear_it(
    small_trunk: Path, photos: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = filled(small_trunk, photos)
    (own_cache / "mine.txt").write_text("not the cache's")
    for other in ("holiday", "0" * 24):
        (own_cache / other).mkdir()
        (own_cache / other / "meta.json").write_text('{"camera": "x"}')
    (kept.folder / "note.txt").write_text("not the cache's either")
    assert cli.main(["cache", "info", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["folder"] == str(own_cache)
    [about] = said["caches"]
    assert about["images"] == 12
    assert about["fingerprint"] == kept.trunk.fingerprint
    assert 12 * kept.row_bytes < about["bytes"] < 12 * kept.row_bytes + 5000
    assert cli.main(["cache", "info"]) == 0
    assert "16x16" in capsys.readouterr().out
    assert cli.main(["cache", "clear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"freed": about["bytes"]}
    left = sorted(path.name for path in own_cache.rglob("*") if path.is_file())
    assert left == ["meta.json", "meta.json", "mine.txt", "note.txt"]
    assert cli.main(["cache", "info"]) == 0
