"""The bundled backbone: small, whole, and right about pictures it was not trained on."""

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from tests.support.paths import ROOT

import engram
from engram.backbones.load import BUNDLED
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view

SAMPLE = ROOT / "tests" / "support" / "cifar10_first_of_each_class.png"


@pytest.fixture(scope="module")
def pico() -> engram.ViT:
    return engram.load_backbone("pico")


def test_it_is_stored_in_half_precision_and_small() -> None:
    weights = BUNDLED / "pico" / "model.safetensors"
    assert weights.stat().st_size <= 8_000_000
    with safe_open(weights, "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F16"}  # noqa: SIM118


def test_it_is_computed_in_single_precision(pico: engram.ViT) -> None:
    assert {p.dtype for p in pico.parameters()} == {torch.float32}
    assert all(p.isfinite().all() and not p.requires_grad for p in pico.parameters())


def test_it_says_what_it_is(pico: engram.ViT) -> None:
    assert pico.source == "pico"
    assert pico.labels is not None
    assert len(pico.labels) == 10
    assert pico.preprocessing is not None
    assert (pico.preprocessing.size, pico.preprocessing.resize) == ((32, 32), None)


@pytest.mark.parametrize("side", [32, 48])
def test_it_sees_a_patch_in_every_four_pixels(pico: engram.ViT, side: int) -> None:
    pixels = torch.rand(2, 3, side, side) * 2 - 1
    assert pico.tokens(pixels).shape == (2, 1 + (side // 4) ** 2, 192)
    assert pico(pixels).shape == (2, 10)
    assert pico(pixels).isfinite().all()


def test_it_knows_the_first_test_images_of_nine_in_ten_classes(pico: engram.ViT) -> None:
    assert pico.preprocessing is not None
    strip = Image.open(SAMPLE)
    views = [
        evaluation_view(strip.crop((32 * i, 0, 32 * i + 32, 32)), pico.preprocessing)
        for i in range(10)
    ]
    pixels = normalise(torch.stack([torch.from_numpy(view) for view in views]), pico.preprocessing)
    answers = pico(pixels).argmax(1).tolist()
    assert answers == [0, 1, 5, 3, 4, 5, 6, 7, 8, 9]  # the bird is taken for a dog
