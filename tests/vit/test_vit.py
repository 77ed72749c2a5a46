"""The backbone: its tokens, sizes of images, what its fingerprint covers, and what it refuses."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tests.support.strategies import OPTIONS, backbone_with
from torch import Tensor

from engram import EngramError, random_backbone


@pytest.mark.parametrize("name", OPTIONS)
def test_every_parameter_takes_part(name: str) -> None:
    backbone = backbone_with(name)
    pixels = torch.randn(2, 3, 32, 32)
    assert backbone.tokens(pixels).shape == (2, backbone.config.prefix + 16, 64)
    logits = backbone(pixels)
    assert logits.shape == (2, 5)
    (logits**2).sum().backward()
    for parameter in backbone.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0


@pytest.mark.parametrize("name", OPTIONS)
def test_a_class_token_of_ones_own(name: str) -> None:
    backbone = backbone_with(name)
    pixels = torch.randn(2, 3, 32, 32)
    token = torch.randn(1, 64)
    own, given = backbone.embed(pixels), backbone.embed(pixels, class_token=token)
    patches = backbone.config.prefix
    new = patches + (0 if backbone.config.class_token else 1)
    assert torch.equal(given[:, new:], own[:, patches:])
    torch.testing.assert_close(given[:, 0], backbone.place(token).expand(2, -1))
    if backbone.class_token is not None:
        torch.testing.assert_close(backbone.place(backbone.class_token).expand(2, -1), own[:, 0])


# Image sizes


@pytest.mark.parametrize("size", [(8, 8), (16, 64), (40, 24), (96, 96)])
def test_any_multiple_of_the_patch_size(size: tuple[int, int]) -> None:
    backbone = backbone_with("registers")
    rows, columns = size[0] // 8, size[1] // 8
    assert backbone.tokens(torch.randn(1, 3, *size)).shape == (1, 4 + rows * columns, 64)


def test_positions_are_resized_as_a_field() -> None:
    """A field that rises from left to right still does, and a flat one stays flat."""
    backbone = random_backbone(width=8, heads=2)
    with torch.no_grad():
        backbone.position.fill_(2.5)
        backbone.position[:, 0] = torch.arange(4.0).repeat(4)
    for antialias in (True, False):
        backbone.config = replace(backbone.config, antialias=antialias)
        field = backbone.at_size((3 * 8, 7 * 8)).position.view(3, 7, 8)
        torch.testing.assert_close(field[..., 1:], torch.full((3, 7, 7), 2.5))
        assert (field[:, 1:, 0] > field[:, :-1, 0]).all()
        torch.testing.assert_close(field[0], field[2])


def test_antialias_only_matters_when_shrinking() -> None:
    backbone = random_backbone()
    other = copy.deepcopy(backbone)
    other.config = replace(other.config, antialias=False)
    for size, same in (((32, 32), True), ((16, 16), False)):
        assert torch.equal(backbone.at_size(size).position, other.at_size(size).position) == same


def test_resized_positions_follow_the_weights() -> None:
    backbone = random_backbone().requires_grad_(False)
    pixels = torch.randn(1, 3, 48, 16)
    before = backbone.tokens(pixels)
    assert torch.equal(backbone.tokens(pixels), before)
    backbone.position.mul_(3)
    assert not torch.allclose(backbone.tokens(pixels), before)
    assert backbone.double().tokens(pixels.double()).dtype == torch.float64
    backbone.float().requires_grad_(True)
    for _ in range(2):  # a cached field would belong to a graph that is gone
        backbone.position.grad = None
        backbone(pixels).sum().backward()
        assert backbone.position.grad is not None
        assert backbone.position.grad.abs().max() > 0


# Identity


def test_the_fingerprint_covers_each_tensor_but_the_heads() -> None:
    backbone = random_backbone(layer_scale=True, registers=2).requires_grad_(False)
    before = backbone.fingerprint
    assert len(before) == 64
    for name, parameter in backbone.named_parameters():
        old = parameter.clone()
        parameter.view(-1)[-1] += 1
        assert (backbone.fingerprint == before) == name.startswith("head."), name
        parameter.copy_(old)
        assert backbone.fingerprint == before
    assert random_backbone(layer_scale=True, registers=2, classes=0).fingerprint == before
    assert random_backbone(layer_scale=True, registers=2, seed=1).fingerprint != before
    assert copy.deepcopy(backbone).fingerprint == before


# What it refuses


@pytest.mark.parametrize(
    ("pixels", "said"),
    [
        (torch.zeros(3, 32, 32), "(images, 3, height, width)"),
        (torch.zeros(1, 1, 32, 32), "(images, 3, height, width)"),
        (torch.zeros(1, 32, 32, 3), "(images, 3, height, width)"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "floating-point"),
        (torch.zeros(1, 3, 33, 32), "multiples of its patch size 8"),
        (torch.zeros(1, 3, 32, 0), "multiples of its patch size 8"),
    ],
)
def test_wrong_pixels(pixels: Tensor, said: str) -> None:
    with pytest.raises(EngramError) as error:
        random_backbone().tokens(pixels)
    assert said in str(error.value)


def test_no_head_no_logits() -> None:
    with pytest.raises(EngramError, match="no head"):
        random_backbone(classes=0)(torch.zeros(1, 3, 32, 32))


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(EngramError, match="cannot be divided into 5 heads"):
        random_backbone(heads=5)
