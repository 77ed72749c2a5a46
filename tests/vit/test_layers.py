"""What each option of a layer and of a head computes, written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.strategies import OPTIONS, backbone_with
from torch import Tensor

from engram import ViT, random_backbone
from engram.vit.layers import Block, HeadConfig, merge_heads, self_attention


@pytest.mark.parametrize("name", OPTIONS)
def test_a_layer_written_out(name: str) -> None:
    block: Block = backbone_with(name).double().blocks[1]  # type: ignore[assignment]
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
    backbone = backbone_with("plain")
    seen: list[Tensor] = []

    def look_on(block: Block, normed: Tensor) -> Tensor:
        seen.append(normed)
        q, k, v = block.project(normed)
        keys, values = block.keys_values(normed)
        torch.testing.assert_close((keys, values), (k, v))
        return merge_heads(F.scaled_dot_product_attention(q, keys, values))

    x = backbone.embed(torch.randn(2, 3, 32, 32))
    plain, watched = x, x
    for block in backbone.blocks:
        plain, watched = block(plain), block(watched, look_on)
    torch.testing.assert_close(watched, plain)
    torch.testing.assert_close(seen[0], backbone.blocks[0].norm1(x))
    assert len(seen) == backbone.config.depth
    assert torch.equal(backbone.blocks[0](x, self_attention), backbone.blocks[0](x))


def test_heads() -> None:
    pixels = torch.randn(2, 3, 32, 32)

    def head(**options: Any) -> tuple[ViT, Tensor, Tensor]:
        backbone = random_backbone(registers=1, head=HeadConfig(**options))
        raw = backbone.encode(backbone.embed(pixels), pixels.shape[-2:])
        return backbone, raw, backbone.norm(raw)

    backbone, _, tokens = head(classes=0)
    assert torch.equal(backbone(pixels), tokens[:, 0])
    backbone, _, tokens = head(classes=3, pooling="mean", bias=False)
    linear = backbone.head.linear.weight  # type: ignore[union-attr]
    torch.testing.assert_close(backbone(pixels), tokens[:, 2:].mean(1) @ linear.T)
    backbone, raw, _ = head(classes=0, pooling="mean", raw=True)
    torch.testing.assert_close(backbone(pixels), raw[:, 2:].mean(1))
    backbone, _, tokens = head(classes=0, pooling="class+mean")
    both = torch.cat([tokens[:, 0], tokens[:, 2:].mean(1)], -1)
    torch.testing.assert_close(backbone(pixels), both)
    backbone, _, tokens = head(classes=3, pooling="distilled")
    two = backbone.head.linear(tokens[:, 0]) + backbone.head.distilled(tokens[:, 1])  # type: ignore[union-attr,misc]
    torch.testing.assert_close(backbone(pixels), two / 2)
    backbone, _, tokens = head(classes=0, hidden=True)
    torch.testing.assert_close(backbone(pixels), backbone.head.hidden(tokens[:, 0]).tanh())  # type: ignore[union-attr,misc]
    backbone, _, tokens = head(classes=0, norm=True, pooling="mean")
    torch.testing.assert_close(
        backbone(pixels), F.layer_norm(tokens[:, 2:].mean(1), (64,), eps=backbone.config.eps)
    )
