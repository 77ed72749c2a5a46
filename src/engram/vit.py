"""One plain pre-norm Vision Transformer, the *trunk*.

Options cover what the weights that `trunks` reads need (ViT, DeiT, DINO to DINOv3, CLIP, SigLIP,
MAE, AIMv2, EVA-02, PE); none of them is a different architecture. Axes, everywhere in the package:

    b images   n tokens of the trunk   D width   h heads   d width of a head   l layers

A block takes *how to attend* as an argument. The plain model passes `self_attention`; memory.py
passes functions that also hand out or bring in keys and values. So the layer is written once.

Long because the whole model stands in this one file, to be read in one sitting.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.errors import EngramError
from engram.positions import RotaryConfig, Rotation, rotation, waves
from engram.util.devices import autocast_dtype
from engram.util.processes import dtype_for
from engram.util.tensors import tensors_hash, version

if TYPE_CHECKING:
    from engram.images.preprocessing import Preprocessing

Activation = Literal["gelu", "quick_gelu", "gelu_tanh", "swiglu"]
Pooling = Literal["class", "distilled", "class+mean", "mean", "attention"]
Positions = Literal["learned", "waves", "none"]
Norm = Literal["layer", "rms"]
Stored = Literal["fp32", "bf16"]
_KEPT = 8  # sizes of images whose rotary positions are kept


@dataclass(frozen=True)
class HeadConfig:
    """How the original model turns its tokens into an answer."""

    classes: int  # 0: the answer is the pooled vector itself (an embedding)
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


class Attend(Protocol):
    """From a block and its normed input (b, n, D) to what each token read (b, n, D)."""

    def __call__(self, block: Block, normed: Tensor, /) -> Tensor: ...


class See(Protocol):
    """Called with a layer's number and its normed tokens (b, n, D), for those who read them."""

    def __call__(self, layer: int, normed: Tensor, /) -> None: ...


class Adapt(Protocol):
    """Adapters: add to the stream something computed from a sublayer's normed input."""

    def attention(self, x: Tensor, normed: Tensor, /) -> Tensor: ...
    def mlp(self, x: Tensor, normed: Tensor, /) -> Tensor: ...


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(b, n, D) -> (b, h, n, d)"""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(b, h, n, d) -> (b, n, D)"""
    return x.transpose(1, 2).flatten(2)


def self_attention(block: Block, normed: Tensor, rotation: Rotation | None = None) -> Tensor:
    """Every token reads every token."""
    q, k, v = block.project(normed, rotation)
    return merge_heads(F.scaled_dot_product_attention(q, k, v))


def seen_by(see: Callable[[Tensor], object], rotation: Rotation | None = None) -> Attend:
    """`self_attention` that first shows the normed tokens."""

    def attend(block: Block, normed: Tensor) -> Tensor:
        see(normed)
        return self_attention(block, normed, rotation)

    return attend


class RMSNorm(nn.RMSNorm):
    """torch's, in the type of its weight: autocast does that for a LayerNorm alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def make_norm(config: ViTConfig, width: int | None = None) -> nn.Module:
    """A norm of the kind that the trunk has, of tokens unless another width is given."""
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

        The `rotation` is the trunk's, if it has one and the first of these tokens are its own.
        """
        q, k, v = (split_heads(x, self.heads) for x in self.qkv(normed).chunk(3, dim=-1))
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        return q, k, v

    def keys_values(
        self, normed: Tensor, rotation: Rotation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values only: of memory cells, which ask nothing, or of the trunk's tokens."""
        width = normed.shape[-1]
        bias = None if self.qkv.bias is None else self.qkv.bias[width:]
        k, v = F.linear(normed, self.qkv.weight[width:], bias).chunk(2, dim=-1)
        k, v = split_heads(k, self.heads), split_heads(v, self.heads)
        return k if rotation is None else rotation(k), v

    def add_up(self, read: Tensor) -> Tensor:
        """What was read (b, n, D), as it is added to the tokens but for LayerScale."""
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
        if dropped is not None:  # no list as an index: a GPU would be waited for
            ends = slice(None, dropped.start), slice(dropped.stop, None)
            x, normed = (torch.cat([y[:, end] for end in ends], 1) for y in (x, normed))
        x = x + (read if self.scale1 is None else read * self.scale1)
        if adapters is not None:
            x = adapters.attention(x, normed)
        normed = self.norm2(x)
        thought = self.mlp(normed)
        x = x + (thought if self.scale2 is None else thought * self.scale2)
        if adapters is not None:
            x = adapters.mlp(x, normed)
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


class Head(nn.Module):
    """The original model's own pooling and classifier. Not part of the fingerprint."""

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


class ViT(nn.Module):
    """A plain Vision Transformer: the trunk (or backbone) that tasks attach to.

    Calling it gives the original model's logits, `tokens` the tokens of its last layer. Usually
    `load_trunk`, `from_transformers`, `from_timm` or `random_trunk` makes one.

    Args:
        config: The architecture: image size, patch size, width, depth, heads and so on.

    Attributes:
        config: The architecture.
        source: Where the weights came from. Engrams record it as their trunk.
        preprocessing: How images become pixels, or None if that is not known.
        labels: Names of the original model's classes, or None if they are not known.

    Examples:
        >>> trunk = engram.load_trunk("pico")
        >>> logits = trunk(torch.rand(4, 3, 32, 32))  # (4, 10)
    """

    position: nn.Parameter | None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        if config.width % config.heads:
            raise EngramError(
                f"A width of {config.width} cannot be divided into {config.heads} heads; "
                "check the number of heads in the configuration."
            )
        if config.rotary is not None and (config.width // config.heads) % 4:
            raise EngramError(
                f"Heads of width {config.width // config.heads} cannot have rotary positions, "
                "which need a multiple of 4; check the number of heads in the configuration."
            )
        self.config = config
        self.source: str = "random"
        self.preprocessing: Preprocessing | None = None
        self.labels: tuple[str, ...] | None = None
        width = config.width

        def tokens(count: int) -> nn.Parameter | None:
            return nn.Parameter(drawn(count)) if count else None

        def drawn(count: int) -> Tensor:
            empty = torch.empty(count, width)
            if empty.is_meta:  # to draw there would load torch's compiler, which takes seconds
                return empty
            return torch.randn(count, width) * 0.02

        self.patch = nn.Conv2d(3, width, config.patch, config.patch, bias=config.patch_bias)
        self.class_token = tokens(int(config.class_token))  # (1, D)
        self.registers = tokens(config.registers)  # (registers, D)
        self.prefix_position = tokens(config.prefix_positions)  # (prefix positions, D)
        learned = config.positions == "learned"
        self.position = tokens(config.grid[0] * config.grid[1] if learned else 0)
        self.patch_norm = make_norm(config) if config.patch_norm else None
        self.pre_norm = make_norm(config) if config.pre_norm else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = make_norm(config) if config.final_norm else nn.Identity()
        self.head = Head(config, config.head) if config.head else None
        self._resized: tuple[object, Tensor] | None = None
        self._rotations: dict[object, Rotation] = {}  # by the size of images
        self._fingerprint: tuple[object, str] | None = None
        self._rounded: tuple[str, str] | None = None  # hashes of the rounded weights, and before

    @property
    def layers(self) -> list[Block]:
        return cast("list[Block]", list(self.blocks))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.patch.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of pixels, of tokens and of all weights but those that were rounded."""
        return self._like.dtype

    @property
    def _like(self) -> Tensor:
        return cast("Tensor", self.layers[0].norm1.weight)

    @property
    def stored(self) -> Stored:
        """The type that the weights of the layers have, or had before they were cast again."""
        return "fp32" if self._rounded is None else "bf16"

    # The forward pass

    def forward(self, pixels: Tensor) -> Tensor:
        """The original model's own logits.

        Args:
            pixels: Normalised pixels (images, 3, height, width). Height and width may be any
                multiples of the patch size.

        Returns:
            The logits (images, classes), or the embedding if the original head gives one.

        Raises:
            EngramError: The trunk has no head, or the pixels have the wrong shape or type.

        Examples:
            >>> trunk = engram.load_trunk("pico")
            >>> trunk(torch.rand(4, 3, 32, 32)).shape
            torch.Size([4, 10])
        """
        if self.head is None:
            raise EngramError(
                f"The trunk {self.source} has no head of its own, so it gives no logits; "
                "use trunk.tokens(pixels), or add a task."
            )
        out: Tensor = self.head(*self._last(pixels))
        return out

    def tokens(self, pixels: Tensor) -> Tensor:
        """The tokens of the last layer, after the final norm.

        Args:
            pixels: Normalised pixels (images, 3, height, width).

        Returns:
            The tokens (images, tokens, width): the class token first, if the trunk has one, then
            registers, then patches.

        Examples:
            >>> trunk = engram.load_trunk("pico")
            >>> trunk.tokens(torch.rand(4, 3, 32, 32)).shape
            torch.Size([4, 65, 192])
        """
        return self._last(pixels)[1]

    def _last(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The last layer's tokens before and after the final norm."""
        with self.products():
            raw = self.encode(self.embed(pixels), pixels.shape[-2:])
            return self.unrounded(raw), self.unrounded(self.norm(raw))

    def encode(self, x: Tensor, size: Sequence[int], see: See | None = None) -> Tensor:
        """The last layer's tokens, before the final norm, of images of this height and width.

        `see` gets every layer's normed tokens.
        """
        rotation = self.rotation(size, x.shape[1])
        plain = partial(self_attention, rotation=rotation)
        for layer, block in enumerate(self.layers):
            x = block(x, plain if see is None else seen_by(partial(see, layer), rotation))
        return x

    def rotation(self, size: Sequence[int], n: int) -> Rotation | None:
        """What turns the queries and keys of n tokens of images of this height and width.

        None if the trunk has no rotary positions. All tokens but the patches, which are the last,
        stay as they are.
        """
        config = self.config
        if config.rotary is None:
            return None
        like = self._like
        key = (*size, n, like.device, like.dtype)
        kept = self._rotations.get(key)
        if kept is not None:
            return kept
        grid, d = (size[0] // config.patch, size[1] // config.patch), config.width // config.heads
        if torch.compiler.is_compiling():
            return rotation(config.rotary, grid, n, d, like)
        with torch.inference_mode(False):  # it may be kept for a pass that learns
            made = rotation(config.rotary, grid, n, d, like)
        if len(self._rotations) >= _KEPT:
            self._rotations.clear()
        self._rotations[key] = made
        return made

    def embed(self, pixels: Tensor, class_token: Tensor | None = None) -> Tensor:
        """Pixels (b, 3, height, width) to the first layer's input (b, n, D).

        A `class_token` (1, D) takes the place of the trunk's own, or is put before the patches
        where the trunk has none. The height and width may be any multiples of the patch size.
        """
        self._check(pixels)
        x: Tensor = self.patch(pixels)  # (b, D, rows, columns)
        grid = (x.shape[2], x.shape[3])
        x = x.flatten(2).transpose(1, 2)
        if self.patch_norm is not None:
            x = self.patch_norm(x)
        position = self._position(grid)
        x = x if position is None else x + position
        prefix = self._prefix(self.class_token if class_token is None else class_token)
        if prefix is not None:
            x = torch.cat([prefix.expand(x.shape[0], -1, -1), x], dim=1)
        if self.pre_norm is not None:
            x = self.pre_norm(x)
        return x

    def place(self, class_token: Tensor) -> Tensor:
        """Class tokens (k, D) as they enter the first layer: with the position embedding of 0."""
        x = class_token
        if self.config.class_token and self.prefix_position is not None:
            x = x + self.prefix_position[0]
        if self.pre_norm is not None:
            x = self.pre_norm(x)
        return x

    def pool(self, tokens: Tensor) -> Tensor:
        """What a new head sees of tokens (b, n, D): the class token, or the mean of the patches."""
        if self.config.class_token:
            return tokens[:, 0]
        return tokens[:, self.config.prefix :].mean(1)

    def _prefix(self, class_token: Tensor | None) -> Tensor | None:
        parts = [part for part in (class_token, self.registers) if part is not None]
        if not parts:
            return None
        prefix = torch.cat(parts)
        if self.prefix_position is not None:
            missing = len(prefix) - len(self.prefix_position)
            prefix = prefix + F.pad(self.prefix_position, (0, 0, 0, missing))
        return prefix

    def _position(self, grid: tuple[int, int]) -> Tensor | None:
        """Position embeddings of the patches (rows * columns, D), resized when not native."""
        if self.position is None:
            return self._waves(grid) if self.config.positions == "waves" else None
        if grid == self.config.grid:
            return self.position
        if torch.compiler.is_compiling() or (
            torch.is_grad_enabled() and self.position.requires_grad
        ):
            self._resized = None
            return self._resize_position(self.position, grid)
        key = (grid, version(self.position))
        if self._resized is None or self._resized[0] != key:
            self._resized = (key, self._resize_position(self.position, grid))
        return self._resized[1]

    def _waves(self, grid: tuple[int, int]) -> Tensor:
        key = (grid, self.device, self.dtype)
        if self._resized is None or self._resized[0] != key:
            if torch.compiler.is_compiling():
                return waves(grid, self.config.width, self._like)
            with torch.inference_mode(False):
                self._resized = (key, waves(grid, self.config.width, self._like))
        return self._resized[1]

    def _resize_position(self, position: Tensor, grid: tuple[int, int]) -> Tensor:
        field = position.float().T.reshape(1, -1, *self.config.grid)  # (1, D, rows, columns)
        field = F.interpolate(
            field, size=grid, mode="bicubic", align_corners=False, antialias=self.config.antialias
        )
        return field.flatten(2)[0].T.to(position.dtype)

    def _check(self, pixels: Tensor) -> None:
        patch = self.config.patch
        if not isinstance(pixels, Tensor):
            raise EngramError(
                f"The trunk {self.source} got pixels as {type(pixels).__name__}; it expects a "
                "torch tensor, as torch.from_numpy makes from an array."
            )
        shape = tuple(pixels.shape)
        if len(shape) != 4 or shape[1] != 3 or not pixels.is_floating_point():
            raise EngramError(
                f"The trunk {self.source} got pixels of shape {shape} and type {pixels.dtype}; it "
                "expects floating-point numbers of shape (images, 3, height, width)."
            )
        own = self.dtype
        if pixels.dtype != own and autocast_dtype(pixels.device) is None:
            raise EngramError(
                f"The trunk {self.source} is in {own} and got pixels in {pixels.dtype}; cast one "
                "of the two, as in pixels.to(trunk.dtype)."
            )
        if shape[2] % patch or shape[3] % patch or not (shape[2] and shape[3]):
            raise EngramError(
                f"The trunk {self.source} got images of {shape[2]} x {shape[3]} pixels; height "
                f"and width must be multiples of its patch size {patch}, such as "
                f"{self.config.image_size[0]} x {self.config.image_size[1]}."
            )

    def at_size(self, size: tuple[int, int]) -> ViT:
        """A copy whose own image size is this one, so that no position is resized in a pass."""
        trunk = copy.deepcopy(self)
        patch = self.config.patch
        if self.position is not None:
            with torch.no_grad():
                position = self._position((size[0] // patch, size[1] // patch))
            assert position is not None
            trunk.position = nn.Parameter(position.clone(), requires_grad=False)
        trunk.config = replace(self.config, image_size=size)
        return trunk

    def keep_positions(self) -> None:
        """Compute now what positions of its own image size are computed, not learned.

        A graph that is traced afterwards has them as constants.
        """
        config = self.config
        self._position(config.grid)
        n = config.prefix + config.grid[0] * config.grid[1]
        for more in (0, 1):  # a task may add a class token where the trunk has none
            self.rotation(config.image_size, n + more)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes of the original head: its labels, else numbers; none for an embedding."""
        if self.config.head is None or not self.config.head.classes:
            return ()
        return self.labels or tuple(str(i) for i in range(self.config.head.classes))

    # Half precision

    def round_weights(self) -> ViT:
        """Keep the weights of the layers and of the patch embedding in bf16: half the memory.

        Norms, tokens, positions and the head stay in fp32, and so do tasks. Products are computed
        in bf16 then. The fingerprint stays that of the weights before they were rounded.
        """
        before = self.fingerprint
        for module in (self.patch, *self.blocks.modules()):
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                module.to(torch.bfloat16)
        self._rounded = (self._hash(), before)
        return self

    def products(self) -> AbstractContextManager[object]:
        """Where products with the weights are computed: autocast, if they are rounded."""
        half = self.patch.weight.dtype
        if half == self.dtype or autocast_dtype(self.device) is not None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype_for(self.stored, self.device))

    def unrounded(self, tokens: Tensor) -> Tensor:
        """Tokens that came out of `products`, as the final norm, heads and tasks take them."""
        return tokens if self._rounded is None else tokens.to(self.dtype)

    # Identity

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the trunk's tensors (names, shapes and values), without its head.

        An engram attaches only to a trunk with the fingerprint it was trained on. It is the same
        whichever layout the weights were read from.

        Returns:
            64 hexadecimal digits.

        Examples:
            >>> engram.load_trunk("pico").fingerprint == engram.load_trunk("pico").fingerprint
            True
        """
        state = tuple(map(version, self._identity().values()))
        if self._fingerprint is None or self._fingerprint[0] != state:
            found = self._hash()
            if self._rounded is not None and self._rounded[0] == found:
                found = self._rounded[1]
            self._fingerprint = (state, found)
        return self._fingerprint[1]

    def _identity(self) -> dict[str, Tensor]:
        return {n: p for n, p in self.named_parameters() if not n.startswith("head.")}

    def _hash(self) -> str:
        tensors = self._identity()
        if self.config.rotary is not None:  # no tensor shows how far it turns
            numbers = [float(number) for number in astuple(self.config.rotary)]
            tensors["rotary"] = torch.tensor(numbers)
        return tensors_hash(tensors)
