"""Evaluation views agree with the reference; training views are random but reproducible."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors import safe_open
from tests.support.images import encoded, gradient

from engram.errors import EngramError
from engram.images.decode import read_image
from engram.images.preprocessing import Preprocessing, normalise
from engram.images.views import Augmentation, evaluation_view, pad_crop, random_box, training_view

SMALL = Preprocessing(size=(8, 8), resize=10)
SQUASH = Preprocessing(size=(8, 8), resize=None)


def test_the_evaluation_view_agrees_with_the_reference(assets: Path) -> None:
    file: Any = safe_open(assets / "weights/vit_tiny_patch16_224/reference.safetensors", "pt")
    names = json.loads(file.metadata()["images"])
    preprocessing = Preprocessing()
    views = [evaluation_view(assets / "data" / name, preprocessing) for name in names]
    ours = normalise(torch.from_numpy(np.stack(views)), preprocessing)
    difference = (ours - file.get_tensor("pixel_values")).abs() * 127.5  # in steps of 1/255
    assert difference.mean() < 0.01
    assert difference.max() <= 2.01


@given(st.integers(1, 60), st.integers(1, 60), st.sampled_from([SMALL, SQUASH]))
def test_one_resize_with_a_box_is_resize_then_crop(
    width: int, height: int, preprocessing: Preprocessing
) -> None:
    image = gradient(width, height)
    if preprocessing.resize is None:
        expected = image.resize((8, 8), Image.Resampling.BICUBIC)
    else:
        scale = 10 / min(width, height)
        resized = image.resize(
            (round(width * scale), round(height * scale)), Image.Resampling.BICUBIC
        )
        left, top = (resized.width - 8) // 2, (resized.height - 8) // 2
        expected = resized.crop((left, top, left + 8, top + 8))
    view = evaluation_view(image, preprocessing)
    assert np.abs(view.astype(int) - np.asarray(expected).astype(int)).max() <= 2


def test_decoding_a_large_jpeg_at_a_fraction_loses_nothing_visible() -> None:
    data = encoded(gradient(800, 600), "JPEG", quality=95)
    whole = evaluation_view(read_image(data), SMALL)
    assert np.abs(evaluation_view(data, SMALL).astype(int) - whole).max() <= 3


def test_the_image_of_the_caller_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "large.jpg"
    gradient(800, 600).save(path)
    with Image.open(path) as image:
        evaluation_view(image, SMALL)
        assert image.size == (800, 600)


@pytest.mark.parametrize("augment", ["none", "inception", "pad-crop"])
def test_a_training_view_depends_on_the_generator_alone(augment: str) -> None:
    data = encoded(gradient(), "PNG")

    def views(seed: int) -> list[bytes]:
        rng = np.random.default_rng(seed)
        return [training_view(data, SMALL, rng, Augmentation(augment)).tobytes() for _ in range(5)]

    assert views(1) == views(1)
    assert (views(1) == views(2)) == (augment == "none")


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**32), st.floats(0.05, 1))
def test_a_random_crop_is_inside_an_image_of_any_size(
    width: int, height: int, seed: int, min_area: float
) -> None:
    image = Image.new("RGB", (width, height), (1, 2, 3))
    view = training_view(image, SMALL, np.random.default_rng(seed), Augmentation(min_area=min_area))
    assert (view == (1, 2, 3)).all()


def test_crops_are_mirrored_half_of_the_time_unless_flip_is_off() -> None:
    image = gradient()
    rng = np.random.default_rng(0)

    def mirrored(flip: bool) -> float:
        views = [
            training_view(image, SMALL, rng, Augmentation(flip=flip)).astype(int)
            for _ in range(200)
        ]
        return float(np.mean([view[0, 0, 0] > view[0, -1, 0] for view in views]))

    assert 0.35 < mirrored(True) < 0.65
    assert mirrored(False) == 0


def test_crops_have_the_areas_and_aspect_ratios_they_should() -> None:
    rng = np.random.default_rng(0)
    boxes = [random_box(400, 400, rng, 0.25) for _ in range(500)]
    areas = [(r - x) * (b - y) / 400**2 for x, y, r, b in boxes]
    aspects = [(r - x) / (b - y) for x, y, r, b in boxes]
    assert 0.24 < min(areas) < 0.3
    assert 0.9 < max(areas) <= 1
    assert min(aspects) < 0.8
    assert max(aspects) > 1.25
    assert all(0.74 < aspect < 1.35 for aspect in aspects)
    assert abs(np.mean(np.log(aspects))) < math.log(1.05)


def test_pad_crop_shifts_the_whole_image_over_black() -> None:
    white = Image.new("RGB", (32, 32), "white")
    preprocessing = Preprocessing(size=(32, 32), resize=None)
    rng = np.random.default_rng(0)
    kept = [pad_crop(white, preprocessing, rng)[..., 0] == 255 for _ in range(100)]
    rows = [int(view.any(1).sum()) for view in kept]
    assert (min(rows), max(rows)) == (28, 32)  # up to 4 of 32 pixels


def test_an_unknown_augmentation_is_refused() -> None:
    with pytest.raises(EngramError, match="augment is 'mixup'"):
        Augmentation("mixup")
