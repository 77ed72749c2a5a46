"""The engine that settings name: PyTorch, or onnxruntime or OpenVINO on exported graphs."""

from __future__ import annotations

from engram.errors import EngramError, flag
from engram.export.runtime import RUNTIMES, OnnxModel, Runtime, require_onnx
from engram.inference.engine import Engine, EngineSettings, OneByOne, torch_engine
from engram.model import MemoryViT


def make_engine(model: MemoryViT, settings: EngineSettings, before: Engine | None = None) -> Engine:
    """The engine that settings name, for a model, which moves to its device.

    All but torch export the backbone first, unless that of the engine `before` is the same; they
    run on the CPU, in the precision of their name, with as many threads as torch.
    """
    if settings.engine == "torch":
        return torch_engine(model, settings)
    for name, value, own in (
        ("device", settings.device, ("auto", "cpu")),
        ("precision", settings.precision, ("fp32",)),
        ("backbone_dtype", model.backbone.stored, ("fp32",)),
    ):
        if value not in own:
            raise EngramError(
                f"{flag('engine')} is {settings.engine!r}, which has no {flag(name)} {value}; "
                f"leave that out, or use {flag('engine')} torch."
            )
    runtime = RUNTIMES[settings.engine]
    if all(task.method.shares_pass for task in model.tasks.values()):
        from engram.export.onnx_engine import OnnxEngine

        return OnnxEngine(model, runtime, before=before)
    whole = _WholeGraph(model, runtime)
    return OneByOne(whole) if runtime.rounds else whole


class _WholeGraph(OnnxModel):
    """A model as one graph: a task that changes the backbone's tokens has no other beside it."""

    def __init__(self, model: MemoryViT, runtime: Runtime) -> None:
        from engram.export.verify import all_outputs, expected_outputs, verified
        from engram.export.write import check_exportable, onnx_file

        require_onnx()
        names = check_exportable(model)
        precision = "int8" if runtime.precision == "int8" else "float32"
        graph, _ = onnx_file(model, names, precision, "it is not used")
        super().__init__(graph)
        if runtime.library != "onnxruntime":
            self._session = runtime.open(graph)
            forward, (pixels, expected) = all_outputs(self, names), expected_outputs(model, names)
            verified(forward, pixels, expected, runtime.precision, "it is not used")
