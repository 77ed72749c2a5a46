"""Quantisation of the linear layers of an ONNX model: int8 products, or rounded weights alone.

Every token is rounded with a step of its own, 1/127 of its largest value, so that what becomes of
it depends on no other token and no other image. Weights have a step for each column. The graph
says this in ONNX's own operators (QuantizeLinear and DequantizeLinear around a MatMul), which
onnxruntime runs as one product of integers. Layers where this would lose accuracy are left alone.

With rounded weights alone (`round_weights`) the file is smaller and more exact, and not faster:
a runtime restores the weights when it loads the file, and then runs it in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engram.export.runtime import open_session

#: A layer stays in float32 if rounding moves most numbers of its input by more than this share.
LARGEST_NOISE = 0.15
_STEPS = 127  # of a token, to each side
_WEIGHT_STEPS = 63  # 7 bits: with 8, sums overflow on CPUs without VNNI
_SMALLEST = 1e-20  # of what a token is divided by: one of zeros stays one

Array = npt.NDArray[Any]
Feeds = Mapping[str, Array]  # by the name of a graph's input
_CONSTANTS: dict[str, Array] = {
    "/int8/last": np.array([-1]),
    "/int8/smallest": np.array(_SMALLEST, np.float32),
    "/int8/step": np.array(1 / _STEPS, np.float32),
    "/int8/zero": np.array(128, np.uint8),
}


def quantise(proto: Any, feeds: Sequence[Feeds]) -> None:
    """Compute the linear layers that all tokens pass in int8: changes the ONNX model.

    `feeds` are inputs in which to look for outliers, a few images at a time.
    """
    graph = proto.graph
    layers = _without_outliers(proto, _linear_layers(proto), feeds)
    nodes: list[Any] = []
    tokens, weights = set(), set()  # that are rounded
    for node in graph.node:
        if node.name not in layers:
            nodes.append(node)
            continue
        value, weight = node.input
        if value not in tokens:
            nodes += _round_tokens(value)
        tokens.add(value)
        weights.add(weight)
        nodes += _product(value, weight, node.output[0])
    arrays = dict(_CONSTANTS)
    for name, weight in _weights(graph, weights):
        at = f"{name}/int8"
        arrays[at], arrays[f"{at}/steps"] = _rounded(weight, _WEIGHT_STEPS)
        arrays[f"{at}/zeros"] = np.zeros(weight.shape[1], np.int8)
    _replace(graph, nodes, arrays)


def round_weights(proto: Any, dtype: str) -> None:
    """Store the weights of the linear layers that all tokens pass as float16 or int8.

    Changes the ONNX model. A cast, and a product with the steps of int8, restore the weights;
    unlike DequantizeLinear, runtimes do that once.
    """
    from onnx import TensorProto
    from onnx.helper import make_node

    graph, layers = proto.graph, _linear_layers(proto)
    nodes: list[Any] = []
    arrays: dict[str, Array] = {}
    for name, weight in _weights(graph, {n.input[1] for n in graph.node if n.name in layers}):
        stored, cast, steps = f"{name}/{dtype}", f"{name}/cast", f"{name}/steps"
        if dtype == "int8":
            arrays[stored], arrays[steps] = _rounded(weight, _STEPS)
            nodes.append(make_node("Cast", [stored], [cast], to=TensorProto.FLOAT))
            nodes.append(make_node("Mul", [cast, steps], [name]))
        else:
            arrays[stored] = weight.astype(np.float16)
            nodes.append(make_node("Cast", [stored], [name], to=TensorProto.FLOAT))
    _replace(graph, [*nodes, *graph.node], arrays)


def _linear_layers(proto: Any) -> list[str]:
    """The nodes that multiply all tokens by a weight: of the backbone, and heads of segmentation.

    So do the inputs of side networks: their logits are 5 to 6 % off on a ViT-Ti whether or not
    these are rounded, because the backbone is. Heads that read one token per image, adapters, and
    other weights that are stacked by task take almost no time, and would lose accuracy.
    """
    matrices = {one.name for one in proto.graph.initializer if len(one.dims) == 2}
    return [
        node.name
        for node in proto.graph.node
        if node.op_type == "MatMul" and node.input[1] in matrices
    ]


def _without_outliers(proto: Any, layers: Sequence[str], feeds: Sequence[Feeds]) -> set[str]:
    """The layers whose input has no value so large that rounding would erase all others.

    All values of a token share one step. Some ViTs have a layer in which one channel is hundreds
    of times as large as the rest: in steps of that size, the rest becomes zero.
    """
    probe = type(proto)()
    probe.CopyFrom(proto)
    inputs = {node.name: node.input[0] for node in proto.graph.node if node.name in layers}
    own = {output.name for output in proto.graph.output}
    values = list(dict.fromkeys(inputs.values()))
    for value in values:
        if value not in own:
            probe.graph.output.add().name = value
    session = open_session(probe.SerializeToString())
    noise = dict.fromkeys(values, 0.0)
    for one in feeds:  # a few images at a time: the inputs of all layers are in memory
        for value, array in zip(values, session.run(values, dict(one)), strict=True):
            noise[value] += _noise(array) / len(feeds)
    return {name for name, value in inputs.items() if noise[value] <= LARGEST_NOISE}


def _noise(tokens: Array) -> float:
    """The rounding error of tokens (…, D) relative to their size, in root mean square.

    The size is without the largest hundredth of every token's numbers.
    """
    sizes = np.abs(tokens).reshape(-1, tokens.shape[-1])
    usual = sizes.shape[1] - max(sizes.shape[1] // 100, 1)
    rest = np.partition(sizes, usual, axis=1)[:, :usual]
    step = sizes.max(1) / _STEPS
    return float(np.sqrt(np.mean(step**2) / 12 / max(np.mean(rest**2), _SMALLEST)))


def _round_tokens(value: str) -> list[Any]:
    """Nodes that divide each token by its largest value, and round what is left, from -1 to 1."""
    from onnx.helper import make_node

    at = f"{value}/int8"
    return [
        make_node("Abs", [value], [f"{at}/sizes"]),
        make_node("ReduceMax", [f"{at}/sizes", "/int8/last"], [f"{at}/largest"]),
        make_node("Max", [f"{at}/largest", "/int8/smallest"], [f"{at}/size"]),
        make_node("Div", [value, f"{at}/size"], [f"{at}/share"]),
        make_node("QuantizeLinear", [f"{at}/share", "/int8/step", "/int8/zero"], [f"{at}/rounded"]),
        make_node("DequantizeLinear", [f"{at}/rounded", "/int8/step", "/int8/zero"], [at]),
    ]


def _product(value: str, weight: str, output: str) -> list[Any]:
    """Nodes that multiply rounded tokens by a rounded weight."""
    from onnx.helper import make_node

    at, of = f"{value}/int8", f"{weight}/int8"
    return [
        make_node("DequantizeLinear", [of, f"{of}/steps", f"{of}/zeros"], [f"{output}/w"], axis=1),
        make_node("MatMul", [at, f"{output}/w"], [f"{output}/share"], name=f"{output}/int8"),
        make_node("Mul", [f"{output}/share", f"{at}/size"], [output]),
    ]


def _weights(graph: Any, names: Collection[str]) -> Iterator[tuple[str, Array]]:
    """The matrices of these names."""
    from onnx import numpy_helper

    found = [one for one in graph.initializer if one.name in names]
    return ((one.name, numpy_helper.to_array(one)) for one in found)


def _rounded(weight: Array, most: int) -> tuple[Array, Array]:
    """A weight as int8, from -most to most, and the step of every column."""
    steps = np.maximum(np.abs(weight).max(0), _SMALLEST) / most
    return np.rint(weight / steps).astype(np.int8), steps.astype(np.float32)


def _replace(graph: Any, nodes: Sequence[Any], arrays: Mapping[str, Array]) -> None:
    """Give a graph these nodes, and constants: of its own, only those that it needs."""
    from onnx import numpy_helper

    needed = {name for node in nodes for name in node.input}
    needed -= {name for node in nodes for name in node.output}
    constants = [one for one in graph.initializer if one.name in needed]
    constants += [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    for field, values in (("node", nodes), ("initializer", constants)):
        kept = [type(value).FromString(value.SerializeToString()) for value in values]
        graph.ClearField(field)
        getattr(graph, field).extend(kept)
    graph.ClearField("value_info")  # the exporter's types, some of what is not there any more
