"""Images with known pixels."""

import io

import numpy as np
from PIL import Image


def gradient(width: int = 40, height: int = 30) -> Image.Image:
    """Red grows to the right, green grows downwards, blue is constant."""
    red = np.linspace(0, 255, width)[None].repeat(height, 0)
    green = np.linspace(0, 255, height)[:, None].repeat(width, 1)
    blue = np.full((height, width), 100.0)
    return Image.fromarray(np.rint(np.stack([red, green, blue], -1)).astype(np.uint8))


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()
