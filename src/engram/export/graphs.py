"""A model as a graph: only what depends on the image is left to compute, and it says what it is."""

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

FORMAT = 1  # of the metadata
OPSET = 20
INPUT = "pixels"
KEY = "engram"  # of the metadata in an ONNX file; in a .pt2 it is the file engram.json


def about(model: MemoryViT, names: Sequence[str], int8: bool = False) -> dict[str, Any]:
    """What a file says of itself, as JSON has it."""
    from engram import __version__

    tasks: dict[str, Any] = {}
    for name in names:
        if name == "base":
            labels = list(model.trunk.class_names)
            tasks[name] = {"kind": "classification" if labels else "embedding", "classes": labels}
        else:
            spec, head = model.task(name).spec, model.task(name).head
            tasks[name] = {
                "kind": spec.kind,
                "classes": list(spec.classes),
                **{what: values.tolist() for what, values in head.settled.items()},
                **({"values": list(spec.values)} if spec.values else {}),
                "regime": spec.regime,
                "extends": list(spec.extends),
                "content": model.engram(name).content,
            }
    return {
        "format": FORMAT,
        "library": f"engram-vit {__version__}",
        "precision": "int8" if int8 else "float32",
        "preprocessing": model.preprocessing.to_dict(),
        "trunk": {
            "source": without_folder(model.trunk.source),
            "fingerprint": model.trunk.fingerprint,
        },
        "tasks": tasks,
    }


class _Answers(nn.Module):
    """A model that answers certain tasks, with nothing left but what depends on the image."""

    def __init__(self, model: MemoryViT, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model.constant(names, model.preprocessing.size), list(names)

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = self.model(pixels, self.names)
        return outputs


def onnx_graph(model: MemoryViT, names: Sequence[str], pixels: Tensor) -> Any:
    """An ONNX model with one output for each of `names`, and what it is in its metadata."""
    program = trace(model, names, pixels)
    with quiet():
        graph = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False)
    assert graph is not None
    proto = graph.model_proto
    _name(proto, names)
    describe(proto, about(model, names))
    return proto


def trace(model: MemoryViT, names: Sequence[str], pixels: Tensor) -> torch.export.ExportedProgram:
    """What the model computes for these names, for any number of images of the pixels' size."""
    batch = {INPUT: {0: torch.export.Dim("batch", min=1)}}
    with quiet(), torch.no_grad():
        program = torch.export.export(
            _Answers(model, names), (pixels[:2],), dynamic_shapes=batch, strict=False
        )
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # the paths of this machine
    return program


@contextmanager
def quiet() -> Iterator[None]:
    """The exporters' own remarks are of no use to anybody here."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _name(proto: Any, names: Sequence[str]) -> None:
    """Call the input, the outputs and their free axis what they are.

    All other values get a name that no task can have: theirs are words like "add" and "linear".
    """
    graph = proto.graph
    del graph.metadata_props[:]
    for item in (*graph.node, *graph.input, *graph.output, *graph.value_info):
        del item.metadata_props[:]  # which line of whose source made it, with its path
        item.doc_string = ""
    called = {graph.input[0].name: INPUT}
    called.update({value.name: name for value, name in zip(graph.output, names, strict=True)})
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = called.get(value.name, f"/{value.name}")
    for node in graph.node:
        node.input[:] = [called.get(name, f"/{name}") if name else "" for name in node.input]
        node.output[:] = [called.get(name, f"/{name}") if name else "" for name in node.output]
    for value in (*graph.input, *graph.output):
        dimension = value.type.tensor_type.shape.dim[0]
        if dimension.dim_param:
            dimension.dim_param = "batch"


def describe(proto: Any, document: Mapping[str, Any]) -> None:
    """Write into an ONNX model what it says of itself."""
    del proto.metadata_props[:]
    proto.metadata_props.add(key=KEY, value=json.dumps(document))
    proto.producer_name, proto.producer_version = document["library"].split()
