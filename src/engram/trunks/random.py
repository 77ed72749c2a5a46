"""Small random trunks, for first steps and tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from engram.vit import HeadConfig, ViT, ViTConfig


def random_trunk(
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
        classes: Number of classes of its own head; 0 for a trunk without a head.
        seed: Random seed for the weights.
        **options: Further fields of `ViTConfig`.

    Returns:
        The trunk, in evaluation mode.

    Examples:
        >>> trunk = engram.random_trunk(image_size=16, patch=4, classes=3)
        >>> logits = trunk(torch.rand(2, 3, 16, 16))  # (2, 3)
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
