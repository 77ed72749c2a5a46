"""Images of a page: masks and attention over them, thumbnails, and those that are gone."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.reports import model_with, noise

from engram.data.datasets import Dataset
from engram.images.decode import BadImage
from engram.images.masks import palette
from engram.report.images import backbone_view, paint_attention, paint_mask, thumbnail


def test_an_image_is_painted_with_the_colours_of_its_classes() -> None:
    view = np.zeros((1, 3, 3), dtype=np.uint8)
    drawn = paint_mask(view, np.array([[0, 1, 255]], dtype=np.uint8))
    colours = palette(2)
    assert drawn[0, 0].tolist() == np.rint(0.55 * colours[0]).tolist()
    assert drawn[0, 1].tolist() == np.rint(0.55 * colours[1]).tolist()
    assert len(set(drawn[0, 2].tolist())) == 1  # gray: ignored
    far = np.abs(palette(8)[:, None].astype(int) - palette(8)[None]).sum(-1)
    assert far[~np.eye(8, dtype=bool)].min() > 60


def test_attention_is_brightest_where_its_weight_is_highest() -> None:
    weights = torch.zeros(4, 4)
    weights[1, 2] = 0.3
    drawn = paint_attention(np.zeros((32, 32, 3), dtype=np.uint8), weights)
    row, column = np.unravel_index(drawn[..., 0].argmax(), (32, 32))
    assert (row // 8, column // 8) == (1, 2)
    assert drawn[-1, 0].tolist() == [30, 30, 30]  # dark gray elsewhere


@pytest.mark.parametrize(
    ("size", "shown", "kind"), [(64, 64, "png"), (65, 65, "jpeg"), (400, 160, "jpeg")]
)
def test_only_large_images_are_reduced(size: int, shown: int, kind: str) -> None:
    small = thumbnail(np.full((size, size, 3), 9, dtype=np.uint8), "a name")
    assert (small.width, small.height, small.pixelated) == (shown, shown, kind == "png")
    address, data = small.source.split(",")
    assert address == f"data:image/{kind};base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (shown, shown)


def test_an_image_that_is_gone_is_gray(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(dataset: Dataset, sample: int) -> None:
        raise BadImage("gone")

    monkeypatch.setattr(Dataset, "read", read)
    model = model_with("ab")
    view = backbone_view(model, noise(1, "ab"), 0)
    assert view.shape == (*model.preprocessing.size, 3)
    assert np.unique(view).tolist() == [128]
