"""Arrays and tensors as images: which axis holds the channels, and which values are pixels."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.errors import refuses

from engram.images.inputs import decodable, is_one_image

PICTURE = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
GRAY = PICTURE[..., 0]
TENSOR = torch.from_numpy(PICTURE).permute(2, 0, 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (PICTURE, PICTURE),
        (np.moveaxis(PICTURE, -1, 0), PICTURE),
        (PICTURE.astype(np.int64), PICTURE),
        ((PICTURE / 255).astype(np.float32), PICTURE),
        (GRAY, GRAY),
        (GRAY[..., None], GRAY),
        (TENSOR, PICTURE),
        (TENSOR.permute(1, 2, 0), PICTURE),
        ((TENSOR / 255).requires_grad_(), PICTURE),
        ((TENSOR / 255 > 0.5).to(torch.bfloat16), (PICTURE / 255 > 0.5) * np.uint8(255)),
        (TENSOR[:1], GRAY),
    ],
)
def test_an_array_or_tensor_becomes_pixels(given: Any, expected: np.ndarray) -> None:
    found = decodable(given, "x")
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.uint8
    assert np.array_equal(found, expected)
    assert is_one_image(given)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (torch.zeros(3, 5, 3), "x has the shape (3, 5, 3)"),
        (np.zeros((10, 28, 28)), "x has the shape (10, 28, 28)"),
        (np.zeros((0, 5, 3)), "x has the shape (0, 5, 3)"),
        (np.zeros(7), "as a list"),
        (PICTURE.astype(np.float32), "x holds float32 values from 0.0 to 2"),
        (PICTURE.astype(np.int64) + 256, "x holds int64 values from"),
        (torch.full((3, 4, 5), torch.nan), "values from nan to nan"),
        (TENSOR / 127.5 - 1, "normalised later"),
        (np.array([["a", "b"]]), "x holds <U1 values"),
        (PICTURE > 3, "x holds bool values; expected"),
        (object(), "x is of the type object"),
    ],
)
def test_what_is_ambiguous_or_no_pixels_is_refused(given: Any, sentence: str) -> None:
    with refuses(sentence):
        decodable(given, "x")
