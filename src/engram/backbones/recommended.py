"""The backbones that are recommended, as facts that need no network: `engram backbones` lists them.

docs/backbones.md says why these, and its table is checked against this one. Parameters and download
sizes follow from the shapes. The licences are those of the model cards on the Hub.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from engram.util import hub
from engram.vit.vit import HeadConfig, ViT, ViTConfig

PICO = "pico"


@dataclass(frozen=True)
class RecommendedBackbone:
    """A backbone of the Hub that can be chosen by a short name."""

    name: str
    repo: str  # the Hub id
    about: str
    config: ViTConfig
    licence: str = "Apache-2.0"
    image_size: int = 224  # of the pixels that it is given; position embeddings may be for more
    unused: int = 0  # numbers in its file that the backbone does not have

    @cached_property
    def parameters(self) -> int:
        """The number of its parameters, its own head included."""
        with torch.device("meta"):  # no memory and no random numbers
            return sum(parameter.numel() for parameter in ViT(self.config).parameters())

    @property
    def download(self) -> int:
        """The size of its file in bytes, without the header: the weights are fp32."""
        return 4 * (self.parameters + self.unused)

    @property
    def on_this_machine(self) -> bool:
        """Whether it can be loaded without a network."""
        return hub.is_cached(self.repo, ("config.json", "model.safetensors"))


def _shape(width: int, patch: int, grid: int, classes: int = 0, *, dino: bool = False) -> ViTConfig:
    return ViTConfig(
        image_size=(grid * patch, grid * patch),
        patch=patch,
        width=width,
        depth=12,
        heads=width // 64,
        mlp_width=4 * width,
        layer_scale=dino,
        head=HeadConfig(classes) if classes else None,
    )


#: The best first: where there is no network, the first that is on this machine is used.
RECOMMENDED = (
    RecommendedBackbone(
        "dinov2-small",
        "facebook/dinov2-small",
        "photographs of any kind; the default",
        _shape(384, 14, 37, dino=True),
        unused=384,  # the token of masked patches
    ),
    RecommendedBackbone(
        "dinov2-base",
        "facebook/dinov2-base",
        "more accurate, if there is a GPU or patience",
        _shape(768, 14, 37, dino=True),
        unused=768,
    ),
    RecommendedBackbone(
        "vit-base",
        "timm/vit_base_patch16_224.augreg2_in21k_ft_in1k",
        "knows ImageNet-1k",
        _shape(768, 16, 14, 1000),
    ),
    RecommendedBackbone(
        "vit-small",
        "timm/vit_small_patch16_224.augreg_in21k_ft_in1k",
        "smaller, knows ImageNet-1k",
        _shape(384, 16, 14, 1000),
    ),
    RecommendedBackbone(
        "vit-base-32",
        "google/vit-base-patch32-224-in21k",
        "the paper's own backbone; few, large patches",
        _shape(768, 32, 7),
        unused=768 * 769,  # the pooling layer
    ),
    RecommendedBackbone(
        "vit-tiny",
        "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k",
        "the fastest, knows ImageNet-1k",
        _shape(192, 16, 14, 1000),
    ),
)


def recommended(name: str) -> RecommendedBackbone | None:
    """The recommended backbone of this short name or Hub id."""
    return next(
        (backbone for backbone in RECOMMENDED if name in (backbone.name, backbone.repo)), None
    )
