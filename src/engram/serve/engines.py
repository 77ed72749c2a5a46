"""What computes the answers of the service: PyTorch, or ONNX Runtime on an exported graph."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
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


class OneByOne:
    """Asks an engine about one image at a time.

    int8 rounds with a step for the whole batch, so an image's answer would depend on which other
    requests share its pass.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, pixels: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        parts = [self.engine.run(pixels[i : i + 1], tasks) for i in range(len(pixels))]
        return {name: torch.cat([part[name] for part in parts]) for name in tasks}


def make_engine(model: MemoryViT, kind: str, threads: int = 0) -> Engine:
    """An engine of this kind for a model; those of ONNX export the model first."""
    if kind == "torch":
        if threads:
            torch.set_num_threads(threads)
        return TorchEngine(model)
    from engram.export.write import OnnxModel, export_onnx

    with tempfile.TemporaryDirectory(prefix="engram-") as folder:
        path = Path(folder) / "model.onnx"
        export_onnx(model, path, int8=kind == "onnx-int8")
        engine = OnnxModel(path.read_bytes(), threads=threads or None)
    return OneByOne(engine) if kind == "onnx-int8" else engine
