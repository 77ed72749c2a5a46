"""The shape of a trunk: all that the tensors and the costs of a task depend on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engram.errors import EngramError
from engram.vit import ViT, ViTConfig

_MOST = 10**12  # of anything; what a file claims is not believed beyond


@dataclass(frozen=True)
class TrunkShape:
    """The sizes of a trunk, without its values. Numbers that no trunk has are an EngramError."""

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
        height, width = self.image_size
        for name, least in (("patch", 1), ("width", 1), ("depth", 1), ("mlp_width", 1),
                            ("prefix", 0), ("parameters", 0)):  # fmt: skip
            if not least <= getattr(self, name) <= _MOST:
                raise EngramError(f"No trunk has the {name} {getattr(self, name)}.")
        if not self.patch <= min(height, width) <= max(height, width) <= _MOST:
            raise EngramError(
                f"No trunk with patches of {self.patch} pixels takes images of {height} x {width}."
            )

    @classmethod
    def of(cls, trunk: ViT | ViTConfig) -> TrunkShape:
        if isinstance(trunk, ViTConfig):
            with torch.device("meta"):  # no memory and no random numbers
                trunk = ViT(trunk)
        config = trunk.config
        return TrunkShape(
            image_size=config.image_size,
            patch=config.patch,
            width=config.width,
            depth=config.depth,
            mlp_width=config.mlp_width,
            activation=config.activation,
            class_token=config.class_token,
            prefix=config.prefix,
            parameters=sum(p.numel() for n, p in trunk.named_parameters() if n[:5] != "head."),
        )
