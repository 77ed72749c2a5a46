"""Images whose masks are known."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image


def image_with_mask(seed: int, size: tuple[int, int] = (20, 24)) -> tuple[np.ndarray, np.ndarray]:
    """An image and its mask of 1, 2, and 3 in the top row; red is 80 times the mask."""
    mask = np.ones(size, dtype=np.uint8)
    x, y = np.random.default_rng(seed).integers(4, 12, 2)
    mask[y:, x:] = 2
    mask[0] = 3
    pixels = np.zeros((*size, 3), dtype=np.uint8)
    pixels[..., 0] = mask * 80
    return pixels, mask


def write_masks(
    root: Path, names: Mapping[str, int], images: str = "images", masks: str = "masks"
) -> Path:
    """Two folders of images and masks; `names` maps the name of each image to its seed."""
    for name, seed in names.items():
        pixels, mask = image_with_mask(seed)
        for folder, array in ((images, pixels), (masks, mask)):
            path = root / folder / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(array).save(path)
    return root
