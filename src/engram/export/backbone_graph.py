"""The backbone as an ONNX graph that takes the streams of any tasks as inputs.

Tasks come and go while the backbone stays, so nothing of a task is a constant here: the graph is
made once, and what `Memory.tensors` gives of the attached tasks is fed to it beside the pixels. It
ends with the last tokens of the backbone and of the streams; heads are not part of it.

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

from engram.export.graphs import INPUT, OPSET, converted, quiet_exporters
from engram.export.quantise import Array, quantise
from engram.export.runtime import open_session
from engram.methods.adapters import PaddedAdapters
from engram.methods.forward import FastPass
from engram.methods.memory import Memory, MemoryTensors, Stream
from engram.vit import ViT
from engram.vit.layers import Block
from engram.vit.pos_embed import Rotation

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
_BY_LAYER = [name for name, axes in _SHAPES.items() if axes[0] == "l"]


class BackboneGraph:
    """A backbone that onnxruntime runs, for images of one size and the streams of any tasks.

    Args:
        backbone: The ViT, in float32. It does not change.
        pixels: Normalised images of the size to answer for; int8 looks for outliers in them.
        adapters: Take streams with adapters, which costs a few percent.
        int8: Quantise the linear layers.
        threads: CPU threads. By default as many as torch uses.
    """

    def __init__(
        self,
        backbone: ViT,
        pixels: Tensor,
        *,
        adapters: bool = False,
        int8: bool = False,
        threads: int | None = None,
    ) -> None:
        size = (pixels.shape[-2], pixels.shape[-1])
        own = backbone.at_size(size).cpu().requires_grad_(False).eval()
        self.backbone, self.adapters, self.depth = backbone, adapters, backbone.config.depth
        with torch.no_grad():
            own.keep_positions()
            self.nothing = _no_tasks(own, adapters)
            proto = backbone_proto(own, self.nothing)
        if int8:
            quantise(proto, [_feeds(image, self.nothing) for image in torch.split(pixels, 1)])
        self._session = open_session(proto.SerializeToString(), threads)

    def fits(self, backbone: ViT, adapters: bool) -> bool:
        """Whether it can run this backbone, with streams that have adapters or have none."""
        return self.backbone is backbone and (self.adapters or not adapters)

    def run(
        self, pixels: Tensor, memory: MemoryTensors | None = None, layers: bool = False
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The last tokens of the backbone (b, n, D), and those of the streams (b, s, D).

        With `layers` also the backbone's normed tokens of every layer, (b, n, D) each.
        """
        names = ["backbone", "streams"]
        if layers:
            names += [f"layer{i}" for i in range(self.depth)]
        found = self._session.run(names, _feeds(pixels, memory or self.nothing))
        raw, streams, *normed = map(torch.from_numpy, found)
        return raw, streams, normed


def _by_name(memory: MemoryTensors) -> dict[str, Tensor]:
    """The tensors of a memory, as the graph's inputs are called: `_SHAPES` has all of them."""
    *own, bank = memory
    return dict(zip(_SHAPES, (*own, *(bank or ())), strict=False))


def _feeds(pixels: Tensor, memory: MemoryTensors) -> dict[str, Array]:
    given = {INPUT: pixels.cpu().float(), **_by_name(memory)}
    return {name: tensor.detach().contiguous().numpy() for name, tensor in given.items()}


def _no_tasks(backbone: ViT, adapters: bool) -> MemoryTensors:
    """A stream that nobody asked for, where there is no task: no axis of the graph is empty."""
    config = backbone.config
    cells = torch.zeros(config.depth, 0, config.width)
    own = torch.zeros(1, config.width) if backbone.class_token is None else backbone.class_token
    return Memory(backbone, [Stream("", own, cells)]).tensors(backbone, adapters)


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
        streams = Memory.of_tensors(MemoryTensors(token, read, missing, keys, values, bank))
        seen: dict[int, Tensor] = {}
        together = FastPass(streams, self.n, self.rotation, seen.__setitem__)
        return together.layer(0, self.block, x, self.n), seen[0]


class _Open(nn.Module):
    """A module whose weights are inputs, behind its own."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.own, self.names = (module,), names  # in a tuple: as a submodule it would give weights

    def forward(self, given: list[Tensor], weights: list[Tensor]) -> Any:
        named = dict(zip(self.names, weights, strict=True))
        return functional_call(self.own[0], named, tuple(given))


def _traced(module: nn.Module, given: Sequence[tuple[Tensor, Sequence[int]]]) -> Any:
    """A module as an ONNX graph of these inputs, with the axes that may change, and its weights."""
    weights = _weights(module)
    shapes = [dict.fromkeys(axes, Dim.AUTO) for _, axes in given]
    inputs = ([tensor for tensor, _ in given], list(weights.values()))
    with quiet_exporters(), torch.no_grad():
        program = torch.export.export(
            _Open(module, list(weights)),
            inputs,
            dynamic_shapes=(shapes, [None] * len(weights)),
            strict=False,
        )
    return converted(program).graph


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """The weights that such a graph takes, in order: before the first layer, or of a layer."""
    later = ("backbone.blocks.", "backbone.norm.", "backbone.head.")
    return {n: p.detach() for n, p in module.named_parameters() if not n.startswith(later)}


def _example(memory: MemoryTensors) -> dict[str, tuple[Tensor, list[int]]]:
    """Inputs to trace with, and which of their axes may change.

    Those have two or more numbers: torch takes a 1 as a constant.
    """
    sizes = {"s": 3, "a": 2, "m": 2, "a + m": 4, "r": 2, "w": 4}
    examples = {}
    for name, tensor in _by_name(memory).items():
        axes = list(enumerate(_SHAPES[name]))
        shape = [sizes.get(str(axis), tensor.shape[i]) for i, axis in axes]
        examples[name] = tensor.new_zeros(shape), [i for i, axis in axes if axis in sizes]
    return examples


def _tokens(backbone: ViT) -> int:
    rows, columns = backbone.config.grid
    return backbone.config.prefix + rows * columns


_TEMPLATES: dict[tuple[object, ...], tuple[Any, Any]] = {}


def _templates(backbone: ViT, memory: MemoryTensors) -> tuple[Any, Any]:
    """The graphs of what is before the first layer, and of a layer: of one architecture, once."""
    key = (backbone.config, memory.bank is not None)
    if key not in _TEMPLATES:
        example = _example(memory)
        size = backbone.config.image_size
        pixels = torch.zeros(2, 3, *size)
        embed, token = _Embed(backbone), example["token"]
        x = embed(pixels, token[0])
        one = [(t[:1] if name in _BY_LAYER else t, axes) for name, (t, axes) in example.items()]
        n = _tokens(backbone)
        layer = _Layer(backbone.layers[0], n, backbone.rotation(size, n))
        _TEMPLATES[key] = (
            _traced(embed, [(pixels, [0]), token]),
            _traced(layer, [(x, [0, 1]), *one]),
        )
    return _TEMPLATES[key]


# Putting the graph together


def backbone_proto(backbone: ViT, memory: MemoryTensors) -> Any:
    """The ONNX model in float32, for a backbone at its own image size."""
    from onnx import TensorProto, helper

    first, layer = _templates(backbone, memory)
    parts, inputs = _Parts(), _by_name(memory)
    parts.copy("/embed", first, [INPUT, "token"], _weights(_Embed(backbone)), ["/x0"])
    for i, block in enumerate(backbone.layers):
        given = [f"/x{i}"]
        for name in inputs:
            given.append(parts.take(name, i) if name in _BY_LAYER else name)
        parts.copy(f"/{i}", layer, given, _weights(block), [f"/x{i + 1}", f"layer{i}"])
    parts.cut(f"/x{len(backbone.layers)}", _tokens(backbone))
    depth, heads, _, _, d = memory.keys.shape
    sizes = {"l": depth, "h": heads, "d": d, "D": backbone.config.width}
    images: list[str | int] = ["b", 3, *backbone.config.image_size]
    values = [helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, images)]
    kinds = {torch.bool: TensorProto.BOOL, torch.long: TensorProto.INT64}
    for name, tensor in inputs.items():
        kind = kinds.get(tensor.dtype, TensorProto.FLOAT)
        shape: list[str | int] = [sizes.get(str(axis), axis) for axis in _SHAPES[name]]
        values.append(helper.make_tensor_value_info(name, kind, shape))
    names = ["backbone", "streams", *(f"layer{i}" for i in range(len(backbone.layers)))]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
    graph = helper.make_graph(parts.nodes, "backbone", values, outputs, parts.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


class _Parts:
    """The nodes and constants of a graph that is put together from others."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def _constant(self, name: str, values: Any) -> str:
        from onnx import numpy_helper

        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def _node(self, kind: str, inputs: Sequence[str], output: str, **more: Any) -> str:
        from onnx import helper

        name = f"{output}/{kind}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=name, **more))
        return output

    def take(self, name: str, layer: int) -> str:
        """What an input has for one layer, still with an axis of layers."""
        output = f"/{name}{layer}"
        return self._node("Gather", [name, self._constant(f"{output}/at", [layer])], output, axis=0)

    def cut(self, tokens: str, n: int) -> None:
        """The first n tokens as the output `backbone`, the others as `streams`."""
        numbers = {"/zero": 0, "/n": n, "/end": 2**62, "/axis": 1}
        zero, at, end, axis = (self._constant(name, [i]) for name, i in numbers.items())
        self._node("Slice", [tokens, zero, at, axis], "backbone")
        self._node("Slice", [tokens, at, end, axis], "streams")

    def copy(
        self,
        at: str,
        graph: Any,
        given: Sequence[str],
        weights: Mapping[str, Tensor],
        outputs: Sequence[str],
    ) -> None:
        """A copy of a graph from `_traced`, in which values of its own are named below `at`.

        A weight that it transposes first becomes a transposed constant.
        """
        own = [value.name for value in graph.input]
        names = dict(zip(own, given, strict=False))
        names.update(zip((value.name for value in graph.output), outputs, strict=True))
        arrays = dict(zip(own[len(given) :], (w.numpy() for w in weights.values()), strict=True))
        for node in graph.node:
            if node.op_type == "Transpose" and node.input[0] in arrays:
                arrays[node.output[0]] = arrays[node.input[0]].T
        nodes = [_copied(node) for node in graph.node if node.output[0] not in arrays]
        constants = [_copied(one) for one in graph.initializer]
        used = {name for node in nodes for name in node.input}
        for node in nodes:
            node.name = f"{at}/{node.name}"
            node.input[:] = [names.get(one, f"{at}/{one}") if one else "" for one in node.input]
            node.output[:] = [names.get(one, f"{at}/{one}") for one in node.output]
        for one in constants:
            one.name = f"{at}/{one.name}"
        self.nodes += nodes
        self.constants += constants
        for name in sorted(used & arrays.keys()):
            self._constant(f"{at}/{name}", arrays[name])


def _copied(message: Any) -> Any:
    own = type(message)()
    own.CopyFrom(message)
    return own
