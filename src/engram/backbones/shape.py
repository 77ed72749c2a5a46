"""Shapes and limits of backbones: all that the tensors and the costs of a task depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_args, get_type_hints

import torch

from engram.errors import EngramError
from engram.images.preprocessing import MAX_SIDE
from engram.util.schema import (
    Array,
    Boolean,
    Integer,
    Invalid,
    Nullable,
    Object,
    Real,
    Rule,
    String,
)
from engram.vit.layers import Activation, HeadConfig
from engram.vit.pos_embed import RotaryConfig
from engram.vit.vit import ViT, ViTConfig

#: The most patches, each of them a token, that an image may be cut into, such as 64 x 128. A token
#: reads all others, so images of twice the side take 16 times as long.
MAX_PATCHES = 8_192

SIZE = Array(Integer(1, MAX_SIDE), 2, 2)  # height and width in pixels
HEADS = Integer(1, 65_536)
EPS = Real(1e-15, 1)
#: The numbers that backbones and engrams record of a backbone's shape.
NUMBERS: dict[str, Rule] = {
    "image_size": SIZE,
    "patch": Integer(1, 1_024),
    "width": HEADS,
    "depth": Integer(1, 1_000),
    "heads": HEADS,
    "mlp_width": Integer(1, 1_000_000),
    **dict.fromkeys(("prefix", "registers", "prefix_positions"), Integer(0, 10_000)),
    "parameters": Integer(0, 10**12),
    "eps": EPS,
}


def rules(kind: Any, given: Mapping[str, Rule], others: bool = False) -> Object:
    """Schema of a dataclass: `given` rules by field; booleans and literals by their types."""
    required, optional = dict[str, Rule](), dict[str, Rule]()
    hints = get_type_hints(kind)
    for item in fields(kind):
        hint = hints[item.name]
        default = Boolean() if hint is bool else String(choices=get_args(hint))
        target = required if item.default is MISSING else optional
        target[item.name] = given.get(item.name, default)
    return Object(required, optional, others)


@dataclass(frozen=True)
class BackboneShape:
    """The sizes of a backbone, without its values. Impossible numbers are an EngramError."""

    image_size: tuple[int, int]
    patch: int
    width: int
    depth: int
    mlp_width: int
    activation: Activation
    class_token: bool
    prefix: int  # tokens before the first patch, the class token among them
    parameters: int  # without the original head
    pooler: bool = field(default=False, kw_only=True)  # attention pools its tokens, not their mean

    def __post_init__(self) -> None:
        try:
            _SHAPE.check(vars(self), "")
        except Invalid as error:
            raise EngramError(f"No backbone has such a shape: {error}.") from None
        height, width = self.image_size
        if not 1 <= (height // self.patch) * (width // self.patch) <= MAX_PATCHES:
            raise EngramError(
                f"No backbone with patches of {self.patch} pixels takes images of {height} x "
                f"{width}: they are cut into 1 to {MAX_PATCHES:,} patches."
            )

    @classmethod
    def measure(cls, backbone: ViT | ViTConfig) -> BackboneShape:
        if isinstance(backbone, ViTConfig):
            with torch.device("meta"):  # no memory and no random numbers
                backbone = ViT(backbone)
        parameters = sum(p.numel() for p in backbone.fingerprinted().values())
        names = [f.name for f in fields(BackboneShape) if f.name != "parameters"]
        sizes = {name: getattr(backbone.config, name) for name in names}
        return BackboneShape(**sizes, parameters=parameters)


_SHAPE = rules(BackboneShape, NUMBERS, others=True)
_ANGLE = Real(-1e6, 1e6)
_ANGLES: dict[str, Rule] = {"base": Real(1, 1e9), "span": _ANGLE, "start": _ANGLE, "offset": _ANGLE}
_HEAD: dict[str, Rule] = {
    "classes": Integer(0, 10_000_000),
    "pool_heads": Nullable(HEADS),
    "pool_mlp_width": Nullable(Integer(0, 1_000_000)),
}
_PARTS: dict[str, Rule] = {
    "rotary": Nullable(rules(RotaryConfig, _ANGLES)),
    "head": Nullable(rules(HeadConfig, _HEAD)),
}
#: The fields of `ViTConfig`, as `save_backbone` writes them.
CONFIG = rules(ViTConfig, NUMBERS | _PARTS)


def can_be_cut(size: Sequence[int], patch: int) -> bool:
    """Whether images of this height and width are whole patches, and not too many."""
    try:
        SIZE.check(size, "size")
    except Invalid:
        return False
    height, width = size
    if height % patch or width % patch:
        return False
    return (height // patch) * (width // patch) <= MAX_PATCHES
