"""The engine that the settings name: PyTorch, or ONNX Runtime on an exported graph."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from engram.errors import EngramError
from engram.inference.engine import Engine, OneByOne, TorchEngine
from engram.model import MemoryViT
from engram.util.devices import device_for
from engram.util.spelling import spell


def make_engine(
    model: MemoryViT,
    kind: str,
    threads: int = 0,
    device: str = "auto",
    precision: str = "fp32",
) -> Engine:
    """An engine of this kind for a model, which moves to the device.

    The ONNX engines export the model first; they run on the CPU, in the precision of their kind.
    """
    if kind == "torch":
        if threads:
            torch.set_num_threads(threads)
        return TorchEngine(model, device=device_for(device), precision=precision)
    for name, given, own in (
        ("device", device, ("auto", "cpu")),
        ("precision", precision, ("fp32",)),
        ("trunk_dtype", model.trunk.stored, ("fp32",)),
    ):
        if given not in own:
            raise EngramError(
                f"{spell('engine')} is {kind!r}, which has no {spell(name)} {given}; leave that "
                f"out, or use {spell('engine')} torch."
            )
    from engram.export import OnnxModel, export_onnx

    with tempfile.TemporaryDirectory(prefix="engram-") as folder:
        path = Path(folder) / "model.onnx"
        export_onnx(model, path, int8=kind == "onnx-int8")
        engine = OnnxModel(path.read_bytes(), threads=threads or None)
    return OneByOne(engine) if kind == "onnx-int8" else engine
