"""Whole numbers in a graph's large products: dynamic quantisation, where rounding leaves enough."""

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

#: A product stays in floats if a value of its input is so many times larger than most.
OUTLIER = 50


def quantised(proto: Any, pixels: Tensor, folder: Path) -> Any:
    """The same ONNX model with whole numbers in the products of tokens and weights.

    The model that is given is used up. `folder` is where there is room for it on disk meanwhile;
    without such room there is an OSError.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    products = _without_outliers(proto, _products(proto), pixels)
    _unshare(proto)
    del proto.graph.value_info[:]  # shapes that the exporter noted contradict the quantiser's
    del proto.metadata_props[:]
    # says that shapes are known, which spares users a remark about a step that changes nothing
    proto.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".engram-") as name:
        source, target = Path(name) / "float32.onnx", Path(name) / "int8.onnx"
        source.write_bytes(proto.SerializeToString())
        quantize_dynamic(
            source,
            target,
            nodes_to_quantize=products,
            op_types_to_quantize=["MatMul"],
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
        )
        return onnx.load(target)


def _unshare(proto: Any) -> None:
    """Give every Gemm a weight of its own: the quantiser transposes them in place, each time.

    Two tasks whose heads are equal, as those of untrained ones are, share one otherwise.
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


def _products(proto: Any) -> list[str]:
    """The nodes that multiply tokens by a weight: the trunk's, and those of heads of masks.

    These are nearly all the work there is. Heads that read one token a picture, and adapters, stay
    as they are: they take no time, and rounding them would cost accuracy.
    """
    matrices = {one.name for one in proto.graph.initializer if len(one.dims) == 2}
    return [
        node.name
        for node in proto.graph.node
        if node.op_type == "MatMul" and node.input[1] in matrices
    ]


def _without_outliers(proto: Any, products: Sequence[str], pixels: Tensor) -> list[str]:
    """The products whose input has no value so large that rounding would leave nothing else.

    One input has one step for all of its values. Some ViTs have a layer in which one channel is
    hundreds of times larger than the others: rounded to 255 steps of it, those are all zero.
    """
    whole = type(proto)()
    whole.CopyFrom(proto)
    inputs = {node.name: node.input[0] for node in proto.graph.node if node.name in products}
    values = list(dict.fromkeys(inputs.values()))
    for value in values:
        whole.graph.output.add().name = value
    session = open_session(whole.SerializeToString())
    largest, squares = dict.fromkeys(values, 0.0), dict.fromkeys(values, 0.0)
    for picture in torch.split(pixels, 1):  # one at a time: the inputs of all layers are in memory
        for value, seen in zip(values, session.run(values, {INPUT: picture.numpy()}), strict=True):
            largest[value] = max(largest[value], float(np.abs(seen).max()))
            squares[value] += float(np.mean(seen**2)) / len(pixels)
    return [
        name
        for name, value in inputs.items()
        if largest[value] <= OUTLIER * max(squares[value] ** 0.5, 1e-30)
    ]
