"""Masks are read, mapped to classes and cropped like their image; wrong ones are refused."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.masks import image_with_mask

from engram.images.decode import BadImage
from engram.images.masks import Legend, mask_view, read_mask
from engram.images.preprocessing import Preprocessing
from engram.images.views import Augmentation, training_view


@pytest.mark.parametrize("augment", ["none", "inception", "pad-crop"])
@pytest.mark.parametrize("seed", range(6))
def test_the_view_of_a_mask_is_that_of_its_image(augment: str, seed: int) -> None:
    pixels, mask = image_with_mask(seed, (64, 48))
    numbered = Legend((1, 2), 3).read(mask, (48, 64), "m")
    sharp = Preprocessing((32, 32), None, interpolation="nearest")
    view = training_view(pixels, sharp, np.random.default_rng(seed), Augmentation(augment))
    seen = mask_view(numbered, sharp, np.random.default_rng(seed), Augmentation(augment))
    # The image's red is 80 for the first class, 160 for the second, 240 where it is ignored.
    class_of_red = np.full(256, 255)
    class_of_red[[80, 160]] = 0, 1
    assert np.array_equal(seen, class_of_red[view[..., 0]])
    assert set(np.unique(seen)) <= {0, 1, 255}


@pytest.mark.parametrize("mode", ["1", "L", "P", "I;16"])
def test_the_values_of_every_kind_of_gray_are_read(mode: str, tmp_path: Path) -> None:
    values = np.array([[0, 1], [1, 0]], dtype=np.uint8)
    image = Image.fromarray(values)
    if mode == "P":
        image.putpalette(bytes(range(255, -1, -1)) * 3)
    elif mode == "1":
        image = Image.fromarray(values * 255).convert("1")
    elif mode == "I;16":
        image = Image.fromarray(values.astype(np.uint16) * 300)
    image.save(tmp_path / "m.png")
    scale = 300 if mode == "I;16" else 1
    assert read_mask(tmp_path / "m.png").tolist() == (values * np.int64(scale)).tolist()


def test_a_wrong_mask_is_an_error_that_names_it(tmp_path: Path) -> None:
    legend = Legend((1, 2), 3)
    for mask, sentence in (
        (np.full((4, 5), 3, np.uint8), "every pixel .* is 3"),
        (
            np.full((4, 5), 9, np.uint8),
            "the mask holds the value 9",
        ),
        (np.full((4, 4), 1, np.uint8), "the mask has 4x4 pixels"),
        (
            np.zeros((4, 5, 3), np.uint8),
            "one integer per pixel",
        ),
        (  # a table of so many values would fill the memory
            Image.fromarray(np.full((4, 5), 2**31 - 1, np.int32)),
            "0 to 65,535",
        ),
    ):
        with pytest.raises(BadImage, match=f"m.png: .*{sentence}"):
            legend.read(mask, (5, 4), "m.png")
    Image.fromarray(np.ones((8, 8), np.uint8)).save(tmp_path / "m.jpg")
    with pytest.raises(BadImage, match="cannot be a JPEG"):
        read_mask(tmp_path / "m.jpg")
