"""Exported files and graphs as engines, as the model is; onnxruntime and OpenVINO run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import IO, Any

import torch
from torch import Tensor

from engram.errors import EngramError, Notice, flag
from engram.inference.engine import (
    Engine,
    EngineSettings,
    OneByOne,
    Outputs,
    asked_for,
    familiarity_name,
    torch_engine,
)
from engram.model import MemoryViT
from engram.util.optional import require
from engram.util.text import first_line

INPUT = "pixels"
KEY = "engram"  # of the metadata in an ONNX file; in a .pt2 it is the file engram.json


class OnnxModel(Engine):
    """An exported ONNX file that can be run.

    Args:
        path: The file, or its bytes.
        threads: CPU threads. By default as many as torch uses.

    Attributes:
        tasks: The names of the tasks.
        about: The file's metadata: preprocessing, backbone, and each task with its classes.

    Raises:
        EngramError: `engram export` did not write the file, or onnxruntime is not installed.

    Examples:
        >>> exported = engram.export.OnnxModel("model.onnx")
        >>> exported.tasks
        ('base', 'flowers')
    """

    def __init__(self, path: str | Path | bytes, threads: int | None = None) -> None:
        require("onnxruntime", extra="export", purpose="Running an ONNX file")
        source = path if isinstance(path, bytes) else os.fspath(path)
        name = "The exported graph" if isinstance(path, bytes) else str(path)
        if isinstance(source, str) and not os.path.isfile(source):
            raise EngramError(f"{name} does not exist; `engram export` writes such a file.")
        try:
            self.session = open_session(source, threads)
            metadata = self.session.get_modelmeta().custom_metadata_map
            self.about: dict[str, Any] = json.loads(metadata[KEY])
            self.tasks: tuple[str, ...] = tuple(self.about["tasks"])
        except Exception as error:  # onnxruntime raises many types for a bad file
            raise EngramError(
                f"{name} is not an ONNX file that `engram export` wrote ({first_line(error)})."
            ) from None

    def run(
        self, pixels: Tensor, tasks: Sequence[str] | None = None, familiarity: bool = False
    ) -> Outputs:
        """Compute the logits.

        Args:
            pixels: Normalised images, float (batch, 3, height, width).
            tasks: The tasks to answer. By default all of them.
            familiarity: Also compute the familiarity of tasks that keep statistics.

        Returns:
            The logits by task; "base" is the backbone's own head. The familiarity of a task is
            under its name with `:familiarity` behind it.
        """
        names = list(dict.fromkeys(self.tasks if tasks is None else tasks))
        for name in names:
            if name not in self.tasks:
                raise EngramError(f"There is no {name!r} in this file: {', '.join(self.tasks)}.")
        familiar = [name for name in names if "familiarity" in self.about["tasks"][name]]
        names += map(familiarity_name, familiar if familiarity else ())
        array = pixels.detach().cpu().float().contiguous().numpy()
        found = self.session.run(names, {INPUT: array})
        return dict(zip(names, map(torch.from_numpy, found), strict=True))


class TorchProgram(Engine):
    """An exported .pt2 file that can be run."""

    def __init__(self, file: Path | IO[bytes]) -> None:
        self._program = torch.export.load(file).module()

    def run(self, pixels: Tensor, tasks: Sequence[str], familiarity: bool = False) -> Outputs:
        return asked_for(self._program(pixels), tasks, familiarity)


@dataclass(frozen=True)
class Runtime:
    """A library that runs ONNX graphs, and the precision of their linear layers."""

    library: str = "onnxruntime"
    precision: str = "fp32"  # or bf16, int8

    @property
    def rounds(self) -> bool:
        """Whether answers differ from the model's by more than the order of additions."""
        return self.precision != "fp32"

    def open(self, graph: bytes) -> Any:
        """A session of onnxruntime, or what has its `run`."""
        if self.library == "openvino":
            return OpenVinoSession(graph, self.precision)
        return open_session(graph)


#: The engines that run exported graphs, by their names.
RUNTIMES = {
    "onnx": Runtime(),
    "onnx-int8": Runtime(precision="int8"),
    "openvino": Runtime("openvino", "bf16"),
    "openvino-fp32": Runtime("openvino"),
    "openvino-int8": Runtime("openvino", "int8"),
}


class OpenVinoSession:
    """OpenVINO on an ONNX model, with the `run` of onnxruntime's sessions."""

    def __init__(self, graph: bytes, precision: str) -> None:
        openvino = require("openvino", extra="openvino", purpose="The engine openvino")
        self._openvino, self._core = openvino, openvino.Core()
        self._model = self._core.read_model(graph)
        self._requests: dict[tuple[str, ...], Any] = {}  # by the outputs
        self._lock = Lock()  # a request computes once at a time
        self._config = {
            "INFERENCE_PRECISION_HINT": "f32" if precision == "fp32" else half_precision(),
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,  # a thread would wait for a core that others use
        }

    def run(self, names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        with self._lock:
            found = self._request(tuple(names)).infer(dict(feeds), share_inputs=True)
            return [found[name] for name in names]

    def _request(self, names: tuple[str, ...]) -> Any:
        """A request for these outputs alone; the first compiles the graph, in about a second."""
        if names not in self._requests:
            results = [self._model.output(name).get_node().input_value(0) for name in names]
            graph = self._openvino.Model(results, self._model.get_parameters())
            for output, name in zip(graph.outputs, names, strict=True):
                output.tensor.set_names({name})
            compiled = self._core.compile_model(graph, "CPU", self._config)
            self._requests[names] = compiled.create_infer_request()
        return self._requests[names]


_TRIAL = """
import numpy, openvino
from openvino import opset13 as op
x = op.parameter([-1, -1, 256], numpy.float32)
w = op.constant(numpy.ones((256, 256), numpy.float32))
y = op.softmax(op.matmul(op.matmul(x, w, False, True), x, False, True), 2)
core = openvino.Core()
model = core.compile_model(openvino.Model([y], [x]), "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})
model(numpy.ones((2, 64, 256), numpy.float32))
"""


@cache
def half_precision() -> str:
    """bf16 if this CPU can compute in it, else f32, with a notice.

    Some virtual CPUs announce instructions for bf16 and end the process that uses them.
    """
    import openvino

    if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        why = "This CPU has no bf16"
    else:
        trial = [sys.executable, "-c", _TRIAL]
        if not subprocess.run(trial, capture_output=True, check=False).returncode:
            return "bf16"
        why = "This CPU announces bf16, but a trial of it failed"
    warnings.warn(f"{why}, so OpenVINO computes in fp32.", Notice, stacklevel=2)
    return "f32"


def open_session(source: str | bytes, threads: int | None = None) -> Any:
    """onnxruntime on a file or its bytes; by default with as many threads as torch uses."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def require_onnx() -> None:
    """Refuse with a sentence if a package that ONNX export needs is missing."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, extra="export", purpose="ONNX export")


# The engine that settings name


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
    whole = _whole_graph(model, runtime)
    return OneByOne(whole) if runtime.rounds else whole


def _whole_graph(model: MemoryViT, runtime: Runtime) -> OnnxModel:
    """A model as one graph: a task that changes the backbone's tokens has no other beside it."""
    from engram.export.verify import expected_outputs, verified
    from engram.export.write import check_exportable, onnx_file

    names = check_exportable(model)
    precision = "int8" if runtime.precision == "int8" else "float32"
    graph, _ = onnx_file(model, names, precision, "it is not used")
    engine = OnnxModel(graph)
    if runtime.library != "onnxruntime":
        engine.session = runtime.open(graph)
        verified(engine, *expected_outputs(model, names), runtime.precision, "it is not used")
    return engine
