"""The engine on exported graphs: that of the backbone, and tasks that come and go.

Nothing of a task is a constant in the graph of the backbone: it is made once, and what
`Memory.tensors` gives of the attached tasks is fed to it beside the pixels. It ends with the last
tokens of the backbone and of the streams, which heads and everything else read in torch. So a task
is attached without an export.

The layers of a ViT differ in their weights only. So one of them is traced, with its weights as
inputs, and the graph has a copy of it for each layer: seconds, where tracing all takes minutes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.func import functional_call

from engram.export.quantise import Array, quantise
from engram.export.runtime import INPUT, RUNTIMES, Runtime
from engram.export.verify import expected_outputs, verified
from engram.export.write import (
    OPSET,
    check_exportable,
    converted,
    quiet_exporters,
)
from engram.inference.engine import Engine, OneByOne, Outputs, asked_for, by_output, join_images
from engram.methods.adapters import PaddedAdapters
from engram.methods.forward import FastPass
from engram.methods.masked import Masked
from engram.methods.memory import Memory, MemoryTensors, Stream
from engram.methods.method import Cached, Needs
from engram.model import MemoryViT
from engram.model.passes import task_inputs
from engram.vit import ViT
from engram.vit.layers import Block
from engram.vit.pos_embed import Rotation


class OnnxEngine(Engine):
    """A model that does not change any more, with its backbone in onnxruntime or OpenVINO.

    It is compared with the model before it is used. With bf16 and int8, an answer is bit for bit
    the same whatever other images and tasks are asked for in the same pass.

    The model is in float32 on the CPU, with no task that changes the backbone's tokens. The graph
    of an engine `before` is used again, if it is of the same backbone. A model that cannot be
    exported, or that the engine does not answer like, is an EngramError.
    """

    def __init__(
        self,
        model: MemoryViT,
        runtime: Runtime = RUNTIMES["onnx"],
        *,
        before: Engine | None = None,
    ) -> None:
        self.model, self.runtime, self.names = model, runtime, check_exportable(model)
        self.device = torch.device("cpu")
        methods = {name: task.method for name, task in model.tasks.items()}
        pixels, expected = expected_outputs(model, self.names)
        streams = [name for name, method in methods.items() if method.streams]
        with torch.no_grad():
            tasks = task_inputs(model, streams)
            self.memory = (
                Masked.memory(tasks, model.backbone) if tasks else _no_tasks(model.backbone)
            )
            adapters = self.memory.bank is not None
            graph = before.graph if isinstance(before, OnnxEngine) else None
            if graph is None or not graph.fits(model.backbone, runtime, adapters):
                graph = BackboneGraph(model.backbone, pixels, runtime, adapters=adapters)
            self.graph: BackboneGraph = graph
            self.inputs = self.memory.tensors(model.backbone, graph.adapters)
        self.reads_layers = any(
            Needs.STATISTICS in method.needs
            or (Needs.LAYERS in method.needs and not method.streams)
            for method in methods.values()
        )
        verified(self, pixels, expected, runtime.precision, "it is not used")

    def run(self, pixels: Tensor, tasks: Sequence[str], familiarity: bool = False) -> Outputs:
        # With RMSNorm, last bits of the graph's tokens were seen to depend on the batch.
        if self.runtime.rounds and len(pixels) > 1 and self.model.backbone.config.norm == "rms":
            return OneByOne(self).run(pixels, tasks, familiarity)
        raw, tokens, layers = self.graph.run(pixels, self.inputs, self.reads_layers)
        streams = self.memory.split(tokens)
        size = (pixels.shape[-2], pixels.shape[-1])
        # A product of one row is computed in another order than one of several: last bits would
        # depend on how many images there are, and on which tasks stand side by side.
        step, asked = (1, self.names) if self.runtime.rounds else (len(pixels), tasks)
        parts = []
        with torch.inference_mode():
            for start in range(0, len(pixels), step):
                some = slice(start, start + step)
                own = {name: one[some] for name, one in streams.items()}
                normed = [one[some] for one in layers]
                cached = Cached(layers=normed, raw=raw[some], streams=own)
                inputs = self.model.from_cache(cached, asked, size)
                found = by_output(inputs.outputs(), inputs.familiarity())
                parts.append(asked_for(found, tasks, familiarity))
        return join_images(parts)


# The graph of the backbone

#: The axes of the inputs. D, h, d and l are of the backbone; all other letters may be any number.
_SHAPES: dict[str, tuple[str | int, ...]] = {
    "token": ("s", "D"),
    "tokens_read": ("s", "a"),
    "missing": ("s", "a + m"),
    "keys": ("l", "h", "s", "m", "d"),
    "values": ("l", "h", "s", "m", "d"),
    "tokens": ("r",),  # of adapters, as the next two
    "down": ("l", 2, "r", "D", "w"),
    "up": ("l", 2, "r", "w", "D"),
}


class BackboneGraph:
    """A backbone that a runtime runs, for images of one size and the streams of any tasks.

    The size is that of `pixels`, in which int8 looks for outliers. Streams with adapters cost a few
    percent.
    """

    def __init__(
        self,
        backbone: ViT,
        pixels: Tensor,
        runtime: Runtime = RUNTIMES["onnx"],
        *,
        adapters: bool = False,
    ) -> None:
        own = backbone.at_size((pixels.shape[-2], pixels.shape[-1]))
        own = own.cpu().requires_grad_(False).eval()
        self.backbone, self.runtime, self.adapters = backbone, runtime, adapters
        with torch.no_grad():
            own.keep_positions()
            self.nothing = _no_tasks(own).tensors(own, adapters)
            proto = backbone_proto(own, self.nothing)
        if runtime.precision == "int8":
            quantise(proto, [_feeds(image, self.nothing) for image in torch.split(pixels, 1)])
        self._session = runtime.open(proto.SerializeToString())

    def fits(self, backbone: ViT, runtime: Runtime, adapters: bool) -> bool:
        """Whether it runs this backbone so, with streams that have adapters or have none."""
        same = self.backbone is backbone and self.runtime == runtime
        return same and (self.adapters or not adapters)

    def run(
        self, pixels: Tensor, memory: MemoryTensors | None = None, layers: bool = False
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The last tokens of the backbone (b, n, D), and those of the streams (b, s, D).

        With `layers` also the backbone's normed tokens of every layer, (b, n, D) each.
        """
        names = ["backbone", "streams"]
        names += [f"layer{i}" for i in range(self.backbone.config.depth if layers else 0)]
        found = self._session.run(names, _feeds(pixels, memory or self.nothing))
        raw, streams, *normed = map(torch.from_numpy, found)
        return raw, streams, normed


def _by_name(memory: MemoryTensors) -> dict[str, Tensor]:
    """The tensors of a memory by the names of the graph's inputs, `_SHAPES`."""
    *own, bank = memory
    return dict(zip(_SHAPES, (*own, *(bank or ())), strict=False))


def _feeds(pixels: Tensor, memory: MemoryTensors) -> dict[str, Array]:
    inputs = {INPUT: pixels.cpu().float(), **_by_name(memory)}
    return {name: tensor.detach().contiguous().numpy() for name, tensor in inputs.items()}


def _no_tasks(backbone: ViT) -> Memory:
    """A stream that nobody asked for, where there is no task: no axis of the graph is empty."""
    config = backbone.config
    cells = torch.zeros(config.depth, 0, config.width)
    own = torch.zeros(1, config.width) if backbone.class_token is None else backbone.class_token
    return Memory(backbone, [Stream("", own, cells, [0])])


# Tracing: the tokens before the first layer, and one layer


class _Embed(nn.Module):
    """Pixels to the tokens of the backbone and of the streams: (b, n + s, D)."""

    def __init__(self, backbone: ViT) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, pixels: Tensor, token: Tensor) -> Tensor:
        x = self.backbone.embed(pixels)
        return torch.cat([x, token.expand(x.shape[0], -1, -1)], dim=1)


class _Layer(nn.Module):
    """The tokens behind a layer (b, n + s, D), and the backbone's normed ones before (b, n, D)."""

    def __init__(self, block: Block, n: int, rotation: Rotation | None) -> None:
        super().__init__()
        self.block, self.n, self.rotation = block, n, rotation

    def forward(self, x: Tensor, *memory: Tensor) -> tuple[Tensor, Tensor]:
        token, read, missing, keys, values, *adapters = memory
        bank = PaddedAdapters(*adapters) if adapters else None
        streams = Memory.from_tensors(MemoryTensors(token, read, missing, keys, values, bank))
        seen: dict[int, Tensor] = {}
        together = FastPass(streams, self.n, self.rotation, seen.__setitem__)
        return together.layer(0, self.block, x, self.n), seen[0]


class _Open(nn.Module):
    """A module whose weights are inputs, behind its own."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.own, self.names = (module,), names  # in a tuple: as a submodule it would give weights

    def forward(self, inputs: list[Tensor], weights: list[Tensor]) -> Any:
        named = dict(zip(self.names, weights, strict=True))
        return functional_call(self.own[0], named, tuple(inputs))


def _traced(module: nn.Module, inputs: Sequence[tuple[Tensor, Sequence[int]]]) -> Any:
    """A module as an ONNX graph of these inputs, with the axes that may change, and its weights."""
    weights = _weights(module)
    shapes = [dict.fromkeys(axes, Dim.AUTO) for _, axes in inputs]
    with quiet_exporters(), torch.no_grad():
        program = torch.export.export(
            _Open(module, list(weights)),
            ([tensor for tensor, _ in inputs], list(weights.values())),
            dynamic_shapes=(shapes, [None] * len(weights)),
            strict=False,
        )
    return converted(program).graph


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """The weights that such a graph takes, in order: before the first layer, or of a layer."""
    later = ("backbone.blocks.", "backbone.norm.", "backbone.head.")
    return {n: p.detach() for n, p in module.named_parameters() if not n.startswith(later)}


def _tokens(backbone: ViT) -> int:
    rows, columns = backbone.config.grid
    return backbone.config.prefix + rows * columns


_TEMPLATES: dict[tuple[object, ...], tuple[Any, Any]] = {}
#: Sizes to trace with, of the axes that may change: torch takes a 1 as a constant.
_EXAMPLE = {"s": 3, "a": 2, "m": 2, "a + m": 4, "r": 2, "w": 4}


def _templates(backbone: ViT, memory: MemoryTensors) -> tuple[Any, Any]:
    """The graphs of what is before the first layer, and of a layer: of one architecture, once."""
    key = (backbone.config, memory.bank is not None)
    if key not in _TEMPLATES:
        inputs = []
        for name, tensor in _by_name(memory).items():
            axes = list(enumerate(_SHAPES[name]))
            shape = [
                1 if axis == "l" else _EXAMPLE.get(str(axis), tensor.shape[i]) for i, axis in axes
            ]
            inputs.append((tensor.new_zeros(shape), [i for i, axis in axes if axis in _EXAMPLE]))
        size, n = backbone.config.image_size, _tokens(backbone)
        pixels, embed = torch.zeros(2, 3, *size), _Embed(backbone)
        x = embed(pixels, inputs[0][0])
        layer = _Layer(backbone.layers[0], n, backbone.rotation(size, n))
        _TEMPLATES[key] = (
            _traced(embed, [(pixels, [0]), inputs[0]]),
            _traced(layer, [(x, [0, 1]), *inputs]),
        )
    return _TEMPLATES[key]


# Putting the graph together


def backbone_proto(backbone: ViT, memory: MemoryTensors) -> Any:
    """The ONNX model in float32, for a backbone at its own image size."""
    from onnx import TensorProto, helper, numpy_helper

    embed, layer = _templates(backbone, memory)
    inputs, depth = _by_name(memory), len(backbone.layers)
    numbers = {"/zero": 0, "/n": _tokens(backbone), "/end": 2**62, "/axis": 1}
    constants = {name: np.array([number]) for name, number in numbers.items()}
    weights = _weights(_Embed(backbone))
    nodes = _copy_nodes(embed, "/embed", [INPUT, "token"], weights, ["/x0"], constants)
    for i, block in enumerate(backbone.layers):
        names = [f"/x{i}"]
        for name in inputs:
            if _SHAPES[name][0] != "l":
                names.append(name)
                continue
            names.append(f"/{name}{i}")  # of this layer, still with an axis of layers
            constants[f"/{name}{i}/at"] = np.array([i])
            nodes.append(_node("Gather", [name, f"/{name}{i}/at"], names[-1], axis=0))
        outputs = [f"/x{i + 1}", f"layer{i}"]
        nodes += _copy_nodes(layer, f"/{i}", names, _weights(block), outputs, constants)
    nodes.append(_node("Slice", [f"/x{depth}", "/zero", "/n", "/axis"], "backbone"))
    nodes.append(_node("Slice", [f"/x{depth}", "/n", "/end", "/axis"], "streams"))
    _, heads, _, _, d = memory.keys.shape
    sizes = {"l": depth, "h": heads, "d": d, "D": backbone.config.width}
    images: list[str | int] = ["b", 3, *backbone.config.image_size]
    values = [helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, images)]
    kinds = {torch.bool: TensorProto.BOOL, torch.long: TensorProto.INT64}
    for name, tensor in inputs.items():
        kind = kinds.get(tensor.dtype, TensorProto.FLOAT)
        shape: list[str | int] = [sizes.get(str(axis), axis) for axis in _SHAPES[name]]
        values.append(helper.make_tensor_value_info(name, kind, shape))
    ends = ["backbone", "streams", *(f"layer{i}" for i in range(depth))]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ends]
    arrays = [
        numpy_helper.from_array(np.asarray(v, order="C"), name) for name, v in constants.items()
    ]
    graph = helper.make_graph(nodes, "backbone", values, infos, arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


def _node(kind: str, inputs: Sequence[str], output: str, **more: Any) -> Any:
    from onnx import helper

    return helper.make_node(kind, inputs, [output], name=f"{output}/{kind}", **more)


def _copy_nodes(
    graph: Any,
    at: str,
    inputs: Sequence[str],
    weights: Mapping[str, Tensor],
    outputs: Sequence[str],
    constants: dict[str, Array],
) -> list[Any]:
    """Copy the nodes of a graph from `_traced`, with its own values named below `at`.

    Its weights join the `constants`; one that it transposes first becomes a transposed constant.
    """
    from onnx import numpy_helper

    own = [value.name for value in graph.input]
    names = dict(zip(own, inputs, strict=False))
    names.update(zip((value.name for value in graph.output), outputs, strict=True))
    arrays = dict(zip(own[len(inputs) :], (w.numpy() for w in weights.values()), strict=True))
    nodes = []
    for node in graph.node:
        if node.op_type == "Transpose" and node.input[0] in arrays:
            arrays[node.output[0]] = arrays[node.input[0]].T
            continue
        copied = type(node)()
        copied.CopyFrom(node)
        copied.name = f"{at}/{node.name}"
        copied.input[:] = [names.get(one, f"{at}/{one}") if one else "" for one in node.input]
        copied.output[:] = [names.get(one, f"{at}/{one}") for one in node.output]
        nodes.append(copied)
    used = {name for node in nodes for name in node.input}
    arrays |= {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    constants |= {f"{at}/{name}": array for name, array in arrays.items() if f"{at}/{name}" in used}
    return nodes
