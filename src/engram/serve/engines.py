"""What computes the answers of the service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engram.model import MemoryViT


class Engine(Protocol):
    """Answers of a model that does not change any more."""

    def run(self, pixels: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        """Logits by task ("base" is the trunk's own) of normalised pixels (b, 3, h, w)."""


class TorchEngine:
    """The model itself."""

    def __init__(self, model: MemoryViT) -> None:
        self.model = model.eval()

    def run(self, pixels: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        with torch.inference_mode():
            answers: dict[str, Tensor] = self.model(pixels, tasks=list(tasks))
        return answers


def make_engine(model: MemoryViT, kind: str, threads: int = 0) -> Engine:
    """An engine of this kind for a model."""
    if threads:
        torch.set_num_threads(threads)
    return TorchEngine(model)
