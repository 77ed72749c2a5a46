"""What computes outputs: pixels and task names in, outputs out.

Evaluation, prediction, the service and exported files all answer through this one protocol, so
each of them works with the model itself and with an exported graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engram.model import MemoryViT


class Engine(Protocol):
    """The outputs of a model that does not change any more."""

    def run(self, pixels: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        """Outputs by task ("base" is the trunk's own) for normalised pixels (b, 3, h, w)."""


class TorchEngine:
    """The model itself; with `exact`, every answer is bit for bit what it would be alone."""

    def __init__(self, model: MemoryViT, exact: bool = False) -> None:
        self.model, self.exact = model.eval(), exact

    def run(self, pixels: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        with torch.inference_mode():
            outputs: dict[str, Tensor] = self.model(pixels, list(tasks), self.exact)
        return outputs


class OneByOne:
    """Runs an engine on one image at a time.

    int8 rounds with one step for the whole batch, so that an image's answer would depend on the
    other images in its pass.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, pixels: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        parts = [self.engine.run(pixels[i : i + 1], tasks) for i in range(len(pixels))]
        return {name: torch.cat([part[name] for part in parts]) for name in tasks}
