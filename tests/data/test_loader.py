"""Batches are the same for any number of workers and processes, and bad images are left out."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.support.datasets import in_memory
from tests.support.masks import write_masks

from engram.data.datasets import load
from engram.data.loader import LabelledBatch, Loader, balanced
from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing
from engram.images.views import evaluation_view

TINY = Preprocessing(size=(8, 8), resize=8)
SQUASHED = Preprocessing((16, 16), None)


def digest(batches: list[LabelledBatch]) -> list[tuple[Any, ...]]:
    return [
        (b.images.numpy().tobytes(), *(x.tolist() for x in (b.labels, b.indices, b.failed)))
        for b in batches
    ]


def test_an_evaluation_batch_is_the_evaluation_view_in_order(folder: Path) -> None:
    dataset = load(folder)["train"]
    loader = Loader(dataset, TINY, 8)
    batches = list(loader)
    assert [len(b.labels) for b in batches] == [8, 8, 8, 6]
    assert len(loader) == 4
    assert torch.cat([b.indices for b in batches]).tolist() == list(range(30))
    assert torch.cat([b.labels for b in batches]).tolist() == dataset.labels.tolist()
    assert batches[1].images.dtype == torch.uint8
    assert np.array_equal(
        batches[1].images[2].numpy(), evaluation_view(dataset.sample_name(10), TINY)
    )


@pytest.mark.parametrize("augment", ["none", "inception", "pad-crop"])
def test_batches_do_not_depend_on_the_number_of_workers(folder: Path, augment: str) -> None:
    (folder / "red" / "003.png").write_bytes(b"broken")
    dataset = load(folder)["train"]

    def run(workers: int) -> tuple[list[tuple[Any, ...]], dict[str, str]]:
        loader = Loader(dataset, TINY, 7, mode="train", augment=augment, seed=4, workers=workers)
        epochs = [digest(list(loader.epoch(epoch))) for epoch in (0, 1)]
        assert epochs[0] != epochs[1]
        return epochs[0] + epochs[1], loader.bad

    alone = run(0)
    assert len(alone[1]) == 1
    assert run(1) == alone
    assert run(2) == alone


def noisy(image: Image.Image) -> torch.Tensor:
    """A transform that draws from every global generator there is."""
    noise = random.random() + float(np.random.rand()) + float(torch.rand(()))  # noqa: NPY002
    return torch.full((3, 4, 4), noise + image.width)


def test_a_random_transform_is_as_deterministic_as_the_views(folder: Path) -> None:
    dataset = load(folder)["train"]

    def run(workers: int) -> list[tuple[Any, ...]]:
        loader = Loader(dataset, TINY, 16, mode="train", transform=noisy, seed=1, workers=workers)
        return digest(list(loader.epoch(3)))

    before = (random.getstate(), torch.get_rng_state().tolist())
    alone = run(0)
    assert (random.getstate(), torch.get_rng_state().tolist()) == before
    assert run(2) == alone
    batch = next(iter(Loader(dataset, TINY, 16, transform=noisy)))
    assert batch.images.dtype == torch.float32
    assert len(set(batch.images[:, 0, 0, 0].tolist())) == 16


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("transform", "got"),
    [
        (lambda image: np.zeros((3, 4, 4), np.uint8), r"uint8 \(3, 4, 4\)"),
        (lambda image: torch.zeros(4, 4), r"float32 \(4, 4\)"),
        (lambda image: np.zeros((3, 4, 4)), r"float64 \(3, 4, 4\)"),
        (lambda image: np.zeros((4, int(image.getpixel((0, 0))[0]) + 1, 3), np.uint8), " and "),
    ],
)
def test_a_transform_that_returns_something_else_is_refused(
    folder: Path, workers: int, transform: Callable[[Any], Any], got: str
) -> None:
    loader = Loader(load(folder)["train"], TINY, 4, transform=transform, workers=workers)
    with pytest.raises(EngramError, match=r"^A transform must return .*" + got):
        next(iter(loader))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_can_start_at_any_step_without_reading_the_images_before(
    folder: Path, workers: int
) -> None:
    dataset = load(folder)["train"]
    loader = Loader(dataset, TINY, 4, mode="train", seed=2, workers=workers)
    whole = list(loader.epoch(1))
    for index in torch.cat([b.indices for b in whole[:5]]).tolist():
        Path(dataset.sample_name(index)).unlink()
    resumed = Loader(dataset, TINY, 4, mode="train", seed=2, workers=workers)
    assert digest(list(resumed.epoch(1, skip=5))) == digest(whole[5:])
    assert resumed.bad == {}
    assert list(resumed.epoch(1, skip=8)) == []


@settings(max_examples=30)
@given(st.integers(1, 24), st.integers(1, 8), st.integers(1, 4), st.integers(0, 9), st.booleans())
def test_the_parts_of_all_processes_are_the_batches_of_one_process(
    samples: int, batch: int, world: int, epoch: int, drop_last: bool
) -> None:
    dataset = in_memory([i % 2 for i in range(samples)], 2)

    def run(rank: int, world: int) -> list[LabelledBatch]:
        loader = Loader(
            dataset,
            TINY,
            batch,
            mode="train",
            augment="pad-crop",
            seed=9,
            rank=rank,
            world=world,
            drop_last=drop_last,
        )
        batches = list(loader.epoch(epoch))
        assert len(batches) == len(loader)
        return batches

    alone = run(0, 1)
    shards = [run(rank, world) for rank in range(world)]
    assert {len(shard) for shard in shards} == {len(alone)}
    for step, expected in enumerate(alone):
        parts = {
            int(i): image.numpy().tobytes()
            for shard in shards
            for i, image in zip(shard[step].indices, shard[step].images, strict=True)
        }
        assert parts == {
            int(i): image.numpy().tobytes()
            for i, image in zip(expected.indices, expected.images, strict=True)
        }


def test_an_abandoned_epoch_does_not_disturb_the_next(folder: Path) -> None:
    loader = Loader(load(folder)["train"], TINY, 4, mode="train", workers=2)
    expected = digest(list(loader.epoch(1)))
    next(loader.epoch(0))
    assert digest(list(loader.epoch(1))) == expected


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_are_left_out_and_listed(folder: Path, mode: str, workers: int) -> None:
    dataset = load(folder)["train"]
    bad = [3, 4, 5, 20]
    for i in bad:
        Path(dataset.sample_name(i)).write_bytes(b"")
    loader = Loader(dataset, TINY, 3, mode=mode, workers=workers)
    batches = list(loader.epoch(0))
    assert len(batches) == len(loader) == 10
    assert sorted(torch.cat([b.failed for b in batches]).tolist()) == bad
    good = torch.cat([b.indices for b in batches]).tolist()
    assert sorted(good) == [i for i in range(30) if i not in bad]
    assert sum(len(b.images) for b in batches) == 26
    assert set(loader.bad) == {dataset.sample_name(i) for i in bad}
    assert all(sentence.endswith("the file is empty") for sentence in loader.bad.values())
    if mode == "eval":  # a batch may have nothing left
        assert batches[1].images.shape == (0, 8, 8, 3)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_has_the_masks_of_its_images(tmp_path: Path, workers: int) -> None:
    root = write_masks(tmp_path, {f"{i}": i for i in range(5)})
    Image.fromarray(np.full((3, 3), 3, dtype=np.uint8)).save(root / "masks" / "4.png")
    dataset = load(root, kind="segmentation", ignore=3)["train"]
    loader = Loader(dataset, SQUASHED, 4, mode="train", workers=workers, seed=1)
    images = labels = 0
    for batch in loader.epoch(2):
        assert batch.labels.dtype == torch.uint8
        assert batch.labels.shape == (len(batch.images), 16, 16)
        images, labels = images + len(batch.images), labels + len(batch.labels)
    assert images == labels == 4
    assert list(loader.bad) == [str(root / "images" / "4.png")]


def test_a_transform_is_refused_for_segmentation(tmp_path: Path) -> None:
    dataset = load(write_masks(tmp_path, {"1": 1}), kind="segmentation", ignore=3)["train"]
    with pytest.raises(EngramError, match="not their masks"):
        Loader(dataset, SQUASHED, 1, transform=np.asarray)


def test_chosen_samples_are_augmented_as_in_the_whole_epoch(folder: Path) -> None:
    loader = Loader(load(folder)["train"], TINY, 30, mode="train", seed=7)
    (whole,) = loader.epoch(2)
    (part,) = loader.epoch(2, samples=[11, 4])
    assert part.indices.tolist() == [11, 4]
    at = [whole.indices.tolist().index(i) for i in (11, 4)]
    assert torch.equal(part.images, whole.images[at])


def test_loading_draws_nothing_from_the_global_generator(folder: Path) -> None:
    before = torch.get_rng_state()
    loader = Loader(load(folder)["train"], TINY, 8, mode="train", workers=1)
    list(loader.epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.system
def test_spawned_workers_read_the_same(folder: Path) -> None:
    dataset = load(folder)["train"]
    alone = digest(list(Loader(dataset, TINY, 16, mode="train").epoch(0)))
    spawned = Loader(dataset, TINY, 16, mode="train", workers=1, start_method="spawn")
    assert digest(list(spawned.epoch(0))) == alone


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"mode": "test"}, "mode is 'test'"),
        ({"augment": "flip"}, "augment is 'flip'"),
        ({"only": "labels"}, "only is 'labels'"),
        ({"batch_size": 0}, "batch is 0"),
        ({"rank": 2, "world": 2}, "world is 2"),
    ],
)
def test_a_setting_out_of_range_is_refused(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        Loader(in_memory([0, 1], 2), TINY, **({"batch_size": 1} | changed))


# Classes of unequal size


def test_a_balanced_order_has_every_class_equally_often() -> None:
    labels = np.array([0] * 20 + [1] * 3 + [4] * 9)  # no image of 2 and 3
    order = balanced(labels, 0, 1)
    assert sorted(np.bincount(labels[order])[[0, 1, 4]]) == [10, 11, 11]
    drawn = np.bincount(order, minlength=32)
    assert drawn[:20].max() == 1
    assert set(drawn[20:23]) <= {3, 4}  # all before one is repeated
    assert set(drawn[23:]) <= {1, 2}
    assert order.tolist() == balanced(labels, 0, 1).tolist()
    assert order.tolist() != balanced(labels, 0, 2).tolist()
    assert order.tolist() != balanced(labels, 1, 1).tolist()


def test_a_sample_that_is_repeated_in_an_epoch_has_another_view_each_time(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 12, 12, 3), dtype=np.uint8)
    np.savez(tmp_path / "noise.npz", x_train=pixels, y_train=np.arange(6) % 2)
    dataset = load(tmp_path / "noise.npz")["train"]
    loader = Loader(dataset, TINY, 2, mode="train")
    first, again = loader.epoch(0, samples=[5, 3, 5, 5])
    (once,) = loader.epoch(0, samples=[3, 5])
    assert torch.equal(first.images, once.images.flip(0))
    assert not torch.equal(again.images[0], first.images[0])
    assert not torch.equal(again.images[0], again.images[1])
