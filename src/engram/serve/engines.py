"""The engine that the settings name: PyTorch, or ONNX Runtime on exported graphs."""

from __future__ import annotations

import torch

from engram.errors import EngramError
from engram.inference.engine import Engine, OneByOne, TorchEngine
from engram.model import MemoryViT
from engram.util.devices import device_for
from engram.util.flag_names import flag


def make_engine(
    model: MemoryViT,
    kind: str,
    threads: int = 0,
    device: str = "auto",
    precision: str = "fp32",
    before: Engine | None = None,
) -> Engine:
    """An engine of this kind for a model, which moves to the device.

    The ONNX engines export the backbone first, unless that of the engine `before` is the same; they
    run on the CPU, in the precision of their kind.
    """
    if threads:
        torch.set_num_threads(threads)
    if kind == "torch":
        return TorchEngine(model, device=device_for(device), precision=precision)
    for name, given, own in (
        ("device", device, ("auto", "cpu")),
        ("precision", precision, ("fp32",)),
        ("backbone_dtype", model.backbone.stored, ("fp32",)),
    ):
        if given not in own:
            raise EngramError(
                f"{flag('engine')} is {kind!r}, which has no {flag(name)} {given}; leave that "
                f"out, or use {flag('engine')} torch."
            )
    int8 = kind == "onnx-int8"
    if not all(task.method.shares_pass for task in model.tasks.values()):
        return _whole(model, int8, threads or None)
    from engram.export.engine import OnnxEngine

    return OnnxEngine(model, int8=int8, threads=threads or None, before=before)


def _whole(model: MemoryViT, int8: bool, threads: int | None) -> Engine:
    """A model as one graph: a task that changes the backbone's tokens has no other beside it."""
    from engram.export import OnnxModel
    from engram.export.runtime import require_onnx
    from engram.export.write import check_exportable, onnx_file

    require_onnx()
    data, _ = onnx_file(model, check_exportable(model), int8, "it is not used")
    engine = OnnxModel(data, threads)
    return OneByOne(engine) if int8 else engine
