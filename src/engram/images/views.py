"""The views a ViT sees: the evaluation crop, and random crops for training.

Every view is one decode and one resize: the crop is worked out from the header, JPEGs are decoded
at a fraction of their size where that loses nothing, and the crop is resized straight to the
target. Pixels stay uint8 until `normalise`, which works on a whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from PIL import Image

from engram.errors import EngramError
from engram.images.decode import (
    MAX_PIXELS,
    ImageSource,
    Pixels,
    opened,
    orientation,
    to_rgb,
    upright,
)
from engram.images.preprocessing import INTERPOLATIONS, Preprocessing

Box: TypeAlias = tuple[float, float, float, float]  # left, top, right, bottom


AUGMENTATIONS = ("none", "inception", "pad-crop")

# A JPEG is decoded at 1/2, 1/4 or 1/8 only while it stays this much larger than what is asked
# for: the decoder's own reduction is a box filter, and the resize after it hides the difference.
_DRAFT_MARGIN = 2.0


def evaluation_view(
    source: ImageSource, preprocessing: Preprocessing, *, name: str | None = None
) -> Pixels:
    """Resize and centre crop: the same pixels every time. A bad picture is a BadImage."""
    return _view(source, lambda w, h: evaluation_box(w, h, preprocessing), preprocessing, name)


def evaluation_box(width: int, height: int, preprocessing: Preprocessing) -> Box:
    """The part of an upright picture that `evaluation_view` shows, in the picture's pixels."""
    if preprocessing.resize is None:
        return (0, 0, width, height)
    # The crop of the resized picture, in the coordinates of the original.
    scale = preprocessing.resize / min(width, height)
    wide, high = round(width * scale), round(height * scale)
    crop_high, crop_wide = preprocessing.size
    left, top = (wide - crop_wide) // 2, (high - crop_high) // 2
    x, y = width / wide, height / high
    return (left * x, top * y, (left + crop_wide) * x, (top + crop_high) * y)


def training_view(
    source: ImageSource,
    preprocessing: Preprocessing,
    rng: np.random.Generator,
    augment: str = "inception",
    *,
    flip: bool = True,
    min_area: float = 0.08,
    name: str | None = None,
) -> Pixels:
    """A random view that depends on nothing but `rng`. A bad picture is a BadImage.

    "inception" crops a random `min_area`..1 of the picture at an aspect of 3/4..4/3; "pad-crop"
    shifts the whole picture by up to an eighth of its size over black, for small pictures; "none"
    is the evaluation view. The first two mirror half of the views unless `flip` is False.
    """
    if augment == "none":
        return evaluation_view(source, preprocessing, name=name)
    if augment == "inception":
        view = _view(source, lambda w, h: _random_box(w, h, rng, min_area), preprocessing, name)
    elif augment == "pad-crop":
        view = pad_crop(source, preprocessing, rng, name=name)
    else:
        raise EngramError(f"augment is {augment!r}; it can be {', '.join(AUGMENTATIONS)}")
    if flip and rng.random() < 0.5:
        view = np.ascontiguousarray(view[:, ::-1])
    return view


def pad_crop(
    source: ImageSource,
    preprocessing: Preprocessing,
    rng: np.random.Generator,
    *,
    share: float = 0.125,  # 4 pixels of a CIFAR picture's 32
    name: str | None = None,
) -> Pixels:
    """The picture at the target size, padded with black by `share` and cropped at random."""
    height, width = preprocessing.size
    view = _view(source, lambda w, h: _centred_box(w, h, width / height), preprocessing, name)
    pad_y, pad_x = round(share * height), round(share * width)
    top, left = int(rng.integers(2 * pad_y + 1)), int(rng.integers(2 * pad_x + 1))
    padded = np.pad(view, ((pad_y, pad_y), (pad_x, pad_x), (0, 0)))
    return np.ascontiguousarray(padded[top : top + height, left : left + width])


def _random_box(width: int, height: int, rng: np.random.Generator, min_area: float) -> Box:
    for _ in range(10):
        area = rng.uniform(min_area, 1) * width * height
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return (left, top, left + w, top + h)
    return _centred_box(width, height, 4 / 3 if width > height else 3 / 4)  # a very long picture


def _centred_box(width: int, height: int, aspect: float) -> Box:
    """The largest centred part of this shape."""
    w, h = min(width, height * aspect), min(height, width / aspect)
    return ((width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2)


def _view(
    source: ImageSource,
    place: Callable[[int, int], Box],
    preprocessing: Preprocessing,
    name: str | None,
) -> Pixels:
    """Decode no more than needed, and resize the box that `place` chooses to the target size."""
    high, wide = preprocessing.size
    with opened(source, name, MAX_PIXELS) as image:
        turn = orientation(image)
        width, height = image.size[::-1] if turn >= 5 else image.size
        left, top, right, bottom = place(width, height)
        if not isinstance(source, Image.Image):  # draft would change the caller's picture
            scale = _DRAFT_MARGIN * max(wide / (right - left), high / (bottom - top))
            if scale < 1:
                image.draft(None, (math.ceil(image.width * scale), math.ceil(image.height * scale)))
        picture = upright(to_rgb(image), turn)
        x, y = picture.width / width, picture.height / height
        right, bottom = min(right * x, picture.width), min(bottom * y, picture.height)  # rounding
        method = INTERPOLATIONS[preprocessing.interpolation]
        return np.array(picture.resize((wide, high), method, (left * x, top * y, right, bottom)))
