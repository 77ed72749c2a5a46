"""Arrays of pixels and labels: .npz files, and the bundled digits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engram.data.labels import LABELS, read_labels
from engram.data.source import SPLITS, Arrays, DataRequest, FoundData, FoundSplit
from engram.errors import EngramError
from engram.images.inputs import to_uint8
from engram.images.masks import MASK_VALUES
from engram.util.text import explained
from engram.util.zip_files import check_archive

Array: TypeAlias = npt.NDArray[Any]

DIGITS = Path(__file__).with_name("digits.npz")  # NOTICE says whose they are


def read_npz(path: Path, request: DataRequest) -> FoundData:
    """Read x_train, y_train, … or train_images, train_labels, … or images, labels."""
    arrays = _arrays_in(path)
    listed = arrays.get("class_names", arrays.get("classes"))
    classes = None if listed is None else [str(name) for name in listed]
    candidates = [
        (split, pair)
        for split, names in SPLITS.items()
        for name in names
        for pair in ((f"x_{name}", f"y_{name}"), (f"{name}_images", f"{name}_labels"))
    ]
    keys = {split: pair for split, pair in candidates if set(pair) <= arrays.keys()}
    by = "the names of the arrays" if keys else ""
    if not keys:
        pairs = [pair for pair in (("images", "labels"), ("x", "y")) if set(pair) <= arrays.keys()]
        if not pairs:
            raise EngramError(
                f"{path} has the arrays {', '.join(arrays)}; expected x_train and y_train "
                "(x_test, …), train_images and train_labels, or images and labels."
            )
        keys = {"train": pairs[0]}
    splits = {
        split: read_arrays(f"{path}:{x}", arrays[x], arrays[y], classes, request)
        for split, (x, y) in keys.items()
    }
    return FoundData(splits, split_by=by)


def _arrays_in(path: Path) -> dict[str, Array]:
    with explained(lambda error: f"{path} cannot be read as .npz arrays: {error}."):
        check_archive(path)
        with np.load(path, allow_pickle=False) as file:
            arrays = {key.lower(): file[key] for key in file.files}
        return {  # names of classes may be bytes
            key: np.char.decode(a, "utf-8", "backslashreplace") if a.dtype.kind == "S" else a
            for key, a in arrays.items()
        }


def read_digits(request: DataRequest) -> FoundData:
    """The 1,797 handwritten digits of UCI, 8x8 pixels; every fifth of a class is test data."""
    arrays = _arrays_in(DIGITS)
    images, labels = arrays["images"] / 16, arrays["labels"].astype(np.int64)
    test = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        test[np.flatnonzero(labels == digit)[::5]] = True
    splits = {
        split: read_arrays(f"digits/{split}", images[chosen], labels[chosen], None, request)
        for split, chosen in (("train", ~test), ("test", test))
    }
    by = "every fifth image of a class, which is test data"
    return FoundData(splits, augment="pad-crop", flip=False, split_by=by)


def read_arrays(
    name: str, images: Array, labels: Array, classes: Sequence[str] | None, request: DataRequest
) -> FoundSplit:
    """One split; two axes of labels have a column for each class."""
    dimensions = LABELS[request.kind].dimensions
    if 1 in dimensions and labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim not in dimensions or len(labels) != len(images):
        each = {1: "one per image", 2: "a row per image", 3: "a mask per image"}
        raise EngramError(
            f"{name}: {len(images)} images need as many labels, "
            f"{' or '.join(each[n] for n in dimensions)}; got labels of shape {labels.shape}."
        )
    rows = Arrays(_to_pixels(name, images), name)
    if request.has_masks:
        masks = Arrays(to_mask_values(name, labels), f"{name}, mask")
        return FoundSplit(rows, [None] * len(labels), masks)
    columns: Sequence[str] = ["label"]
    listed = classes if labels.dtype.kind in "iu" else None
    if labels.ndim == 2:
        columns, listed = classes or [str(i) for i in range(labels.shape[1])], None
        if len(columns) != labels.shape[1]:
            raise EngramError(
                f"{name}: {labels.shape[1]} columns of labels, but {len(columns)} class names."
            )
    cells = (dict(zip(columns, np.atleast_1d(row), strict=True)) for row in labels)
    found = read_labels(name, cells, listed, request)
    return FoundSplit(rows, found, classes=classes, label_columns=columns)


def _to_pixels(name: str, images: Array) -> torch.Tensor:
    """(N, H, W[, 1 or 3]) or (N, 1 or 3, H, W); uint8, or floats from 0 to 1, as uint8."""
    if images.ndim == 4 and images.shape[-1] not in (1, 3) and images.shape[1] in (1, 3):
        images = np.moveaxis(images, 1, -1)
    if images.ndim == 4 and images.shape[-1] == 1:
        images = images[..., 0]
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[-1] != 3):
        raise EngramError(
            f"{name} has the shape {images.shape}; expected (N, H, W), (N, H, W, 3) "
            "or (N, 3, H, W)."
        )
    return torch.from_numpy(np.ascontiguousarray(to_uint8(name, images)))


def to_mask_values(name: str, masks: Array) -> torch.Tensor:
    """(N, H, W) as uint8 or uint16, which an image of one channel can have."""
    low, high = (masks.min(), masks.max()) if masks.size else (0, 0)
    if masks.dtype.kind not in "biu" or not (low >= 0 and high < MASK_VALUES):
        raise EngramError(
            f"{name}: the masks hold {masks.dtype} values from {low} to {high}; "
            "expected integers from 0 to 65,535."
        )
    dtype = np.uint8 if high < 256 else np.uint16
    return torch.from_numpy(np.ascontiguousarray(masks, dtype=dtype))
