"""Small datasets on disk and in memory."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from engram.data.datasets import Dataset
from engram.data.source import Arrays

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


def write_image(path: Path, colour: str = "red", shade: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    red, green, blue = COLOURS[colour]
    image = Image.new("RGB", (12, 10), (red, green, blue))
    image.putpixel((0, 0), (shade, shade, shade))  # no two images are the same
    image.save(path)
    return path


def write_class_folders(root: Path, counts: Mapping[str, int]) -> Path:
    """A folder per colour with so many images."""
    for colour, count in counts.items():
        for i in range(count):
            write_image(root / colour / f"{i:03}.png", colour, i)
    return root


def sample_names(dataset: Dataset | None) -> list[str]:
    assert dataset is not None
    return [dataset.sample_name(i) for i in range(len(dataset))]


def in_memory(labels: list[int], classes: int) -> Dataset:
    """A dataset of one gray image per label."""
    pixels = torch.arange(len(labels), dtype=torch.uint8)[:, None, None].expand(-1, 4, 4)
    return Dataset(
        "memory",
        "train",
        tuple(map(str, range(classes))),
        np.array(labels, dtype=np.int64),
        Arrays(pixels.contiguous(), "memory"),
        np.arange(len(labels)),
    )
