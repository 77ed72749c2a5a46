"""A model as a graph, in which everything that does not depend on the image is a constant."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engram.model import MemoryViT
from engram.util.text import without_folder

FORMAT = 1  # version of the metadata
OPSET = 20
INPUT = "pixels"
KEY = "engram"  # of the metadata in an ONNX file; in a .pt2 it is the file engram.json


def metadata(model: MemoryViT, names: Sequence[str], int8: bool = False) -> dict[str, Any]:
    """What a program needs to use the file: preprocessing, backbone, and the tasks with classes."""
    from engram import __version__

    return {
        "format": FORMAT,
        "library": f"engram-vit {__version__}",
        "precision": "int8" if int8 else "float32",
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
    }


class _ExportModule(nn.Module):
    """The model for certain outputs, with everything folded that depends on no image."""

    def __init__(self, model: MemoryViT, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model.constant(names, model.preprocessing.size), list(names)

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = self.model(pixels, self.names)
        return outputs


def onnx_graph(model: MemoryViT, names: Sequence[str], pixels: Tensor) -> Any:
    """An ONNX model with one output for each of `names`, and the metadata."""
    proto = converted(trace(model, names, pixels))
    _rename_values(proto, names)
    set_metadata(proto, metadata(model, names))
    return proto


def converted(program: torch.export.ExportedProgram) -> Any:
    """A program of torch.export as an ONNX model."""
    with quiet_exporters():
        graph = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False)
    assert graph is not None
    proto = graph.model_proto
    _remove_debug_information(proto)
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


def _remove_debug_information(proto: Any) -> None:
    """Remove which line of source code made a node: it has paths of this machine."""
    graph = proto.graph
    del graph.metadata_props[:]
    for item in (*graph.node, *graph.input, *graph.output, *graph.value_info):
        del item.metadata_props[:]
        item.doc_string = ""


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


def set_metadata(proto: Any, document: Mapping[str, Any]) -> None:
    """Replace the metadata of an ONNX model."""
    del proto.metadata_props[:]
    proto.metadata_props.add(key=KEY, value=json.dumps(document))
    proto.producer_name, proto.producer_version = document["library"].split()
