"""The parts of a ViT: its configuration, the layer, and the head of the original model.

Axes, everywhere in the package:

    b images   n tokens of the backbone   D width   h heads   d width of a head   l layers

A block takes *how to attend* as an argument. The plain model gives it `self_attention`; the methods
give it functions that also hand out or bring in keys and values. So the layer is written once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.vit.pos_embed import RotaryConfig, Rotation

Activation = Literal["gelu", "quick_gelu", "gelu_tanh", "swiglu"]
Pooling = Literal["class", "distilled", "class+mean", "mean", "attention"]
Positions = Literal["learned", "waves", "none"]
Norm = Literal["layer", "rms"]


@dataclass(frozen=True)
class HeadConfig:
    """The pooling and the classifier of the original model."""

    classes: int  # 0: the answer is the pooled vector itself (an embedding)
    projection: bool = False  # the answer is a projection of it, as in CLIP: an embedding, too
    pooling: Pooling = "class"
    bias: bool = True
    hidden: bool = False  # tanh(Linear) before the classifier: Google's "pre_logits"
    norm: bool = False  # a LayerNorm after pooling: timm's "fc_norm"
    raw: bool = False  # pools the tokens before the final norm: transformers' CLIP classifier
    pool_heads: int | None = None  # of attention pooling; None: as many as the layers
    pool_mlp_width: int | None = None  # of attention pooling; None: as in the layers, 0: no MLP
    pool_query: bool = True  # attention pooling projects its query, too


@dataclass(frozen=True)
class ViTConfig:
    image_size: tuple[int, int]  # height, width the position embeddings were learned for
    patch: int
    width: int
    depth: int
    heads: int
    mlp_width: int
    eps: float = 1e-6
    activation: Activation = "gelu"
    class_token: bool = True
    registers: int = 0  # extra tokens behind the class token; DeiT's distillation token is one
    prefix_positions: int = 1  # how many of [class, registers…] carry a position embedding
    patch_bias: bool = True
    qkv_bias: bool = True
    proj_bias: bool = True
    mlp_bias: bool = True
    norm: Norm = "layer"  # AIMv2: RMSNorm
    patch_norm: bool = False  # AIMv2: a norm of the patches, before their positions are added
    pre_norm: bool = False  # CLIP: a LayerNorm before the first block
    read_norm: bool = False  # EVA-02's CLIP: a norm of what attention read, before its projection
    mlp_norm: bool = False  # EVA-02: a norm inside of the MLP, before its second projection
    layer_scale: bool = False  # DINOv2
    final_norm: bool = True
    positions: Positions = "learned"  # what is added to the patches
    rotary: RotaryConfig | None = None  # turns queries and keys of patches in every layer
    antialias: bool = True  # when positions are resized: timm does, transformers mostly not
    head: HeadConfig | None = None

    @property
    def grid(self) -> tuple[int, int]:
        return self.image_size[0] // self.patch, self.image_size[1] // self.patch

    @property
    def prefix(self) -> int:
        """Tokens before the first patch."""
        return int(self.class_token) + self.registers

    @property
    def pooler(self) -> bool:
        """Whether tasks read what the original model's attention pooling makes of the patches."""
        attends = self.head is not None and self.head.pooling == "attention" and not self.head.raw
        return attends and not self.class_token


#: From a block and its normed input (b, n, D) to what each token read (b, n, D).
Attend = Callable[["Block", Tensor], Tensor]
#: Called with a layer's number and its normed tokens (b, n, D), for those who read them.
LayerHook = Callable[[int, Tensor], None]
#: Adapters: add to the stream something computed from the normed input of a sublayer, which is the
#: attention (0) or the MLP (1).
Adapt = Callable[[Tensor, Tensor, int], Tensor]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(b, n, D) -> (b, h, n, d)"""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(b, h, n, d) -> (b, n, D)"""
    return x.transpose(1, 2).flatten(2)


def self_attention(
    block: Block,
    normed: Tensor,
    rotation: Rotation | None = None,
    hook: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Every token reads every token; `hook` is called with the normed tokens."""
    if hook is not None:
        hook(normed)
    q, k, v = block.project(normed, rotation)
    return merge_heads(F.scaled_dot_product_attention(q, k, v))


class RMSNorm(nn.RMSNorm):
    """torch's, in the type of its weight: autocast does that for a LayerNorm alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def make_norm(config: ViTConfig, width: int | None = None) -> nn.Module:
    """A norm of the kind that the backbone has, of tokens unless another width is given."""
    kind = RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(width or config.width, eps=config.eps)


class Mlp(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.activation: Activation = config.activation
        gates = 2 if config.activation == "swiglu" else 1
        self.fc1 = nn.Linear(config.width, gates * config.mlp_width, bias=config.mlp_bias)
        self.norm = make_norm(config, config.mlp_width) if config.mlp_norm else None
        self.fc2 = nn.Linear(config.mlp_width, config.width, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if self.activation == "swiglu":
            gate, value = x.chunk(2, dim=-1)
            x = F.silu(gate) * value
        elif self.activation == "quick_gelu":
            x = x * torch.sigmoid(1.702 * x)
        else:
            approximate = "tanh" if self.activation == "gelu_tanh" else "none"
            if x.requires_grad:
                x = F.gelu(x, approximate=approximate)
            else:  # the widest tensor of a layer: no second one beside it
                x = torch.ops.aten.gelu_(x, approximate=approximate)
        if self.norm is not None:
            x = self.norm(x)
        out: Tensor = self.fc2(x)
        return out


class Block(nn.Module):
    """One encoder layer: x + attention(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1 = make_norm(config)
        self.qkv = nn.Linear(width, 3 * width, bias=config.qkv_bias)
        self.read_norm = make_norm(config) if config.read_norm else None
        self.proj = nn.Linear(width, width, bias=config.proj_bias)
        self.norm2 = make_norm(config)
        self.mlp = Mlp(config)
        self.scale1 = nn.Parameter(torch.ones(width)) if config.layer_scale else None
        self.scale2 = nn.Parameter(torch.ones(width)) if config.layer_scale else None

    def project(
        self, normed: Tensor, rotation: Rotation | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (b, h, n, d) of normed tokens (b, n, D).

        The `rotation` is the backbone's, if it has one and the first of these tokens are its own.
        """
        q, k, v = (split_heads(x, self.heads) for x in self.qkv(normed).chunk(3, dim=-1))
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        return q, k, v

    def keys_values(
        self, normed: Tensor, rotation: Rotation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values only: of memory cells, which ask nothing, or of the backbone's tokens."""
        width = normed.shape[-1]
        bias = None if self.qkv.bias is None else self.qkv.bias[width:]
        k, v = F.linear(normed, self.qkv.weight[width:], bias).chunk(2, dim=-1)
        k, v = split_heads(k, self.heads), split_heads(v, self.heads)
        return k if rotation is None else rotation(k), v

    def add_up(self, read: Tensor) -> Tensor:
        """Project what was read (b, n, D), to be added to the tokens but for LayerScale."""
        out: Tensor = self.proj(read if self.read_norm is None else self.read_norm(read))
        return out

    def forward(
        self,
        x: Tensor,
        attend: Attend = self_attention,
        adapters: Adapt | None = None,
        dropped: range | None = None,
    ) -> Tensor:
        """Tokens of `dropped` can be read and go no further (`attend` gives only the others)."""
        normed = self.norm1(x)
        read = self.add_up(attend(self, normed))
        if dropped is not None:  # no list as an index, which would synchronise a GPU
            ends = slice(None, dropped.start), slice(dropped.stop, None)
            x, normed = (torch.cat([y[:, end] for end in ends], 1) for y in (x, normed))
        x = x + (read if self.scale1 is None else read * self.scale1)
        if adapters is not None:
            x = adapters(x, normed, 0)
        normed = self.norm2(x)
        out = self.mlp(normed)
        x = x + (out if self.scale2 is None else out * self.scale2)
        if adapters is not None:
            x = adapters(x, normed, 1)
        return x


class AttentionPooling(nn.Module):
    """SigLIP's pooling: one learned query reads all tokens, then an MLP (which AIMv2 has not)."""

    def __init__(self, config: ViTConfig, head: HeadConfig) -> None:
        super().__init__()
        width = config.width
        hidden = config.mlp_width if head.pool_mlp_width is None else head.pool_mlp_width
        self.heads = head.pool_heads or config.heads
        self.probe = nn.Parameter(torch.zeros(1, 1, width))
        self.q = nn.Linear(width, width) if head.pool_query else None
        self.kv = nn.Linear(width, 2 * width, bias=config.qkv_bias)
        self.proj = nn.Linear(width, width)
        self.norm = make_norm(config) if hidden else None
        self.mlp = Mlp(replace(config, mlp_width=hidden)) if hidden else None

    def forward(self, tokens: Tensor) -> Tensor:
        kv = self.kv(tokens).chunk(2, dim=-1)
        q = self.probe.expand(tokens.shape[0], -1, -1)
        q = q if self.q is None else self.q(q)
        q, k, v = (split_heads(x, self.heads) for x in (q, *kv))
        x: Tensor = self.proj(merge_heads(F.scaled_dot_product_attention(q, k, v)))
        if self.norm is not None and self.mlp is not None:
            x = x + self.mlp(self.norm(x))
        return x[:, 0]


class ClassifierHead(nn.Module):
    """The original model's own pooling and classifier. The latter is not in the fingerprint."""

    def __init__(self, config: ViTConfig, head: HeadConfig) -> None:
        super().__init__()
        self.config, self.prefix = head, config.prefix
        width = config.width
        features = 2 * width if head.pooling == "class+mean" else width
        self.pool = AttentionPooling(config, head) if head.pooling == "attention" else None
        self.norm = make_norm(config) if head.norm else None
        self.hidden = nn.Linear(features, features) if head.hidden else None
        self.linear = nn.Linear(features, head.classes, head.bias) if head.classes else None
        self.distilled = nn.Linear(width, head.classes) if head.pooling == "distilled" else None

    def pool_tokens(self, tokens: Tensor) -> Tensor:
        """Attention pooling of the final tokens, with the norm behind it: (b, D)."""
        assert self.pool is not None
        x: Tensor = self.pool(tokens)
        return x if self.norm is None else self.norm(x)

    def forward(self, raw: Tensor, tokens: Tensor) -> Tensor:
        """Logits from the last layer's tokens before and after the final norm."""
        if self.config.raw:
            tokens = raw
        if self.pool is not None:
            x = self.pool(tokens)
        elif self.config.pooling == "mean":
            x = tokens[:, self.prefix :].mean(1)
        elif self.config.pooling == "class+mean":
            x = torch.cat([tokens[:, 0], tokens[:, self.prefix :].mean(1)], dim=-1)
        else:
            x = tokens[:, 0]
        if self.norm is not None:
            x = self.norm(x)
        if self.hidden is not None:
            x = torch.tanh(self.hidden(x))
        if self.linear is not None:
            x = self.linear(x)
        if self.distilled is not None:
            x = (x + self.distilled(tokens[:, 1])) / 2
        out: Tensor = x
        return out
