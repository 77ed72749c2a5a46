"""The trunk: what each option computes, what its fingerprint covers, and what it refuses."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engram import EngramError, ViT, random_trunk
from engram.vit import Block, HeadConfig, merge_heads, self_attention

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no class token": {"class_token": False, "prefix_positions": 0},
    "no class position": {"prefix_positions": 0},
    "registers": {"registers": 3, "prefix_positions": 0},
    "registers, class position": {"registers": 3, "prefix_positions": 1},
    "distillation token": {"registers": 1, "prefix_positions": 2},
    "pre-norm": {"pre_norm": True, "patch_bias": False, "activation": "quick_gelu"},
    "layer scale": {"layer_scale": True},
    "swiglu": {"activation": "swiglu", "layer_scale": True},
    "tanh": {"activation": "gelu_tanh"},
    "no qkv bias": {"qkv_bias": False},
    "no final norm": {"final_norm": False},
}


def trunk_with(name: str) -> ViT:
    """A trunk whose every tensor is random, so that nothing hides behind zeros and ones."""
    options = OPTIONS[name]
    pooling = "mean" if options.get("class_token") is False else "class"
    trunk = random_trunk(head=HeadConfig(5, pooling=pooling), **options)
    with torch.no_grad():
        for parameter in trunk.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return trunk


@pytest.mark.parametrize("name", OPTIONS)
def test_every_parameter_takes_part(name: str) -> None:
    trunk = trunk_with(name)
    pixels = torch.randn(2, 3, 32, 32)
    assert trunk.tokens(pixels).shape == (2, trunk.config.prefix + 16, 64)
    logits = trunk(pixels)
    assert logits.shape == (2, 5)
    (logits**2).sum().backward()
    for parameter in trunk.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0


@pytest.mark.parametrize("name", OPTIONS)
def test_a_layer_written_out(name: str) -> None:
    block: Block = trunk_with(name).double().blocks[1]  # type: ignore[assignment]
    x = torch.randn(2, 7, 64, dtype=torch.float64)
    h = F.layer_norm(x, (64,), block.norm1.weight, block.norm1.bias, 1e-6)
    q, k, v = (h @ block.qkv.weight.T).split(64, -1)
    if block.qkv.bias is not None:
        q, k, v = q + block.qkv.bias[:64], k + block.qkv.bias[64:128], v + block.qkv.bias[128:]
    heads = []
    for i in range(4):  # the heads lie one after the other, 16 wide
        part = slice(16 * i, 16 * (i + 1))
        weights = (q[..., part] @ k[..., part].transpose(1, 2) / 4).softmax(-1)
        heads.append(weights @ v[..., part])
    read = torch.cat(heads, -1) @ block.proj.weight.T + block.proj.bias
    y = x + read * (1 if block.scale1 is None else block.scale1)
    h = F.layer_norm(y, (64,), block.norm2.weight, block.norm2.bias, 1e-6)
    h = h @ block.mlp.fc1.weight.T + block.mlp.fc1.bias
    if block.mlp.activation == "gelu":
        h = h * torch.special.ndtr(h)
    elif block.mlp.activation == "quick_gelu":
        h = h / (1 + torch.exp(-1.702 * h))
    elif block.mlp.activation == "gelu_tanh":
        h = h / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))
    else:
        h = h[..., :256] / (1 + torch.exp(-h[..., :256])) * h[..., 256:]
    thought = h @ block.mlp.fc2.weight.T + block.mlp.fc2.bias
    y = y + thought * (1 if block.scale2 is None else block.scale2)
    torch.testing.assert_close(block(x), y, rtol=1e-9, atol=1e-9)


def test_how_to_attend_is_an_argument() -> None:
    """A task gets a layer's normed input, keys and values without the layer written twice."""
    trunk = trunk_with("plain")
    seen: list[Tensor] = []

    def look_on(block: Block, normed: Tensor) -> Tensor:
        seen.append(normed)
        q, k, v = block.project(normed)
        keys, values = block.keys_values(normed)
        torch.testing.assert_close((keys, values), (k, v))
        return merge_heads(F.scaled_dot_product_attention(q, keys, values))

    x = trunk.embed(torch.randn(2, 3, 32, 32))
    plain, watched = x, x
    for block in trunk.blocks:
        plain, watched = block(plain), block(watched, look_on)
    torch.testing.assert_close(watched, plain)
    torch.testing.assert_close(seen[0], trunk.blocks[0].norm1(x))
    assert len(seen) == trunk.config.depth
    assert torch.equal(trunk.blocks[0](x, self_attention), trunk.blocks[0](x))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_class_token_of_ones_own(name: str) -> None:
    trunk = trunk_with(name)
    pixels = torch.randn(2, 3, 32, 32)
    token = torch.randn(1, 64)
    own, given = trunk.embed(pixels), trunk.embed(pixels, class_token=token)
    patches = trunk.config.prefix
    new = patches + (0 if trunk.config.class_token else 1)
    assert torch.equal(given[:, new:], own[:, patches:])
    torch.testing.assert_close(given[:, 0], trunk.place(token).expand(2, -1))
    if trunk.class_token is not None:
        torch.testing.assert_close(trunk.place(trunk.class_token).expand(2, -1), own[:, 0])


# Image sizes


@pytest.mark.parametrize("size", [(8, 8), (16, 64), (40, 24), (96, 96)])
def test_any_multiple_of_the_patch_size(size: tuple[int, int]) -> None:
    trunk = trunk_with("registers")
    rows, columns = size[0] // 8, size[1] // 8
    assert trunk.tokens(torch.randn(1, 3, *size)).shape == (1, 4 + rows * columns, 64)


def test_positions_are_resized_as_a_field() -> None:
    """A field that rises from left to right still does, and a flat one stays flat."""
    trunk = random_trunk(width=8, heads=2)
    with torch.no_grad():
        trunk.position.fill_(2.5)
        trunk.position[:, 0] = torch.arange(4.0).repeat(4)
    for antialias in (True, False):
        trunk.config = replace(trunk.config, antialias=antialias)
        field = trunk.at_size((3 * 8, 7 * 8)).position.view(3, 7, 8)
        torch.testing.assert_close(field[..., 1:], torch.full((3, 7, 7), 2.5))
        assert (field[:, 1:, 0] > field[:, :-1, 0]).all()
        torch.testing.assert_close(field[0], field[2])


def test_antialias_only_matters_when_shrinking() -> None:
    trunk = random_trunk()
    other = copy.deepcopy(trunk)
    other.config = replace(other.config, antialias=False)
    for size, same in (((32, 32), True), ((16, 16), False)):
        assert torch.equal(trunk.at_size(size).position, other.at_size(size).position) == same


def test_resized_positions_follow_the_weights() -> None:
    trunk = random_trunk().requires_grad_(False)
    pixels = torch.randn(1, 3, 48, 16)
    before = trunk.tokens(pixels)
    assert torch.equal(trunk.tokens(pixels), before)
    trunk.position.mul_(3)
    assert not torch.allclose(trunk.tokens(pixels), before)
    assert trunk.double().tokens(pixels.double()).dtype == torch.float64
    trunk.float().requires_grad_(True)
    for _ in range(2):  # a cached field would belong to a graph that is gone
        trunk.position.grad = None
        trunk(pixels).sum().backward()
        assert trunk.position.grad is not None
        assert trunk.position.grad.abs().max() > 0


# The original model's head


def test_heads() -> None:
    pixels = torch.randn(2, 3, 32, 32)

    def head(**options: Any) -> tuple[ViT, Tensor, Tensor]:
        trunk = random_trunk(registers=1, head=HeadConfig(**options))
        raw = trunk.encode(trunk.embed(pixels), pixels.shape[-2:])
        return trunk, raw, trunk.norm(raw)

    trunk, _, tokens = head(classes=0)
    assert torch.equal(trunk(pixels), tokens[:, 0])
    trunk, _, tokens = head(classes=3, pooling="mean", bias=False)
    linear = trunk.head.linear.weight  # type: ignore[union-attr]
    torch.testing.assert_close(trunk(pixels), tokens[:, 2:].mean(1) @ linear.T)
    trunk, raw, _ = head(classes=0, pooling="mean", raw=True)
    torch.testing.assert_close(trunk(pixels), raw[:, 2:].mean(1))
    trunk, _, tokens = head(classes=0, pooling="class+mean")
    both = torch.cat([tokens[:, 0], tokens[:, 2:].mean(1)], -1)
    torch.testing.assert_close(trunk(pixels), both)
    trunk, _, tokens = head(classes=3, pooling="distilled")
    two = trunk.head.linear(tokens[:, 0]) + trunk.head.distilled(tokens[:, 1])  # type: ignore[union-attr,misc]
    torch.testing.assert_close(trunk(pixels), two / 2)
    trunk, _, tokens = head(classes=0, hidden=True)
    torch.testing.assert_close(trunk(pixels), trunk.head.hidden(tokens[:, 0]).tanh())  # type: ignore[union-attr,misc]
    trunk, _, tokens = head(classes=0, norm=True, pooling="mean")
    torch.testing.assert_close(
        trunk(pixels), F.layer_norm(tokens[:, 2:].mean(1), (64,), eps=trunk.config.eps)
    )


# Identity


def test_the_fingerprint_covers_each_tensor_but_the_heads() -> None:
    trunk = random_trunk(layer_scale=True, registers=2).requires_grad_(False)
    before = trunk.fingerprint
    assert len(before) == 64
    for name, parameter in trunk.named_parameters():
        old = parameter.clone()
        parameter.view(-1)[-1] += 1
        assert (trunk.fingerprint == before) == name.startswith("head."), name
        parameter.copy_(old)
        assert trunk.fingerprint == before
    assert random_trunk(layer_scale=True, registers=2, classes=0).fingerprint == before
    assert random_trunk(layer_scale=True, registers=2, seed=1).fingerprint != before
    assert copy.deepcopy(trunk).fingerprint == before


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
        random_trunk().tokens(pixels)
    assert said in str(error.value)


def test_no_head_no_logits() -> None:
    with pytest.raises(EngramError, match="no head of its own"):
        random_trunk(classes=0)(torch.zeros(1, 3, 32, 32))


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(EngramError, match="cannot be divided into 5 heads"):
        random_trunk(heads=5)
