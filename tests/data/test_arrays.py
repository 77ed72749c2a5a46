"""Arrays of every layout are read; wrong ones are refused with the reason."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.masks import image_with_mask

from engram.data.arrays import DIGITS
from engram.data.datasets import load
from engram.errors import EngramError
from engram.images.decode import read_image


@pytest.mark.parametrize("shape", [(9, 7), (9, 7, 1), (9, 7, 3), (3, 9, 7), (1, 9, 7)])
@pytest.mark.parametrize("kind", [np.uint8, np.float32, np.int64])
def test_arrays_of_every_layout_are_read(
    tmp_path: Path, shape: tuple[int, ...], kind: type[Any]
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, *shape))
    stored = pixels / 255 if kind is np.float32 else pixels
    np.savez(
        tmp_path / "a.npz", x_train=stored.astype(kind), y_train=np.array([[0], [1], [1], [0]])
    )
    train = load(tmp_path / "a.npz")["train"]
    image = np.asarray(read_image(train.read(2)))
    expected = np.moveaxis(pixels[2], 0, -1) if shape[0] in (1, 3) else pixels[2]
    expected = expected if expected.ndim == 3 else expected[..., None]
    assert (image == expected).all()
    assert train.labels.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    "keys",
    [
        ("x_train", "y_train", "x_test", "y_test"),
        ("train_images", "train_labels", "test_images", "test_labels"),
    ],
)
def test_arrays_have_splits_and_class_names(tmp_path: Path, keys: tuple[str, ...]) -> None:
    x, y = np.zeros((3, 4, 4), np.uint8), np.array([1, 0, 1])
    arrays = dict(zip(keys, (x, y, x, y), strict=True))
    np.savez(tmp_path / "a.npz", **arrays, class_names=np.array(["no", "yes"]))  # type: ignore[arg-type]
    splits = load(tmp_path / "a.npz")
    assert splits.classes == ("no", "yes")
    assert splits["test"].labels.tolist() == [1, 0, 1]


def test_names_in_arrays_may_be_bytes(tmp_path: Path) -> None:
    x = np.zeros((3, 4, 4), np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.char.encode(["löwe", "cat", "cat"], "utf-8"))
    assert load(tmp_path / "a.npz").classes == ("cat", "löwe")
    names = np.array([b"no", b"yes"])
    np.savez(tmp_path / "b.npz", x=x, y=np.array([1, 0, 1]), class_names=names)
    assert load(tmp_path / "b.npz").classes == ("no", "yes")


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"a": np.zeros(3)}, "has the arrays a"),
        ({"x": np.zeros((2, 4)), "y": np.arange(2)}, r"has the shape \(2, 4\)"),
        ({"x": np.full((2, 4, 4), 9.0), "y": np.arange(2)}, "float64 values from 9.0 to 9.0"),
        ({"x": np.zeros((2, 4, 4)), "y": np.arange(3)}, "2 images need as many labels"),
        (
            {"x": np.zeros((2, 4, 4)), "y": np.array([0, 5]), "classes": np.array(["a", "b"])},
            "label 5 is none of 2 classes",
        ),
        ({"x": np.zeros((0, 4, 4)), "y": np.zeros(0)}, "the train split is empty"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, arrays: dict[str, Any], sentence: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(EngramError, match=sentence):
        load(tmp_path / "a.npz")


def saved(save: Callable[..., None]) -> bytes:
    file = io.BytesIO()
    save(file, np.arange(9999))
    return file.getvalue()


NPZ = saved(np.savez_compressed)


@pytest.mark.parametrize(
    "data",
    [
        b"PK not really",
        b"",
        saved(np.save),
        NPZ[:-99],
        NPZ[:200] + bytes(100) + NPZ[300:],
    ],
    ids=["text", "empty", "npy", "truncated", "damaged"],
)
def test_a_file_that_is_not_npz_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(EngramError, match=r"a\.npz cannot be read as \.npz arrays"):
        load(tmp_path / "a.npz")


def test_arrays_that_expand_too_far_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they are read: 4 MB could hold 4 GB."""
    x = np.zeros((10, 1000, 1000), np.uint8)
    np.savez_compressed(tmp_path / "a.npz", x_train=x, y_train=np.arange(10) % 2)
    assert len(load(tmp_path / "a.npz")["train"]) == 10
    monkeypatch.setattr("engram.util.zip_files.MAX_SMALL", 1_000_000)
    with pytest.raises(EngramError, match="expands to 10 MB"):
        load(tmp_path / "a.npz")


@pytest.mark.parametrize("shape", [(10**13,), (2**62, 2**62), (0, 10**30)])
def test_an_array_that_claims_more_than_it_holds_is_refused(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    header = io.BytesIO()
    claim = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, claim)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name in ("x_train", "y_train"):
            archive.writestr(f"{name}.npy", header.getvalue() + bytes(80))
    with pytest.raises(EngramError, match=r"a\.npz cannot be read as \.npz arrays"):
        load(tmp_path / "a.npz")


def test_digits_come_with_the_package() -> None:
    splits = load("digits")
    assert (len(splits["train"]), len(splits["test"])) == (1433, 364)
    assert splits.classes == tuple("0123456789")
    assert np.bincount(splits["test"].labels).min() >= 35  # every fifth of about 180
    assert (splits.augment, splits.flip) == ("pad-crop", False)
    assert np.asarray(read_image(splits["train"].read(0))).max() > 200


def test_digits_are_those_of_scikit_learn() -> None:
    original = pytest.importorskip("sklearn.datasets").load_digits()
    with np.load(DIGITS) as bundled:
        assert np.array_equal(bundled["images"], original.images)
        assert np.array_equal(bundled["labels"], original.target)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64])
def test_labels_can_be_an_array_of_masks(tmp_path: Path, dtype: type[Any]) -> None:
    scenes = [image_with_mask(i) for i in range(3)]
    x, y = (np.stack(part) for part in zip(*scenes, strict=True))
    np.savez(tmp_path / "a.npz", images=x, labels=y.astype(dtype))
    splits = load(tmp_path / "a.npz", kind="segmentation", ignore=3)
    assert splits.classes == ("1", "2")
    held_out = splits.with_validation(0.4)
    assert (len(held_out["train"]), len(held_out["val"])) == (2, 1)
    expected = np.where(y[0] == 3, 0, y[0])
    assert np.array_equal(np.asarray(splits["train"].mask(0)), expected)


@pytest.mark.parametrize(
    ("masks", "sentence"),
    [
        (np.full((1, 4, 4), -1), "the masks hold int64 values from -1 to -1"),
        (np.full((1, 4, 4), 2**16), "int64 values from 65536 to 65536"),
        (np.full((1, 4, 4), 0.5), "float64 values from 0.5 to 0.5"),
    ],
)
def test_arrays_that_are_not_masks_are_refused(
    tmp_path: Path, masks: np.ndarray, sentence: str
) -> None:
    np.savez(tmp_path / "a.npz", images=np.zeros((1, 4, 4), np.uint8), labels=masks)
    with pytest.raises(EngramError, match=sentence):
        load(tmp_path / "a.npz", kind="segmentation")
