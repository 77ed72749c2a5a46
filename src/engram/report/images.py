"""Images of a page: what the backbone sees, masks and attention drawn over it, and thumbnails."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from engram.data.datasets import Dataset
from engram.images.decode import BadImage, Pixels
from engram.images.heat_maps import heat_map, heat_palette
from engram.images.masks import palette
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.model import MemoryViT
from engram.tasks.kind import IGNORED

_ATTENTION = np.array([255, 170, 40])  # the colour of attention
_GRAY = 128


@dataclass(frozen=True)
class Thumbnail:
    """A small image inside the page."""

    source: str  # a data: URL
    alt: str
    width: int
    height: int
    pixelated: bool  # so small that it is enlarged without smoothing


def thumbnail(pixels: Pixels, alt: str) -> Thumbnail:
    """Up to 64 pixels wide and high, images are kept as they are; larger ones are reduced."""
    image, stream = Image.fromarray(pixels), io.BytesIO()
    small = max(image.size) <= 64
    if small:
        image.save(stream, "PNG")
    else:
        image.thumbnail((160, 160))
        image.save(stream, "JPEG", quality=82)
    data = base64.b64encode(stream.getvalue()).decode()
    source = f"data:image/{'png' if small else 'jpeg'};base64,{data}"
    return Thumbnail(source, alt, image.width, image.height, small)


def backbone_view(model: MemoryViT, dataset: Dataset, sample: int) -> Pixels:
    """An image as the backbone sees it; gray if it cannot be read any more."""
    preprocessing = model.preprocessing
    try:
        return evaluation_view(dataset.read(sample), preprocessing)
    except BadImage:
        return np.full((*preprocessing.size, 3), _GRAY, dtype=np.uint8)


def backbone_views(
    model: MemoryViT, dataset: Dataset, samples: Iterable[int]
) -> tuple[list[Pixels], Tensor]:
    """Images as the backbone sees them, and their normalised pixels on its device."""
    views = [backbone_view(model, dataset, int(sample)) for sample in samples]
    pixels = normalise(torch.from_numpy(np.stack(views)), model.preprocessing)
    return views, pixels.to(model.backbone.device)


def paint_mask(view: Pixels, mask: Pixels) -> Pixels:
    """An image under the colours of its pixels' classes; ignored pixels are gray."""
    colours = np.full((256, 3), _GRAY, dtype=np.uint8)
    colours[:IGNORED] = palette(IGNORED)
    mixed: Pixels = np.rint(0.45 * view + 0.55 * colours[mask]).astype(np.uint8)
    return mixed


def paint_heat(view: Pixels, relative: Tensor) -> Pixels:
    """An image in gray under the heat map of distances (rows, columns), 1 at the threshold."""
    colours = heat_palette()[heat_map(relative.float().numpy(), (view.shape[0], view.shape[1]))]
    mixed: Pixels = np.rint(0.35 * view.mean(-1, keepdims=True) + 0.65 * colours).astype(np.uint8)
    return mixed


def paint_attention(view: Pixels, weights: Tensor) -> Pixels:
    """An image in gray, coloured where the weights (rows, columns) are high."""
    relative = (weights / weights.max().clamp(min=1e-12)).float().cpu().numpy()
    smooth = Image.fromarray(relative).resize(view.shape[1::-1], Image.Resampling.BILINEAR)
    opacity = 0.85 * np.clip(np.asarray(smooth), 0, 1)[..., None]
    gray = 30 + 0.5 * view.mean(-1, keepdims=True)
    mixed: Pixels = np.rint((1 - opacity) * gray + opacity * _ATTENTION).astype(np.uint8)
    return mixed
