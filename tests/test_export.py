"""A file that was exported answers as the model it came from, or there is no file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.strategies import scatter

import engram
from engram import EngramError, MemoryViT, export, random_trunk
from engram.export import Export, OnnxModel, check_pixels, export_onnx, export_torch
from engram.images import Preprocessing


def new_model(**options: Any) -> MemoryViT:
    """Tasks of every kind that share a pass, on a trunk that sees pictures of another size."""
    trunk = random_trunk(image_size=16, patch=8, width=32, depth=2, heads=2, classes=7, **options)
    trunk.preprocessing = Preprocessing((24, 16), 28, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    model = MemoryViT(trunk)
    model.add_task("plain", ["red", "green", "blue"], 3)
    model.add_task("child.of-plain", 4, 2, extends=["plain"])
    model.add_task("no-cells", 2, 0)
    model.add_task("adapted", 3, 1, regime="masked+adapter", adapter_width=4, tokens=2)
    model.add_task("linear", 5, regime="head")
    for seed, task in enumerate(model.tasks.values()):
        scatter(task, by=0.3, seed=seed)
    return model.eval()


@dataclass(frozen=True)
class Made:
    model: MemoryViT
    float32: Export
    int8: Export
    torch: Export

    def pixels(self, number: int, seed: int = 5) -> torch.Tensor:
        assert self.model.trunk.preprocessing is not None
        return check_pixels(self.model.trunk.preprocessing, number, seed)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, model = tmp_path_factory.mktemp("export"), new_model()
    return Made(
        model,
        export_onnx(model, folder / "model.onnx"),
        export_onnx(model, folder / "small" / "int8.onnx", int8=True),
        export_torch(model, folder / "model.pt2"),
    )


def largest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert list(found) == list(expected)
    return max(float((found[name] - logits).abs().max()) for name, logits in expected.items())


# What the file answers


@pytest.mark.parametrize("images", [1, 2, 7])
def test_onnx_answers_as_the_model_does(made: Made, images: int) -> None:
    pixels = made.pixels(images)
    with torch.inference_mode():
        expected = made.model(pixels)
    assert next(iter(expected)) == "base"
    assert largest(OnnxModel(made.float32.path, threads=1).run(pixels), expected) < 1e-4


@pytest.mark.parametrize("images", [1, 2, 7])
def test_torch_export_answers_as_the_model_does(made: Made, images: int) -> None:
    pixels = made.pixels(images)
    program = torch.export.load(made.torch.path)
    with torch.inference_mode():
        assert largest(program.module()(pixels), made.model(pixels)) < 1e-4


def test_int8_is_near_and_its_change_is_told(made: Made) -> None:
    pixels = made.pixels(20)
    found = OnnxModel(made.int8.path, threads=1).run(pixels)
    with torch.inference_mode():
        expected = made.model(pixels)
    for name, logits in expected.items():
        error = float((found[name] - logits).norm() / logits.norm())
        assert 0 < error < 0.3, name
        assert 0 < made.int8.changes[name].relative < 0.3
        assert made.float32.changes[name].largest < 1e-4
    assert made.int8.bytes < made.float32.bytes


def test_only_the_asked_outputs_come_back(made: Made) -> None:
    onnx, pixels = OnnxModel(made.float32.path, threads=1), made.pixels(2)
    every = onnx.run(pixels)
    some = onnx.run(pixels, ["no-cells", "base"])
    assert list(some) == ["no-cells", "base"]
    assert torch.equal(some["base"], every["base"])
    with pytest.raises(EngramError, match="There is no 'other' in this file: base, plain"):
        onnx.run(pixels, ["other"])


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
    assert about["trunk"]["fingerprint"] == made.model.trunk.fingerprint
    assert about["preprocessing"] == preprocessing(made)
    assert about["library"] == f"engram-vit {engram.__version__}"
    assert list(about["tasks"]) == ["base", *made.model.tasks]
    assert about["tasks"]["base"]["classes"] == [str(i) for i in range(7)]
    told = about["tasks"]["plain"]
    assert told["classes"] == ["red", "green", "blue"]
    assert told["kind"] == "classification"
    assert told["content"] == made.model.engram("plain").content
    assert OnnxModel(made.int8.path).about == {**about, "precision": "int8"}
    extra = {"engram.json": ""}
    torch.export.load(made.torch.path, extra_files=extra)
    assert json.loads(extra["engram.json"]) == about


def test_cells_are_constants_and_large_products_are_whole_numbers(made: Made) -> None:
    """No key or value of a cell is computed when the file runs, and no large product in floats."""
    import onnx

    for path, integer in ((made.float32.path, False), (made.int8.path, True)):
        graph = onnx.load(path).graph
        depends = {"pixels"}  # on the image
        for node in graph.node:
            if depends & set(node.input):
                depends.update(node.output)
            else:
                assert node.op_type in ("Constant", "ConstantOfShape"), node
        weights = {one.name: list(one.dims) for one in graph.initializer}
        products = [
            weights[node.input[1]]
            for node in graph.node
            if node.op_type == ("MatMulInteger" if integer else "MatMul")
            and len(weights.get(node.input[1], [])) == 2
        ]
        # per layer qkv, proj, fc1, fc2
        assert products == [[32, 96], [32, 32], [32, 128], [128, 32]] * 2


def test_no_path_of_this_machine_is_in_a_file(made: Made) -> None:
    for one in (made.float32, made.int8, made.torch):
        data = one.path.read_bytes()
        assert str(Path(export.__file__).parent).encode() not in data
        assert str(Path(torch.__file__).parent).encode() not in data


def test_the_model_is_left_as_it_was(made: Made) -> None:
    model = new_model()
    assert model.trunk.config.image_size == made.model.trunk.config.image_size == (16, 16)
    for name in model.tasks:
        assert made.model.engram(name).content == model.engram(name).content
    assert made.model.trunk.fingerprint == model.trunk.fingerprint
    assert any(p.requires_grad for p in made.model.parameters())


def preprocessing(made: Made) -> dict[str, Any]:
    assert made.model.trunk.preprocessing is not None
    return made.model.trunk.preprocessing.to_dict()
