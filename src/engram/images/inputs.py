"""Images as Python has them: paths, images of Pillow, arrays of numpy, tensors of torch.

An array is (height, width) or (height, width, channels), a tensor (height, width) or (channels,
height, width), each with 1, 3 or 4 channels; the other order is recognised where it cannot be
mistaken. Both hold integers from 0 to 255 or floats from 0 to 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from engram.errors import EngramError
from engram.images.decode import ImageSource

#: A path, encoded bytes, an image of Pillow, an array or a tensor.
ImageInput: TypeAlias = Any

_CHANNELS = (1, 3, 4)


def as_array(value: Any) -> npt.NDArray[Any] | None:
    """An array or a tensor as an array; None if it is neither."""
    torch = sys.modules.get("torch")  # who gives a tensor has imported it
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value  # numpy has no bfloat16
        array: npt.NDArray[Any] = value.numpy()
        return array
    return value if isinstance(value, np.ndarray) else None


def is_one_image(images: Any) -> bool:
    """Whether this is a single image, and not several of them."""
    if isinstance(images, (str, os.PathLike, bytes, Image.Image)):
        return True
    array = as_array(images)
    return array is not None and array.ndim < 4


def each_image(images: Any) -> Iterator[ImageInput]:
    """Images one after the other: of an iterable, a batch as one array or tensor, or a dataset."""
    numbered = isinstance(images, Sized) and hasattr(images, "__getitem__")
    if isinstance(images, dict) or not (numbered or isinstance(images, Iterable)):
        raise EngramError(
            f"Images were given as {type(images).__name__}; give a path, an image of Pillow, an "
            "array, a tensor, or a list or another iterable of these."
        )
    # A dataset may have numbered items, and no other way to ask for them.
    return (images[i] for i in range(len(images))) if numbered else iter(images)


def image_name(image: ImageInput, otherwise: str) -> str:
    """The name of an image in messages and answers: its path, if it has one."""
    if isinstance(image, (str, os.PathLike)):
        return os.fspath(image)
    return getattr(image, "filename", "") or otherwise


def decodable(image: ImageInput, name: str) -> ImageSource:
    """The image as `images.decode` takes it. An object that is none is an EngramError."""
    if isinstance(image, (str, os.PathLike, bytes, Image.Image)):
        return image
    array = as_array(image)
    if array is None:
        raise EngramError(
            f"{name} is of the type {type(image).__name__}; give a path, an image of Pillow, an "
            "array or a tensor."
        )
    array = to_uint8(name, _channels_last(name, array))
    return np.ascontiguousarray(array[..., 0] if array.shape[2:] == (1,) else array)


def _channels_last(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.ndim == 2 and array.size:
        return array
    first, last = (array.ndim == 3 and array.shape[axis] in _CHANNELS for axis in (0, -1))
    if first == last or not array.size:
        both = ", which may have its channels first or last" if first else ""
        raise EngramError(
            f"{name} has the shape {array.shape}{both}; expected (height, width), (height, width, "
            "3) or (3, height, width). Several images are given as a list, or as one array with "
            "four axes."
        )
    return np.moveaxis(array, 0, -1) if first else array


def to_uint8(name: str, values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Integers from 0 to 255, or floats from 0 to 1, as uint8; others are an EngramError."""
    if values.dtype == np.uint8 or not values.size:
        return values.astype(np.uint8, copy=False)
    highest = 1 if values.dtype.kind == "f" else 255
    found, advice = str(values.dtype) + " values", ""
    if values.dtype.kind in "fiu":
        low, high = values.min(), values.max()
        if low >= 0 and high <= highest:
            scaled: npt.NDArray[np.uint8] = np.rint(values * (255 / highest)).astype(np.uint8)
            return scaled
        found += f" from {low} to {high}"
        if low < 0 and values.dtype.kind == "f":
            advice = " Images are normalised later, as the backbone needs it: leave that out."
    raise EngramError(
        f"{name} holds {found}; expected integers from 0 to 255 or floats from 0 to 1.{advice}"
    )
