"""Heat maps: how anomalous the patches of an image are, as a PNG that shows it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image

from engram.images.masks import palette_png

_SCALE = 8  # pixels of the PNG along a side of a patch
#: Colours from 0 over the threshold (128) to twice the threshold, as (value, red, green, blue).
_STOPS = (
    (0, 12, 8, 38),
    (64, 72, 20, 92),
    (128, 170, 46, 86),
    (192, 243, 120, 32),
    (255, 252, 238, 150),
)


def heat_palette() -> npt.NDArray[np.uint8]:
    """The colour of every value of a heat map: (256, 3)."""
    values, *channels = np.array(_STOPS, dtype=np.float64).T
    return np.stack(
        [np.interp(np.arange(256), values, one).round() for one in channels], axis=1
    ).astype(np.uint8)


def heat_map(relative: npt.NDArray[np.float32], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Values of a heat map of this (height, width): 128 where patches reach 1, 255 from 2 on."""
    field = Image.fromarray(np.clip(relative, 0, 2).astype(np.float32))
    smooth = np.asarray(field.resize(size[::-1], Image.Resampling.BILINEAR))
    values: npt.NDArray[np.uint8] = np.clip(smooth * 128, 0, 255).astype(np.uint8)
    return values


def heat_map_png(relative: npt.NDArray[np.float32]) -> bytes:
    """A PNG of distances (rows, columns) as multiples of the threshold, with a palette."""
    rows, columns = relative.shape
    return palette_png(heat_map(relative, (_SCALE * rows, _SCALE * columns)), heat_palette())
