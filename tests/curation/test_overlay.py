"""Small grey pictures tell copies, cropped and mirrored ones too, from other pictures."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from engram.curation.overlay import overlays, small_grey


def picture(seed: int) -> Image.Image:
    """Smooth noise, in no way symmetrical."""
    coarse = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((240, 180), Image.Resampling.BICUBIC)


def stored_again(image: Image.Image) -> Image.Image:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=40)
    return Image.open(stream)


CHANGES = {
    "stored again": stored_again,
    "half the size": lambda image: image.resize((image.width // 2, image.height // 2)),
    "cropped": lambda image: image.crop((5, 14, 5 + 216, 14 + 162)),
    "cropped at one side": lambda image: image.crop((24, 0, 240, 180)),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_copy_is_the_same_picture(change: str) -> None:
    greys = {0: small_grey(picture(0)), 1: small_grey(CHANGES[change](picture(0)))}
    assert overlays(greys, [(0, 1)])[0] >= 0.97


def test_other_pictures_are_not_the_same() -> None:
    greys = {i: small_grey(picture(i)) for i in range(20)}
    pairs = [(i, j) for i in range(20) for j in range(i)]
    assert max(overlays(greys, pairs)) < 0.9


def test_pictures_of_one_colour_are_not_the_same() -> None:
    greys = {i: small_grey(Image.new("RGB", (20, 20), (40 * i, 0, 0))) for i in range(2)}
    assert overlays(greys, [(0, 1)]) == [0]
