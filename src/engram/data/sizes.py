"""How large the images of some data are, from the headers of a few of them."""

from __future__ import annotations

import statistics

import numpy as np

from engram.data.datasets import Dataset, Splits
from engram.data.source import SPLITS
from engram.images.decode import BadImage, image_size

_SAMPLE = 32


def typical_side(splits: Splits) -> float | None:
    """The median of the longer sides of a sample of the images; None if none can be read."""
    datasets = (getattr(splits, name) for name in SPLITS)
    dataset = next((one for one in datasets if one is not None and len(one)), None)
    if dataset is None:
        return None
    chosen = np.linspace(0, len(dataset) - 1, min(_SAMPLE, len(dataset))).astype(int)
    sides = [side for i in chosen if (side := _side(dataset, int(i))) is not None]
    return statistics.median(sides) if sides else None


def _side(dataset: Dataset, i: int) -> int | None:
    stored = dataset.read(i)
    if isinstance(stored, np.ndarray):
        return int(max(stored.shape[:2]))
    try:
        return max(image_size(stored))
    except BadImage:  # training will list it
        return None
