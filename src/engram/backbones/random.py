"""Backbones with random weights: small ones for first steps and tests, common shapes for clocks."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from engram.errors import EngramError
from engram.vit.vit import HeadConfig, ViT, ViTConfig

_SHAPES = {"ti": (192, 3, 12), "s": (384, 6, 12), "b": (768, 12, 12), "l": (1024, 16, 24)}


def random_backbone(
    image_size: int = 32,
    patch: int = 8,
    width: int = 64,
    depth: int = 4,
    heads: int = 4,
    classes: int = 10,
    seed: int = 0,
    **options: object,
) -> ViT:
    """A small ViT with random weights, for first steps and tests.

    Args:
        image_size: Height and width of its images, in pixels.
        patch: Height and width of a patch, in pixels.
        width: Width of a token.
        depth: Number of layers.
        heads: Number of attention heads.
        classes: Number of classes of its own head; 0 for a backbone without a head.
        seed: Random seed for the weights.
        **options: Further fields of `ViTConfig`.

    Returns:
        The backbone, in evaluation mode.

    Examples:
        >>> backbone = engram.random_backbone(image_size=16, patch=4, classes=3)
        >>> logits = backbone(torch.rand(2, 3, 16, 16))  # (2, 3)
    """
    config = ViTConfig(
        image_size=(image_size, image_size),
        patch=patch,
        width=width,
        depth=depth,
        heads=heads,
        mlp_width=4 * width,
        head=HeadConfig(classes) if classes else None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vit = ViT(replace(config, **options))  # type: ignore[arg-type]
    vit.source = f"random (seed {seed})"
    return vit.eval()


def backbone_of_shape(name: str) -> ViT:
    """A backbone of a common shape, such as ViT-B/32, with random weights: as slow as trained."""
    found = re.fullmatch(r"(?:vit-)?(ti|s|b|l)/(8|14|16|32)", name.lower())
    if not found:
        raise EngramError(
            f"There is no shape {name!r}; give ViT-Ti, -S, -B or -L and the patch size, such as "
            "ViT-B/32."
        )
    width, heads, depth = _SHAPES[found[1]]
    patch = int(found[2])
    config = ViTConfig((224, 224), patch, width, depth, heads, 4 * width, head=HeadConfig(1000))
    backbone = ViT(config).eval()
    backbone.source = f"ViT-{found[1].title()}/{patch}, random weights"
    return backbone
