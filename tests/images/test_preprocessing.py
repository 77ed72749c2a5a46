"""Preprocessing is checked, survives JSON, and normalises batches."""

import json

import pytest
import torch

from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing, normalise


def test_normalise_shifts_and_scales_each_channel() -> None:
    preprocessing = Preprocessing(mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.125))
    batch = torch.randint(0, 256, (2, 5, 7, 3), dtype=torch.uint8)
    pixels = normalise(batch, preprocessing)
    expected = (batch / 255 - torch.tensor(preprocessing.mean)) / torch.tensor(preprocessing.std)
    assert pixels.shape == (2, 3, 5, 7)
    assert pixels.is_contiguous()
    torch.testing.assert_close(pixels, expected.permute(0, 3, 1, 2))
    assert normalise(pixels, preprocessing) is pixels


def test_preprocessing_survives_json() -> None:
    preprocessing = Preprocessing((192, 224), None, "lanczos", (0.1, 0.2, 0.3), (1.0, 1.0, 1.0))
    again = Preprocessing.from_dict(json.loads(json.dumps(preprocessing.to_dict())))
    assert again == preprocessing
    assert hash(again) == hash(preprocessing)


def test_the_margin_scales_with_the_size() -> None:
    assert Preprocessing().with_size((384, 384)).resize == 425
    assert Preprocessing(resize=224).with_size((32, 32)).resize == 32
    assert Preprocessing(resize=None).with_size((16, 16)).resize is None


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"size": (0, 8)}, r"size\[0\] is 0"),
        ({"size": (256, 224)}, "resize is 248"),
        ({"interpolation": "cubist"}, "interpolation is 'cubist'"),
        ({"std": (0.5, 0.5, 0.0)}, r"std\[2\] is 0.0"),
        ({"mean": (0.5,)}, "mean is a list of 1 values"),
        ({"mean": (0.5, 10**400, 0.5)}, r"mean\[1\] is a number of about 400 digits"),
        ({"mean": (0.5, float("nan"), 0.5)}, r"mean\[1\] is nan"),
        ({"resize": 10**9}, "resize is 1000000000"),
        ({"crop": 3}, "There is no preprocessing setting 'crop'"),
        ({"size": 224}, "size is 224"),
        ({"size": "22"}, "size is '22'"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        Preprocessing.from_dict(settings)
