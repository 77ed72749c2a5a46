"""The ways through a model, which all give the same outputs."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from engram import MemoryViT, ViT

Pass = Callable[[MemoryViT, Tensor], dict[str, Tensor]]


def without_gradients(exact: bool) -> Pass:
    def answer(model: MemoryViT, pixels: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return model(pixels, exact=exact)

    return answer


def lean(model: MemoryViT, pixels: Tensor) -> dict[str, Tensor]:
    can = model.trunk.config.rotary is None
    with mock.patch("engram.sights.reads_lean", return_value=can):
        return model(pixels)


#: Those that build no graph come first.
PATHS: dict[str, Pass] = {
    "fast": without_gradients(exact=False),
    "exact": without_gradients(exact=True),
    "training": lambda model, pixels: model(pixels),
    "training, lean": lean,
    "training exactly": lambda model, pixels: model(pixels, exact=True),
}
TRAINING = [name for name in PATHS if name.startswith("training")]


def normed_of_every_layer(vit: ViT, pixels: Tensor) -> list[Tensor]:
    """What a cache holds: each layer's normed tokens of the plain trunk."""
    layers: list[Tensor] = []
    vit.encode(vit.embed(pixels), pixels.shape[-2:], lambda _, normed: layers.append(normed))
    return layers


def loss(logits: dict[str, Tensor]) -> Tensor:
    """A number in which every logit of every task counts differently."""
    parts = [
        (logits[name] * torch.linspace(-1, 2, logits[name].numel()).view_as(logits[name])).sum()
        for name in sorted(logits)
        if name != "base"
    ]
    return torch.stack(parts).sum()
