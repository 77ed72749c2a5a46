"""The engine that the settings name: PyTorch, or ONNX Runtime on an exported graph."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from engram.inference.engine import Engine, OneByOne, TorchEngine
from engram.model import MemoryViT


def make_engine(model: MemoryViT, kind: str, threads: int = 0) -> Engine:
    """An engine of this kind for a model; the ONNX engines export the model first."""
    if kind == "torch":
        if threads:
            torch.set_num_threads(threads)
        return TorchEngine(model)
    from engram.export import OnnxModel, export_onnx

    with tempfile.TemporaryDirectory(prefix="engram-") as folder:
        path = Path(folder) / "model.onnx"
        export_onnx(model, path, int8=kind == "onnx-int8")
        engine = OnnxModel(path.read_bytes(), threads=threads or None)
    return OneByOne(engine) if kind == "onnx-int8" else engine
