"""int8 quantisation of the linear layers of an ONNX model, except where it would lose accuracy."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.export.graphs import INPUT
from engram.export.runtime import open_session

#: A layer stays in float32 if its input has a value this many times the root mean square.
OUTLIER_RATIO = 50


def quantise(proto: Any, pixels: Tensor, folder: Path) -> Any:
    """The ONNX model with int8 in the linear layers that all tokens pass (dynamic quantisation).

    Args:
        proto: The model in float32. It is changed and of no use afterwards.
        pixels: Images on which to look for outliers.
        folder: A folder with enough free space for the model; otherwise there is an OSError.

    Returns:
        The quantised model, without metadata of its own.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    layers = _without_outliers(proto, _linear_layers(proto), pixels)
    _copy_shared_weights(proto)
    del proto.graph.value_info[:]  # the exporter's shapes contradict the quantiser's
    del proto.metadata_props[:]
    # The shapes are known, so the step that the quantiser would advise changes nothing.
    proto.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".engram-") as name:
        source, target = Path(name) / "float32.onnx", Path(name) / "int8.onnx"
        source.write_bytes(proto.SerializeToString())
        quantize_dynamic(
            source,
            target,
            nodes_to_quantize=layers,
            op_types_to_quantize=["MatMul"],
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
        )
        return onnx.load(target)


def _copy_shared_weights(proto: Any) -> None:
    """Give every Gemm its own weight: the quantiser transposes them in place, once per use.

    The exporter lets two tasks share a weight if their heads are equal, as untrained ones are.
    """
    weights = {one.name: one for one in proto.graph.initializer}
    seen: set[str] = set()
    for number, node in enumerate(proto.graph.node):
        name = node.input[1] if node.op_type == "Gemm" else ""
        if name in seen and name in weights:
            own = proto.graph.initializer.add()
            own.CopyFrom(weights[name])
            own.name = node.input[1] = f"{name}/{number}"
        seen.update(node.input)


def _linear_layers(proto: Any) -> list[str]:
    """The nodes that multiply all tokens by a weight: the trunk's, and heads of segmentation.

    So is what side patches take in of the tokens: on a ViT-Ti their logits are 5 to 6 % off with
    int8 whether or not this is rounded, because the trunk is. Heads that read one token per image,
    adapters, and the maps of side patches among themselves, which are stacked by task, take almost
    no time, and rounding them would cost accuracy.
    """
    matrices = {one.name for one in proto.graph.initializer if len(one.dims) == 2}
    return [
        node.name
        for node in proto.graph.node
        if node.op_type == "MatMul" and node.input[1] in matrices
    ]


def _without_outliers(proto: Any, layers: Sequence[str], pixels: Tensor) -> list[str]:
    """The layers whose input has no value so large that rounding would erase all others.

    All values of an input share one step. Some ViTs have a layer in which one channel is hundreds
    of times as large as the rest: in 255 steps of that size, the rest becomes zero.
    """
    probe = type(proto)()
    probe.CopyFrom(proto)
    inputs = {node.name: node.input[0] for node in proto.graph.node if node.name in layers}
    values = list(dict.fromkeys(inputs.values()))
    for value in values:
        probe.graph.output.add().name = value
    session = open_session(probe.SerializeToString())
    largest, squares = dict.fromkeys(values, 0.0), dict.fromkeys(values, 0.0)
    for image in torch.split(pixels, 1):  # one at a time: the inputs of all layers are in memory
        arrays = session.run(values, {INPUT: image.numpy()})
        for value, array in zip(values, arrays, strict=True):
            largest[value] = max(largest[value], float(np.abs(array).max()))
            squares[value] += float(np.mean(array**2)) / len(pixels)
    return [
        name
        for name, value in inputs.items()
        if largest[value] <= OUTLIER_RATIO * max(squares[value] ** 0.5, 1e-30)
    ]
