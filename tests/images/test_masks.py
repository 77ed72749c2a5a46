"""Masks: found beside their pictures, seen as the picture is seen, and refused with a sentence."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from engram import EngramError
from engram.data.datasets import load
from engram.data.loader import Loader
from engram.images.decode import BadImage
from engram.images.masks import Legend, mask_view, read_mask
from engram.images.preprocessing import Preprocessing
from engram.images.views import training_view
from engram.tasks.spec import TaskSpec

PREPROCESSING = Preprocessing((16, 16), None)


def scene(seed: int, size: tuple[int, int] = (20, 24)) -> tuple[np.ndarray, np.ndarray]:
    """A picture whose red says what its mask says: 1, 2, and 3 in the upper row."""
    mask = np.ones(size, dtype=np.uint8)
    x, y = np.random.default_rng(seed).integers(4, 12, 2)
    mask[y:, x:] = 2
    mask[0] = 3
    pixels = np.zeros((*size, 3), dtype=np.uint8)
    pixels[..., 0] = mask * 80
    return pixels, mask


def write(
    root: Path, names: Mapping[str, int], images: str = "images", masks: str = "masks"
) -> Path:
    for name, seed in names.items():
        pixels, mask = scene(seed)
        for folder, array in ((images, pixels), (masks, mask)):
            path = root / folder / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(array).save(path)
    return root


# Where they are


def test_images_and_masks_are_two_trees_of_the_same_shape(tmp_path: Path) -> None:
    names = {"train/a/1": 1, "train/b/1": 2, "test/c": 3}
    inside = write(tmp_path / "one", names)
    apart = write(tmp_path / "two", names, "pets", "pets_masks")
    splitwise = tmp_path / "three"
    for split in ("train", "test"):
        own = {n.partition("/")[2]: s for n, s in names.items() if n.startswith(split)}
        write(splitwise / split, own)
    for spec in (inside, f"{apart}/pets::{apart}/pets_masks", splitwise):
        splits = load(spec, kind="segmentation", ignore=3)
        assert splits.classes == ("1", "2")
        assert splits.legend == Legend((1, 2), 3)
        assert (len(splits["train"]), len(splits["test"])) == (2, 1)
        expected = np.where(scene(3)[1] == 3, 0, scene(3)[1])
        assert np.array_equal(np.asarray(splits["test"].mask(0)), expected)


def test_a_table_names_masks(tmp_path: Path) -> None:
    write(tmp_path, {"1": 1, "2": 2})
    path = tmp_path / "t.csv"
    path.write_text("image,mask\nimages/1.png,masks/1.png\nimages/2.png,masks/2.png\n")
    splits = load(path, kind="segmentation", ignore=3, classes=["near", "far"], values=[2, 1])
    assert splits.classes == ("near", "far")
    assert np.asarray(splits["train"].mask(0)).max() == 2
    assert np.asarray(splits["train"].mask(0))[-1, -1] == 1  # the value 2 is the first class
    path.write_text("image,mask\nimages/1.png,masks/9.png\n")
    with pytest.raises(EngramError, match=r"row 1: .*masks/9\.png does not exist"):
        load(path, kind="segmentation")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64])
def test_arrays_hold_masks(tmp_path: Path, dtype: type[Any]) -> None:
    scenes = [scene(i) for i in range(3)]
    x, y = (np.stack(part) for part in zip(*scenes, strict=True))
    np.savez(tmp_path / "a.npz", images=x, labels=y.astype(dtype))
    splits = load(tmp_path / "a.npz", kind="segmentation", ignore=3)
    assert splits.classes == ("1", "2")
    assert len(splits.with_validation(0.4)["val"]) == 1
    expected = np.where(y[0] == 3, 0, y[0])
    assert np.array_equal(np.asarray(splits["train"].mask(0)), expected)


@pytest.mark.parametrize(
    ("masks", "sentence"),
    [
        (np.full((1, 4, 4), -1), "the masks hold int64 values from -1 to -1; expected integers"),
        (np.full((1, 4, 4), 2**16), "int64 values from 65536 to 65536"),
        (np.full((1, 4, 4), 0.5), "float64 values from 0.5 to 0.5"),
    ],
)
def test_arrays_that_are_no_masks_are_a_sentence(
    tmp_path: Path, masks: np.ndarray, sentence: str
) -> None:
    np.savez(tmp_path / "a.npz", images=np.zeros((1, 4, 4), np.uint8), labels=masks)
    with pytest.raises(EngramError, match=sentence):
        load(tmp_path / "a.npz", kind="segmentation")


def test_a_task_says_what_masks_mean(tmp_path: Path) -> None:
    root = write(tmp_path, {"1": 1})
    spec = TaskSpec("t", ("a", "b"), "segmentation", tokens=2, values=(2, 1), ignore=3)
    splits = load(root, split="test", like=spec)
    assert splits.legend == Legend((2, 1), 3)
    assert splits.task == {
        "classes": ("a", "b"),
        "kind": "segmentation",
        "values": (2, 1),
        "ignore": 3,
    }


# How they are seen


@pytest.mark.parametrize("augment", ["none", "inception", "pad-crop"])
@pytest.mark.parametrize("seed", range(6))
def test_a_mask_is_seen_as_its_picture_is(augment: str, seed: int) -> None:
    pixels, mask = scene(seed, (64, 48))
    numbered = Legend((1, 2), 3).read(mask, (48, 64), "m")
    sharp = Preprocessing((32, 32), None, interpolation="nearest")
    view = training_view(pixels, sharp, np.random.default_rng(seed), augment)
    seen = mask_view(numbered, sharp, np.random.default_rng(seed), augment)
    # The picture's red is 80 for the first class, 160 for the second, 240 where it is ignored.
    told = np.full(256, 255)
    told[[80, 160]] = 0, 1
    assert np.array_equal(seen, told[view[..., 0]])
    assert set(np.unique(seen)) <= {0, 1, 255}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_has_the_masks_of_its_pictures(tmp_path: Path, workers: int) -> None:
    root = write(tmp_path, {f"{i}": i for i in range(5)})
    Image.fromarray(np.full((3, 3), 3, dtype=np.uint8)).save(root / "masks" / "4.png")
    dataset = load(root, kind="segmentation", ignore=3)["train"]
    loader = Loader(dataset, PREPROCESSING, 4, mode="train", workers=workers, seed=1)
    images = labels = 0
    for batch in loader.epoch(2):
        assert batch.labels.dtype == torch.uint8
        assert batch.labels.shape == (len(batch.images), 16, 16)
        images, labels = images + len(batch.images), labels + len(batch.labels)
    assert images == labels == 4
    assert list(loader.bad) == [str(root / "images" / "4.png")]


@pytest.mark.parametrize("mode", ["1", "L", "P", "I;16"])
def test_the_numbers_of_every_kind_of_gray_are_read(mode: str, tmp_path: Path) -> None:
    values = np.array([[0, 1], [1, 0]], dtype=np.uint8)
    image = Image.fromarray(values)
    if mode == "P":
        image.putpalette(bytes(range(255, -1, -1)) * 3)
    elif mode == "1":
        image = Image.fromarray(values * 255).convert("1")
    elif mode == "I;16":
        image = Image.fromarray(values.astype(np.uint16) * 300)
    image.save(tmp_path / "m.png")
    scale = 300 if mode == "I;16" else 1
    assert read_mask(tmp_path / "m.png").tolist() == (values * np.int64(scale)).tolist()


# What is wrong


def test_what_is_wrong_with_a_mask_is_a_sentence(tmp_path: Path) -> None:
    legend = Legend((1, 2), 3)
    for mask, sentence in (
        (np.full((4, 5), 3, np.uint8), "every pixel of the mask is 3, which is ignored"),
        (
            np.full((4, 5), 9, np.uint8),
            r"the mask holds the value 9, which is no class \(1, 2\) and not the",
        ),
        (np.full((4, 4), 1, np.uint8), "the mask has 4x4 pixels, but its picture 5x4"),
        (
            np.zeros((4, 5, 3), np.uint8),
            r"a mask needs one number a pixel \(gray, or a palette\), and this is RGB",
        ),
        (  # a table of so many values would fill the memory
            Image.fromarray(np.full((4, 5), 2**31 - 1, np.int32)),
            "a mask holds values from 0 to 65,535, and this has 2147483647",
        ),
    ):
        with pytest.raises(BadImage, match=f"m.png: {sentence}"):
            legend.read(mask, (5, 4), "m.png")
    Image.fromarray(np.ones((8, 8), np.uint8)).save(tmp_path / "m.jpg")
    with pytest.raises(BadImage, match="a mask cannot be a JPEG"):
        read_mask(tmp_path / "m.jpg")


def _break(root: Path, how: str) -> None:
    if how == "missing":
        (root / "masks" / "2.png").unlink()
    elif how == "twice":
        Image.fromarray(scene(1)[1]).save(root / "masks" / "1.bmp")
    elif how == "no masks":
        for path in (root / "masks").iterdir():
            path.unlink()
        (root / "masks").rmdir()
    elif how == "no pictures":
        for path in (root / "images").iterdir():
            path.unlink()
    elif how == "ignored":
        for path in (root / "masks").iterdir():
            Image.fromarray(np.ones((20, 24), dtype=np.uint8)).save(path)
    elif how == "colours":
        for path in (root / "masks").iterdir():
            Image.fromarray(scene(1)[0]).save(path)
    elif how == "photographs":
        noise = np.arange(4096, dtype=np.uint16).reshape(64, 64)
        Image.fromarray(noise).save(root / "masks" / "1.png")


@pytest.mark.parametrize(
    ("how", "terms", "sentence"),
    [
        ("missing", {}, r"images/2\.png has no mask of the same name in .*masks\.$"),
        ("twice", {}, "are masks of the same image; keep one"),
        ("no masks", {}, "has no folders images/ and masks/"),
        ("no pictures", {}, "images contains no images"),
        ("ignored", {"ignore": 1}, "the masks hold nothing but 1, which is ignored"),
        ("colours", {}, r"masks/1\.png: a mask needs one number a pixel .*, and this is RGB"),
        ("", {"ignore": 70000}, "70000 is not a value of a mask; they go from 0 to 65,535"),
        ("", {"ignore": 3, "values": [1, -2]}, "-2 is not a value of a mask"),
        ("photographs", {}, "the masks hold 4095 values, and at most 255 classes"),
        ("", {"classes": ["a"], "ignore": 3}, r"1 names for 2 classes \(the values 1, 2 in its m"),
        ("", {"split": "val", "ignore": 3, "splits": {"val": "x"}}, ""),
    ],
)
def test_masks_that_are_not_there_are_a_sentence(
    tmp_path: Path, how: str, terms: dict[str, Any], sentence: str
) -> None:
    root = write(tmp_path, {"1": 1, "2": 2})
    _break(root, how)
    if not sentence:
        assert len(load(root, kind="segmentation", **terms)["val"]) == 2
        return
    with pytest.raises(EngramError, match=sentence):
        load(root, kind="segmentation", **terms)


def test_two_folders_have_to_be_folders(tmp_path: Path) -> None:
    root = write(tmp_path, {"1": 1})
    for spec, sentence in (
        (f"{root}/images::{root}/nothing", "nothing is not a folder; give the folder of the masks"),
        (
            f"{root}/nothing::{root}/masks",
            "nothing is not a folder; give two folders as IMAGES",
        ),
    ):
        with pytest.raises(EngramError, match=sentence):
            load(spec, kind="segmentation")


def test_a_transform_of_your_own_has_no_masks(tmp_path: Path) -> None:
    dataset = load(write(tmp_path, {"1": 1}), kind="segmentation", ignore=3)["train"]
    with pytest.raises(EngramError, match="changes pictures but not their masks"):
        Loader(dataset, PREPROCESSING, 1, transform=np.asarray)
