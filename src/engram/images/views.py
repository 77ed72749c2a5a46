"""The views of an image that a ViT sees: the evaluation crop, and random crops for training.

Every view is one decode and one resize: the crop is computed from the header, JPEGs are decoded at
a fraction of their size where that loses nothing, and the crop is resized straight to the target.
Pixels stay uint8 until `normalise`, which works on a whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from PIL import Image

from engram.errors import EngramError
from engram.images.decode import ImageSource, Pixels, opened, orientation, to_rgb, upright
from engram.images.preprocessing import INTERPOLATIONS, Preprocessing

Box: TypeAlias = tuple[float, float, float, float]  # left, top, right, bottom

AUGMENTATIONS = ("none", "inception", "pad-crop")


@dataclass(frozen=True)
class Augmentation:
    """Random crops of training views.

    "inception" crops a random `min_area`..1 of the image at an aspect ratio of 3/4..4/3;
    "pad-crop" shifts the whole image by up to an eighth of its size over black, for small images;
    "none" is the evaluation view. The first two mirror half of the views if `flip` is true.
    """

    name: str = "inception"
    flip: bool = True
    min_area: float = 0.08

    def __post_init__(self) -> None:
        if self.name not in AUGMENTATIONS:
            raise EngramError(f"augment is {self.name!r}; it can be {', '.join(AUGMENTATIONS)}.")


# A JPEG is decoded at 1/2, 1/4 or 1/8 of its size only while it stays this much larger than the
# view: the decoder reduces with a box filter, and the resize after it hides the difference.
_DRAFT_MARGIN = 2.0


def evaluation_view(
    source: ImageSource, preprocessing: Preprocessing, *, name: str | None = None
) -> Pixels:
    """Resize and centre crop: the same pixels every time. A bad image is a BadImage.

    Args:
        source: A path, encoded bytes, an open file, an image of Pillow, or pixels.
        preprocessing: The size, the resize before the crop, and the interpolation.
        name: The name of the image in errors.

    Returns:
        uint8 pixels (height, width, 3); `normalise` takes a batch of them.
    """
    return _view(source, lambda w, h: evaluation_box(w, h, preprocessing), preprocessing, name)


def evaluation_box(width: int, height: int, preprocessing: Preprocessing) -> Box:
    """The part of an upright image that `evaluation_view` shows, in the image's pixels."""
    if preprocessing.resize is None:
        return (0, 0, width, height)
    # The centre crop of the resized image, in the coordinates of the original.
    scale = preprocessing.resize / min(width, height)
    resized_width, resized_height = round(width * scale), round(height * scale)
    crop_height, crop_width = preprocessing.size
    left, top = (resized_width - crop_width) // 2, (resized_height - crop_height) // 2
    x, y = width / resized_width, height / resized_height
    return (left * x, top * y, (left + crop_width) * x, (top + crop_height) * y)


def training_view(
    source: ImageSource,
    preprocessing: Preprocessing,
    rng: np.random.Generator,
    augmentation: Augmentation,
    name: str | None = None,
) -> Pixels:
    """A random view that depends on nothing but `rng`. A bad image is a BadImage."""
    if augmentation.name == "none":
        return evaluation_view(source, preprocessing, name=name)
    if augmentation.name == "pad-crop":
        view = pad_crop(source, preprocessing, rng, name=name)
    else:
        area = augmentation.min_area
        view = _view(source, lambda w, h: random_box(w, h, rng, area), preprocessing, name)
    if augmentation.flip and rng.random() < 0.5:
        view = np.ascontiguousarray(view[:, ::-1])
    return view


def pad_crop(
    source: ImageSource,
    preprocessing: Preprocessing,
    rng: np.random.Generator,
    name: str | None = None,
) -> Pixels:
    """The image at the target size, padded with black by an eighth and cropped at random."""
    height, width = preprocessing.size
    view = _view(source, lambda w, h: _centred_box(w, h, width / height), preprocessing, name)
    pad_y, pad_x = round(height / 8), round(width / 8)  # 4 of the 32 pixels of CIFAR
    top, left = int(rng.integers(2 * pad_y + 1)), int(rng.integers(2 * pad_x + 1))
    padded = np.pad(view, ((pad_y, pad_y), (pad_x, pad_x), (0, 0)))
    return np.ascontiguousarray(padded[top : top + height, left : left + width])


def random_box(width: int, height: int, rng: np.random.Generator, min_area: float) -> Box:
    """A random part of `min_area`..1 of the area, at an aspect ratio of 3/4..4/3."""
    for _ in range(10):
        area = rng.uniform(min_area, 1) * width * height
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return (left, top, left + w, top + h)
    return _centred_box(width, height, 4 / 3 if width > height else 3 / 4)  # a very long image


def _centred_box(width: int, height: int, aspect: float) -> Box:
    """The largest centred part of this aspect ratio."""
    w, h = min(width, height * aspect), min(height, width / aspect)
    return ((width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2)


def _view(
    source: ImageSource,
    choose_box: Callable[[int, int], Box],
    preprocessing: Preprocessing,
    name: str | None,
) -> Pixels:
    """Resize the box that `choose_box` gives to the target size, decoding no more than needed."""
    view_height, view_width = preprocessing.size
    with opened(source, name) as image:
        turn = orientation(image)
        width, height = image.size[::-1] if turn >= 5 else image.size
        left, top, right, bottom = choose_box(width, height)
        # A draft would change the caller's image, and of HEIC it would be a thumbnail.
        if not isinstance(source, Image.Image) and image.format != "HEIF":
            scale = _DRAFT_MARGIN * max(view_width / (right - left), view_height / (bottom - top))
            if scale < 1:
                image.draft(None, (math.ceil(image.width * scale), math.ceil(image.height * scale)))
        decoded = upright(to_rgb(image), turn)
        x, y = decoded.width / width, decoded.height / height
        # Rounding can put the box a little outside.
        right, bottom = min(right * x, decoded.width), min(bottom * y, decoded.height)
        box = (left * x, top * y, right, bottom)
        method = INTERPOLATIONS[preprocessing.interpolation]
        return np.array(decoded.resize((view_width, view_height), method, box))
