"""The graph says what it is, and computes nothing that does not depend on the image."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tests.support.exports import Made, largest, new_model
from tests.support.strategies import scatter

import engram
from engram import MemoryViT, random_backbone
from engram.export import OnnxModel, write


def test_the_file_says_what_it_is(made: Made) -> None:
    import onnx

    proto = onnx.load(made.float32.path)
    assert [(one.domain, one.version) for one in proto.opset_import] == [("", 20)]
    onnx.checker.check_model(proto, full_check=True)
    shapes = {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in (*proto.graph.input, *proto.graph.output)
    }
    assert shapes["pixels"] == ["batch", 3, 24, 16]
    assert shapes["child.of-plain"] == ["batch", 4]
    about = OnnxModel(made.float32.path).about
    assert about["backbone"]["fingerprint"] == made.model.backbone.fingerprint
    assert about["preprocessing"] == made.model.preprocessing.to_dict()
    assert about["library"] == f"engram-vit {engram.__version__}"
    assert list(about["tasks"]) == ["base", *made.model.tasks]
    assert about["tasks"]["base"]["classes"] == [str(i) for i in range(7)]
    plain = about["tasks"]["plain"]
    assert plain["classes"] == ["red", "green", "blue"]
    assert plain["kind"] == "classification"
    assert plain["content"] == made.model.engram("plain").content
    assert OnnxModel(made.int8.path).about == {**about, "precision": "int8"}
    extra = {"engram.json": ""}
    torch.export.load(made.torch.path, extra_files=extra)
    assert json.loads(extra["engram.json"]) == about


SIDES = [[32, 8], [32, 4]]  # "thin" and its child, and "both", whose cells are more


def test_cells_are_constants_and_linear_layers_are_int8(made: Made) -> None:
    """No key or value of a cell is computed when the file runs, and no map of a side folded."""
    import onnx

    for path, integer in ((made.float32.path, False), (made.int8.path, True)):
        graph = onnx.load(path).graph
        depends = {"pixels"}  # on the image
        for node in graph.node:
            if depends & set(node.input):
                depends.update(node.output)
            else:
                assert node.op_type in ("Constant", "ConstantOfShape", "DequantizeLinear"), node
        weights = {one.name: list(one.dims) for one in graph.initializer}
        for node in graph.node:  # int8 weights are constants behind a step for each column
            if node.op_type == "DequantizeLinear" and len(weights.get(node.input[0], [])) == 2:
                assert integer
                weights[node.output[0]] = weights[node.input[0]]
        given = {one.name for one in graph.initializer}
        products = [
            weights[node.input[1]]
            for node in graph.node
            if node.op_type == "MatMul"
            and len(weights.get(node.input[1], [])) == 2
            and (node.input[1] in given) != integer
        ]
        # per layer qkv, proj, fc1, fc2
        backbone = [[32, 96], [32, 32], [32, 128], [128, 32]] * 2
        assert [shape for shape in products if shape not in SIDES] == backbone
        # what side network take in of each layer and of the final tokens
        assert sorted(shape for shape in products if shape in SIDES) == sorted(SIDES * 3)
        maps = [
            weights[node.input[1]]
            for node in graph.node
            if node.input[1:2]
            and node.op_type == "MatMul"
            and len(weights.get(node.input[1], [])) == 3
        ]
        assert maps.count([1, 4, 4]) == 2 * 3 + 2  # folded into two a step; and of the parent
        assert maps.count([2, 4, 4]) == 2 * 3


def test_no_path_of_this_machine_is_in_a_file(made: Made) -> None:
    for one in (made.float32, made.int8, made.torch):
        data = one.path.read_bytes()
        assert str(Path(write.__file__).parent).encode() not in data
        assert str(Path(torch.__file__).parent).encode() not in data


def test_a_file_names_its_backbone_without_the_folder() -> None:
    model = new_model()
    for source, public in (("/home/ann/private/vit", "vit"), ("owner/vit", "owner/vit")):
        model.backbone.source = source
        assert write.metadata(model, ["base"])["backbone"]["source"] == public


def test_side_patches_and_readouts_are_traced_as_one_graph() -> None:
    """torch.compile refuses what depends on data, or cannot be traced, with `fullgraph`."""
    backbone = random_backbone(image_size=8, patch=4, width=8, depth=1, heads=2, classes=0)
    model = MemoryViT(backbone).eval()
    model.add_task("thin", 2, 1, regime="side", rank=4, seed=0)
    scatter(model.add_task("both", 3, 1, regime="side+readout", rank=4, seed=1), by=0.3)
    scatter(model.add_task("child", 3, 2, regime="side", rank=4, extends=["thin"], seed=2), by=0.3)
    names, pixels = list(model.tasks), torch.rand(3, 3, 8, 8)
    compiled = torch.compile(model.constant(names, (8, 8)), backend="eager", fullgraph=True)
    with torch.no_grad():
        assert largest(compiled(pixels, names), model(pixels, names)) < 1e-5
