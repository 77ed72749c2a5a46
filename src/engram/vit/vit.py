"""One plain pre-norm Vision Transformer, the *backbone*.

Options cover what the weights that `backbones` reads need (ViT, DeiT, DINO to DINOv3, CLIP, SigLIP,
MAE, AIMv2, EVA-02, PE); none of them is a different architecture. layers.py has the layer itself,
and the letters of all axes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.errors import EngramError
from engram.util.tensors import VersionedCache, autocast_dtype, tensors_hash, version
from engram.vit.layers import (
    Block,
    ClassifierHead,
    HeadConfig,
    LayerHook,
    ViTConfig,
    make_norm,
    self_attention,
)
from engram.vit.pos_embed import Rotation, resized, rotation, waves

if TYPE_CHECKING:
    from engram.images.preprocessing import Preprocessing

__all__ = ["Block", "HeadConfig", "Stored", "ViT", "ViTConfig"]

Stored = Literal["fp32", "bf16"]
_Made = TypeVar("_Made")
_KEPT = 8  # sizes of images whose positions are kept


class ViT(nn.Module):
    """A plain Vision Transformer: the backbone that tasks attach to.

    Calling it gives the original model's logits, `tokens` the tokens of its last layer. Usually
    `load_backbone`, `from_transformers`, `from_timm` or `random_backbone` makes one.

    Args:
        config: The architecture: image size, patch size, width, depth, heads and so on.

    Attributes:
        config: The architecture.
        source: Where the weights came from. Engrams record it as their backbone.
        preprocessing: How images become pixels, or None if that is not known.
        labels: Names of the original model's classes, or None if they are not known.

    Examples:
        >>> backbone = engram.load_backbone("pico")
        >>> logits = backbone(torch.rand(4, 3, 32, 32))  # (4, 10)
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
            empty = torch.empty(count, width)  # to draw on meta would load torch's compiler
            drawn = empty if empty.is_meta else torch.randn(count, width) * 0.02
            return nn.Parameter(drawn) if count else None

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
        self.head = ClassifierHead(config, config.head) if config.head else None
        self._kept: dict[object, Any] = {}  # positions and pooling weights, by the size of images
        self._fingerprint: VersionedCache[str] = VersionedCache(1)
        self._rounded: tuple[str, str] | None = None  # hashes of the rounded weights, and before

    @property
    def layers(self) -> list[Block]:
        return cast("list[Block]", list(self.blocks))

    @property
    def device(self) -> torch.device:
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
            EngramError: The backbone has no head, or the pixels have the wrong shape or type.

        Examples:
            >>> backbone = engram.load_backbone("pico")
            >>> backbone(torch.rand(4, 3, 32, 32)).shape
            torch.Size([4, 10])
        """
        if self.head is None:
            raise EngramError(
                f"The backbone {self.source} has no head of its own, so it gives no logits; "
                "use backbone.tokens(pixels), or add a task."
            )
        out: Tensor = self.head(*self._last(pixels))
        return out

    def tokens(self, pixels: Tensor) -> Tensor:
        """The tokens of the last layer, after the final norm.

        Args:
            pixels: Normalised pixels (images, 3, height, width).

        Returns:
            The tokens (images, tokens, width): the class token first, if the backbone has one, then
            registers, then patches.

        Examples:
            >>> backbone = engram.load_backbone("pico")
            >>> backbone.tokens(torch.rand(4, 3, 32, 32)).shape
            torch.Size([4, 65, 192])
        """
        return self._last(pixels)[1]

    def _last(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The last layer's tokens before and after the final norm."""
        with self.autocast():
            raw = self.encode(self.embed(pixels), pixels.shape[-2:])
            return self.to_fp32(raw), self.to_fp32(self.norm(raw))

    def encode(self, x: Tensor, size: Sequence[int], hook: LayerHook | None = None) -> Tensor:
        """The last layer's tokens, before the final norm, of images of this height and width.

        `hook` is called with every layer's normed tokens.
        """
        rotation = self.rotation(size, x.shape[1])
        for layer, block in enumerate(self.layers):
            own = None if hook is None else partial(hook, layer)
            x = block(x, partial(self_attention, rotation=rotation, hook=own))
        return x

    def rotation(self, size: Sequence[int], n: int) -> Rotation | None:
        """The rotation of queries and keys of n tokens of images of this height and width.

        None without rotary positions. All tokens but the patches, which are the last, stay.
        """
        config, like = self.config, self._like
        if config.rotary is None:
            return None
        grid, d = (size[0] // config.patch, size[1] // config.patch), config.width // config.heads
        make = partial(rotation, config.rotary, grid, n, d, like)
        return self.keep(("rotation", grid, n, like.device, like.dtype), make)

    def embed(self, pixels: Tensor, class_token: Tensor | None = None) -> Tensor:
        """Pixels (b, 3, height, width) to the first layer's input (b, n, D).

        A `class_token` (1, D) takes the place of the backbone's own, or is put before the patches
        where the backbone has none.
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
        """The pooled token of tokens (b, n, D): the class token, or what the patches are pooled to.

        Where there is no class token, by the attention pooling that the original model has, or
        their mean.
        """
        if self.config.class_token:
            return tokens[:, 0]
        if self.config.pooler and self.head is not None:
            return self.head.pool_tokens(tokens)
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
        config, like, position = self.config, self._like, self.position
        if position is None:
            if config.positions != "waves":
                return None
            make = partial(waves, grid, config.width, like)
            return self.keep(("waves", grid, like.device, like.dtype), make)
        if grid == config.grid:
            return position
        make = partial(resized, position, config.grid, grid, config.antialias)
        learns = torch.is_grad_enabled() and position.requires_grad
        if learns:
            self._kept.clear()  # some optimisers write where `version` does not see it
        if learns or torch.compiler.is_compiling():
            return make()
        return self.keep(("position", grid, version(position)), make)

    def keep(self, key: object, make: Callable[[], _Made]) -> _Made:
        """Cache what `make` makes, for a few sizes of images; a traced graph caches nothing."""
        kept: _Made | None = self._kept.get(key)
        if kept is not None:
            return kept
        if torch.compiler.is_compiling():
            return make()
        with torch.inference_mode(False), torch.no_grad():  # it may serve a pass that learns
            made = make()
        if len(self._kept) >= _KEPT:
            self._kept.clear()
        self._kept[key] = made
        return made

    def _check(self, pixels: Tensor) -> None:
        patch = self.config.patch
        if not isinstance(pixels, Tensor):
            raise EngramError(
                f"The backbone {self.source} got pixels as {type(pixels).__name__}; it expects a "
                "torch tensor, as torch.from_numpy makes from an array. For paths and images there "
                "is engram.predict(model, image)."
            )
        shape = tuple(pixels.shape)
        if len(shape) != 4 or shape[1] != 3 or not pixels.is_floating_point():
            raise EngramError(
                f"The backbone {self.source} got pixels of shape {shape} and type {pixels.dtype}; "
                "it expects floating-point numbers of shape (images, 3, height, width)."
            )
        own = self.dtype
        if pixels.dtype != own and autocast_dtype(pixels.device) is None:
            raise EngramError(
                f"The backbone {self.source} is in {own} and got pixels in {pixels.dtype}; cast "
                "one of the two, as in pixels.to(backbone.dtype)."
            )
        if shape[2] % patch or shape[3] % patch or not (shape[2] and shape[3]):
            raise EngramError(
                f"The backbone {self.source} got images of {shape[2]} x {shape[3]} pixels; height "
                f"and width must be multiples of its patch size {patch}, such as "
                f"{self.config.image_size[0]} x {self.config.image_size[1]}."
            )

    def at_size(self, size: tuple[int, int]) -> ViT:
        """A copy whose own image size is this one, so that no position is resized in a pass."""
        backbone = copy.deepcopy(self)
        patch = self.config.patch
        if self.position is not None:
            with torch.no_grad():
                position = self._position((size[0] // patch, size[1] // patch))
            assert position is not None
            backbone.position = nn.Parameter(position.clone(), requires_grad=False)
        backbone.config = replace(self.config, image_size=size)
        return backbone

    def keep_positions(self) -> None:
        """Compute the positions of its own image size now, unless they are learned.

        A graph that is traced afterwards has them as constants.
        """
        config = self.config
        self._position(config.grid)
        n = config.prefix + config.grid[0] * config.grid[1]
        for more in (0, 1):  # a task may add a class token where the backbone has none
            self.rotation(config.image_size, n + more)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes of the original head: its labels, else numbers; none for an embedding."""
        head = self.config.head
        if head is None or head.projection:
            return ()
        return self.labels or tuple(str(i) for i in range(head.classes))

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

    def autocast(self) -> AbstractContextManager[object]:
        """Where products with the weights are computed: autocast, if they are rounded."""
        if self.patch.weight.dtype == self.dtype or autocast_dtype(self.device) is not None:
            return nullcontext()
        from engram.util.processes import dtype_for

        return torch.autocast(self.device.type, dtype_for(self.stored, self.device))

    def to_fp32(self, tokens: Tensor) -> Tensor:
        """Tokens that came out of `autocast`, as the final norm, heads and tasks take them."""
        return tokens if self._rounded is None else tokens.to(self.dtype)

    # Identity

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the backbone's tensors (names, shapes and values), without its classifier.

        An engram attaches only to a backbone with the fingerprint it was trained on. It is the same
        whichever layout the weights were read from.

        Returns:
            64 hexadecimal digits.

        Examples:
            >>> engram.load_backbone("pico").fingerprint == engram.load_backbone("pico").fingerprint
            True
        """

        def find() -> str:
            found = self._hash()
            rounded, before = self._rounded or ("", "")
            return before if found == rounded else found

        return self._fingerprint.get("", self.fingerprinted().values(), find)

    def fingerprinted(self) -> dict[str, Tensor]:
        """The tensors that tasks depend on: all but the head, and of that the pooling they read."""
        kept = ("head.pool.", "head.norm.") if self.config.pooler else ()
        return {
            name: parameter
            for name, parameter in self.named_parameters()
            if not name.startswith("head.") or name.startswith(kept)
        }

    def _hash(self) -> str:
        tensors = self.fingerprinted()
        if self.config.rotary is not None:  # no tensor shows how far it turns
            numbers = [float(number) for number in astuple(self.config.rotary)]
            tensors["rotary"] = torch.tensor(numbers)
        return tensors_hash(tensors)
