"""Writing a model as one file: ONNX or torch.export, verified before it is kept.

The file runs the backbone and all tasks on any number of images. Keys and values of cells depend on
no image, so they are constants in it. Its metadata says how to prepare images, what the classes are
called, and which engrams it was made from.
"""

from __future__ import annotations

import io
import json
import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engram.errors import EngramError, flag
from engram.export import standalone
from engram.export.quantise import quantise, round_weights
from engram.export.runtime import INPUT, KEY, OnnxModel, TorchProgram, require_onnx
from engram.export.verify import Difference, expected_outputs, verified
from engram.inference.engine import by_output, familiarity_name
from engram.model import MemoryViT
from engram.tasks.class_statistics import ClassStatistics
from engram.util.files import check_writable, write_atomically
from engram.util.text import without_folder

FORMAT = 1  # version of the metadata
OPSET = 20
SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
MAX_ONNX_BYTES = 2**31 - 2**24  # an ONNX file is one protobuf message


@dataclass(frozen=True)
class Export:
    """A file that was verified and written.

    Attributes:
        path: The file.
        format: `onnx` or `torch`.
        int8: Whether its linear layers are quantised.
        bytes: Its size.
        seconds: How long the export took.
        differences: By output, how it differs from the model's on generated images: `flowers` are
            the logits of a task, `flowers:familiarity` is its familiarity.
        script: The `predict.py` next to it, if one was written.
    """

    path: Path
    format: str
    int8: bool
    bytes: int
    seconds: float
    differences: Mapping[str, Difference]
    script: Path | None


def export_onnx(
    model: MemoryViT,
    path: str | Path,
    *,
    int8: bool = False,
    tasks: Sequence[str] | None = None,
    overwrite: bool = True,
) -> Export:
    """Write a model as an ONNX file with one output per task, and a `predict.py` next to it.

    Tasks that keep statistics have a second output, their familiarity. The file is run and compared
    with the model before it is written. The model does not change.

    Args:
        model: The model to export, in float32.
        path: The file to write; its name ends in `.onnx`.
        int8: Quantise the linear layers to int8: faster on CPUs, less exact.
        tasks: The tasks to include; "base" is the backbone's own head. By default all of them.
        overwrite: Replace a file that exists.

    Returns:
        What was written, and how its logits differ from the model's.

    Raises:
        EngramError: The model cannot be exported, the file gives other logits than the model, or
            it cannot be written.

    Examples:
        >>> made = engram.export.export_onnx(model, "model.onnx")
        >>> made.differences["flowers"].largest < 1e-4
        True
    """
    began, path = time.monotonic(), Path(path)
    check_output_path(path, overwrite, ["onnx"])
    names = check_exportable(model, tasks)
    precision = "int8" if int8 else "float32"
    data, differences = onnx_file(model, names, precision, f"{path} was not written")
    write_atomically(path, data)
    script = write_script(path)
    return Export(path, "onnx", int8, len(data), time.monotonic() - began, differences, script)


def onnx_file(
    model: MemoryViT, names: Sequence[str], precision: str, end: str
) -> tuple[bytes, dict[str, Difference]]:
    """The bytes of an ONNX file, and how its logits differ; too much is an EngramError.

    Its linear layers are computed in `float32` or `int8`, or in float32 with rounded weights:
    `float16 weights`, `int8 weights`. The sentence of the error has this `end`.
    """
    pixels, expected = expected_outputs(model, names)
    proto, about = converted(trace(model, names, pixels)), metadata(model, names, precision)
    _rename_values(proto, list(expected))
    del proto.metadata_props[:]
    proto.metadata_props.add(key=KEY, value=json.dumps(about))
    proto.producer_name, proto.producer_version = about["library"].split()
    data = proto.SerializeToString()
    differences = verified(OnnxModel(data), pixels, expected, "fp32", end)
    if precision == "float32":
        return data, differences
    if precision == "int8":
        quantise(proto, [{INPUT: image.numpy()} for image in torch.split(pixels, 1)])
    else:
        round_weights(proto, precision.split()[0])
    data = proto.SerializeToString()
    return data, verified(OnnxModel(data), pixels, expected, precision, end)


def export_torch(
    model: MemoryViT,
    path: str | Path,
    *,
    tasks: Sequence[str] | None = None,
    overwrite: bool = True,
) -> Export:
    """Write a model with torch.export, as a `.pt2` file that PyTorch runs without this package.

    The file is run and compared with the model before it is written. The model does not change.

    Args:
        model: The model to export, in float32.
        path: The file to write; its name ends in `.pt2`.
        tasks: The tasks to include; "base" is the backbone's own head. By default all of them.
        overwrite: Replace a file that exists.

    Returns:
        What was written, and how its logits differ from the model's.

    Raises:
        EngramError: The model cannot be exported, the file gives other logits than the model, or
            it cannot be written.

    Examples:
        >>> made = engram.export.export_torch(model, "model.pt2")
        >>> logits = torch.export.load(made.path).module()(pixels)
    """
    began, path = time.monotonic(), Path(path)
    check_output_path(path, overwrite, ["torch"])
    names = check_exportable(model, tasks, onnx=False)
    pixels, expected = expected_outputs(model, names)
    about = {f"{KEY}.json": json.dumps(metadata(model, names))}
    file = io.BytesIO()
    with quiet_exporters():
        torch.export.save(trace(model, names, pixels), file, extra_files=about)
        file.seek(0)
        program = TorchProgram(file)
    data = file.getvalue()
    differences = verified(program, pixels, expected, "fp32", f"{path} was not written")
    write_atomically(path, data)
    return Export(path, "torch", False, len(data), time.monotonic() - began, differences, None)


def check_output_path(path: Path, overwrite: bool, formats: Sequence[str] = tuple(SUFFIXES)) -> str:
    """The format that the ending of a path chooses; refused before any work, if it cannot be."""
    kind = next((name for name in formats if path.suffix == SUFFIXES[name]), None)
    if kind is None:
        known = ", ".join(f"{name} ({SUFFIXES[name]})" for name in formats)
        raise EngramError(f"{path} has the ending {path.suffix!r}; formats are {known}.")
    if path.is_dir():
        raise EngramError(f"{path} is a folder; -o names the file to write.")
    if path.exists() and not overwrite:
        raise EngramError(
            f"{path} already exists; choose another {flag('out')}, or replace it with "
            f"{flag('overwrite', True)}."
        )
    check_writable(path, other=flag("out"), parents=True)
    return kind


def write_script(path: Path) -> Path | None:
    """Write predict.py next to an ONNX file, unless another file or folder has that name."""
    text = Path(standalone.__file__).read_text(encoding="utf-8")
    script = path.with_name("predict.py")
    if script.exists():
        if not script.is_file():
            return None
        first = text.splitlines()[0]
        with open(script, encoding="utf-8", errors="replace") as file:
            if file.readline().rstrip("\n") != first:
                return None
    text = text.replace('MODEL = "model.onnx"', f"MODEL = {path.name!r}")
    write_atomically(script, text.encode())
    return script


def check_exportable(
    model: MemoryViT, tasks: Sequence[str] | None = None, *, onnx: bool = True
) -> list[str]:
    """The names of the outputs; a model that cannot be exported is an EngramError."""
    if onnx:
        require_onnx()
    names = model.output_names(tasks)
    if not names:
        raise EngramError(
            "There is nothing to export: the backbone has no head, and no task is here."
        )
    if INPUT in names:
        raise EngramError(
            f"A task is called {INPUT!r}, which is the name of the exported file's input; "
            "save the task under another name (engram.inspect(FILE).renamed(NAME))."
        )
    if model.backbone.stored != "fp32":
        raise EngramError(
            f"The backbone is in {model.backbone.stored}, and exported files are in fp32; load it "
            "in fp32 to export it."
        )
    if model.backbone.dtype != torch.float32:
        raise EngramError(
            f"The model is in {model.backbone.dtype}, and exported files are in "
            "torch.float32; cast it with model.float() first."
        )
    size = sum(p.numel() for p in model.parameters()) * 4
    if onnx and size > MAX_ONNX_BYTES:
        raise EngramError(
            f"The model has {size / 1e9:.1f} GB of weights, and an ONNX file holds at most 2 GB; "
            "export it as .pt2, or serve it with the engine torch."
        )
    return names


# The model as a graph, in which everything that does not depend on the image is a constant


def metadata(model: MemoryViT, names: Sequence[str], precision: str = "float32") -> dict[str, Any]:
    """The metadata of an exported file: preprocessing, backbone, and the tasks with classes."""
    from engram import __version__

    return {
        "format": FORMAT,
        "library": f"engram-vit {__version__}",
        "precision": precision,
        "preprocessing": model.preprocessing.to_dict(),
        "backbone": {
            "source": without_folder(model.backbone.source),
            "fingerprint": model.backbone.fingerprint,
        },
        "tasks": {name: _task_metadata(model, name) for name in names},
    }


def _task_metadata(model: MemoryViT, name: str) -> dict[str, Any]:
    spec, head = model.task(name).spec, model.task(name).head
    if name not in model.tasks:  # the backbone itself
        kind = spec.kind if spec.classes else "embedding"
        return {"kind": kind, "classes": list(spec.classes)}
    return {
        "kind": spec.kind,
        "classes": list(spec.classes),
        **{what: values.tolist() for what, values in head.fitted.items()},
        **({"values": list(spec.values)} if spec.values else {}),
        "regime": spec.regime,
        "extends": list(spec.extends),
        "content": model.engram(name).content,
        **({} if model.task(name).statistics is None else {"familiarity": familiarity_name(name)}),
    }


class _ConstantStatistics(ClassStatistics):
    """Statistics with the inverse of the covariance as constants of a graph.

    All products have a bias, so that they stay in float32 as those of heads do (`quantise`).
    """

    def __init__(self, known: ClassStatistics) -> None:
        super().__init__(*known.means.shape)
        centre, deviation, scaled, inverse, unexplained, pulled, lengths = known.prepared()
        root = torch.linalg.cholesky(inverse.double()).mT.float()  # root.T @ root is the inverse
        self.centre, self.deviation, self.quantiles = centre, deviation, known.quantiles.float()
        self.explained, self.none = root @ scaled, torch.zeros(len(root))
        self.weight, self.pulled, self.lengths = 1 / unexplained, -2 * pulled, lengths

    def familiarity(self, features: Tensor) -> Tensor:
        x = (features - self.centre) / self.deviation
        own = (x.square() * self.weight).sum(1, keepdim=True)
        own = own - F.linear(x, self.explained, self.none).square().sum(1, keepdim=True)
        distance = (own + F.linear(x, self.pulled, self.lengths)).amin(1).clamp(min=0)
        likeness = -(distance / x.shape[1]).sqrt()
        return (likeness - self.quantiles[0]) / (self.quantiles[1] - self.quantiles[0])


class _ExportModule(nn.Module):
    """The model for certain outputs, with everything folded that depends on no image."""

    def __init__(self, model: MemoryViT, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model.constant(names, model.preprocessing.size), list(names)
        with torch.no_grad():
            for task in self.model.tasks.values():
                if task.statistics is not None:
                    task.statistics = _ConstantStatistics(task.statistics)

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        return by_output(*self.model.with_familiarity(pixels, self.names))


def converted(program: torch.export.ExportedProgram) -> Any:
    """A program of torch.export as an ONNX model."""
    with quiet_exporters():
        graph = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False)
    assert graph is not None
    proto = graph.model_proto
    del proto.graph.metadata_props[:]
    graphs = proto.graph
    for item in (*graphs.node, *graphs.input, *graphs.output, *graphs.value_info):
        del item.metadata_props[:]  # the line of source code that made it, with paths
        item.doc_string = ""
    return proto


def trace(model: MemoryViT, names: Sequence[str], pixels: Tensor) -> torch.export.ExportedProgram:
    """The model as a program of torch.export, for any number of images of the pixels' size."""
    batch = {INPUT: {0: torch.export.Dim("batch", min=1)}}
    with quiet_exporters(), torch.no_grad():
        program = torch.export.export(
            _ExportModule(model, names), (pixels[:2],), dynamic_shapes=batch, strict=False
        )
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it has paths of this machine
    return program


@contextmanager
def quiet_exporters() -> Iterator[None]:
    """Hide the warnings of torch's exporters, which a user can do nothing about."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _rename_values(proto: Any, names: Sequence[str]) -> None:
    """Name the input `pixels`, the outputs after their tasks, and their first axis `batch`.

    All other values get a name that no task can have: the exporter uses words such as "linear".
    """
    graph = proto.graph
    new_names = {graph.input[0].name: INPUT}
    new_names.update({value.name: name for value, name in zip(graph.output, names, strict=True)})
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = new_names.get(value.name, f"/{value.name}")
    for node in graph.node:
        node.input[:] = [new_names.get(name, f"/{name}") if name else "" for name in node.input]
        node.output[:] = [new_names.get(name, f"/{name}") if name else "" for name in node.output]
    for value in (*graph.input, *graph.output):
        dimension = value.type.tensor_type.shape.dim[0]
        if dimension.dim_param:
            dimension.dim_param = "batch"
