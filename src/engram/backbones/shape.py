"""The shape of a backbone: all that the tensors and the costs of a task depend on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engram.backbones.schemas import MAX_PATCHES, PREFIX, SHAPE
from engram.errors import EngramError
from engram.util.schema import Integer, Invalid, Object
from engram.vit.vit import ViT, ViTConfig

#: The fields of `BackboneShape`.
SCHEMA = Object({**SHAPE, "prefix": PREFIX, "parameters": Integer(0, 10**12)}, others=True)


@dataclass(frozen=True)
class BackboneShape:
    """The sizes of a backbone, without its values. Impossible numbers are an EngramError."""

    image_size: tuple[int, int]
    patch: int
    width: int
    depth: int
    mlp_width: int
    activation: str
    class_token: bool
    prefix: int  # tokens before the first patch, the class token among them
    parameters: int  # without the original head

    def __post_init__(self) -> None:
        try:
            SCHEMA.check(vars(self), "")
        except Invalid as error:
            raise EngramError(f"No backbone has such a shape: {error}.") from None
        height, width = self.image_size
        if not 1 <= (height // self.patch) * (width // self.patch) <= MAX_PATCHES:
            raise EngramError(
                f"No backbone with patches of {self.patch} pixels takes images of {height} x "
                f"{width}: they are cut into 1 to {MAX_PATCHES:,} patches."
            )

    @classmethod
    def of(cls, backbone: ViT | ViTConfig) -> BackboneShape:
        if isinstance(backbone, ViTConfig):
            with torch.device("meta"):  # no memory and no random numbers
                backbone = ViT(backbone)
        config = backbone.config
        return BackboneShape(
            image_size=config.image_size,
            patch=config.patch,
            width=config.width,
            depth=config.depth,
            mlp_width=config.mlp_width,
            activation=config.activation,
            class_token=config.class_token,
            prefix=config.prefix,
            parameters=sum(p.numel() for n, p in backbone.named_parameters() if n[:5] != "head."),
        )
