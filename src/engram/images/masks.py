"""Segmentation masks: read them, map their values to classes, crop them like their image."""

from __future__ import annotations

import colorsys
import io
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from PIL import Image

from engram.images.decode import BadImage, ImageSource, Pixels, opened, orientation, upright
from engram.images.preprocessing import Preprocessing
from engram.images.views import Augmentation, training_view
from engram.util.text import join_names

#: The values that a mask can have: those of 16 bits.
MASK_VALUES = 2**16


def palette(classes: int) -> Pixels:
    """A colour for every class, always the same: (classes, 3)."""
    hues = [(0.62 + 0.381966 * i) % 1 for i in range(classes)]  # the golden angle: far apart
    return np.array(
        [[int(255 * value) for value in colorsys.hsv_to_rgb(hue, 0.75, 0.95)] for hue in hues],
        dtype=np.uint8,
    ).reshape(-1, 3)


def mask_png(mask: npt.NDArray[np.uint8], classes: int) -> bytes:
    """A PNG of the class of every pixel (height, width), with `palette` as its colours."""
    return palette_png(mask, palette(classes))


def palette_png(values: npt.NDArray[np.uint8], colours: Pixels) -> bytes:
    """A PNG of values (height, width), shown as these colours (values, 3)."""
    image = Image.fromarray(values).convert("L")
    image.putpalette(colours.tobytes())
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    return stream.getvalue()


def read_mask(source: ImageSource, *, name: str | None = None) -> npt.NDArray[np.int64]:
    """The value of every pixel of a mask: (height, width). Whatever is wrong is a BadImage.

    It is gray of 8 or 16 bits, black and white (0 and 1), or the index in a palette.
    """
    with opened(source, name) as image:
        if image.format == "JPEG":
            raise ValueError("a mask cannot be a JPEG, which changes values; use PNG")
        if image.mode not in ("1", "L", "P", "I", "I;16", "I;16B"):
            raise ValueError(
                f"a mask needs one integer per pixel (gray, or a palette), and this is {image.mode}"
            )
        image.load()
        values = np.asarray(upright(image, orientation(image))).astype(np.int64)
        for value in (int(values.min()), int(values.max())):
            if not 0 <= value < MASK_VALUES:
                raise ValueError(f"a mask holds values from 0 to 65,535, and this has {value}")
        return values


@dataclass(frozen=True)
class Legend:
    """Meaning of the values in masks: `values[c]` is class c, `ignore` marks ignored pixels."""

    values: tuple[int, ...]
    ignore: int

    def read(self, mask: ImageSource, size: tuple[int, int], name: str) -> Image.Image:
        """The mask of an image of this size (width, height): class + 1 per pixel, 0 if ignored."""
        values = read_mask(mask, name=name)
        height, width = values.shape
        if (width, height) != size:
            raise BadImage(
                f"{name}: the mask has {width}x{height} pixels, but its image has "
                f"{size[0]}x{size[1]}"
            )
        table = np.full(MASK_VALUES, -1, dtype=np.int16)
        table[list(self.values)] = np.arange(1, len(self.values) + 1)
        table[self.ignore] = 0
        classes = table[values]
        if (classes < 0).any():
            raise BadImage(
                f"{name}: the mask holds the value {values[classes < 0][0]}, which is neither a "
                f"class ({join_names(self.values, 8)}) nor the ignored value {self.ignore}"
            )
        if not classes.any():
            raise BadImage(
                f"{name}: every pixel of the mask is {self.ignore}, which is ignored, so there is "
                "nothing to learn from"
            )
        return Image.fromarray(classes.astype(np.uint8))


def mask_view(
    mask: Image.Image,
    preprocessing: Preprocessing,
    rng: np.random.Generator,
    augmentation: Augmentation = Augmentation("none"),  # noqa: B008 (it cannot be changed)
) -> Pixels:
    """The view of a mask (from `Legend.read`) that `training_view` is of its image.

    With an `rng` in the same state it is the same crop, mirrored or not. The result (height,
    width) has the class of every pixel, and 255 where a pixel is ignored, as is what `pad-crop`
    adds around the image.
    """
    exact = replace(preprocessing, interpolation="nearest")
    view = training_view(mask, exact, rng, augmentation)
    return view[..., 0] - np.uint8(1)  # 0, which is also black, becomes 255
