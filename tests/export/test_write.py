"""A file that was exported answers as the model it came from, or there is no file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.strategies import scatter

import engram
from engram import EngramError, MemoryViT, load_trunk, random_trunk, save_trunk
from engram.cli import main as cli
from engram.export import graphs, quantise, standalone
from engram.export import write as export
from engram.export.write import Export, OnnxModel, check_pixels, export_onnx, export_torch
from engram.images.decode import FORMATS
from engram.images.preprocessing import INTERPOLATIONS, Preprocessing, normalise
from engram.images.views import evaluation_view
from engram.inference.load import load_model

Output = pytest.CaptureFixture[str]


def new_model(**options: Any) -> MemoryViT:
    """Tasks of every kind that share a pass, on a trunk that sees pictures of another size."""
    trunk = random_trunk(image_size=16, patch=8, width=32, depth=2, heads=2, classes=7, **options)
    trunk.preprocessing = Preprocessing((24, 16), 28, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    model = MemoryViT(trunk)
    model.add_task("plain", ["red", "green", "blue"], 3, seed=0)
    model.add_task("child.of-plain", 4, 2, extends=["plain"], seed=0)
    model.add_task("no-cells", 2, 0, seed=0)
    model.add_task("adapted", 3, 1, regime="masked+adapter", adapter_width=4, tokens=2, seed=0)
    model.add_task("linear", 5, regime="head", seed=0)
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


def trace_once(patch: pytest.MonkeyPatch) -> None:
    """Let all exports of one model share what torch makes of it, which is nearly all their time."""
    trace, convert = graphs.trace, torch.onnx.export
    traces: dict[tuple[object, ...], Any] = {}
    converted: dict[int, Any] = {}

    def traced(model: MemoryViT, names: list[str], pixels: torch.Tensor) -> Any:
        key = (id(model), *names)
        if key not in traces:
            traces[key] = trace(model, names, pixels)
        return traces[key]

    def convert_once(program: Any, **options: Any) -> Any:
        if id(program) not in converted:
            converted[id(program)] = convert(program, **options)
        return converted[id(program)]

    patch.setattr(export, "trace", traced)
    patch.setattr(graphs, "trace", traced)
    patch.setattr(torch.onnx, "export", convert_once)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, model = tmp_path_factory.mktemp("export"), new_model()
    with pytest.MonkeyPatch.context() as patch:
        trace_once(patch)
        program = export_torch(model, folder / "model.pt2")
        float32 = export_onnx(model, folder / "model.onnx")
        int8 = export_onnx(model, folder / "small" / "int8.onnx", int8=True)
    return Made(model, float32, int8, program)


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


def test_a_file_names_its_trunk_without_the_folder() -> None:
    model = new_model()
    for source, told in (("/home/ann/private/vit", "vit"), ("owner/vit", "owner/vit")):
        model.trunk.source = source
        assert graphs.about(model, ["base"])["trunk"]["source"] == told


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


# Other kinds and regimes


def test_every_kind_is_exported_with_what_its_answers_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace_once(monkeypatch)
    trunk = random_trunk(image_size=8, patch=4, width=8, depth=1, heads=2, classes=3)
    trunk.preprocessing = Preprocessing((8, 8), None)
    model = MemoryViT(trunk)
    model.add_task("labels", ["a", "b", "c"], 1, kind="multilabel")
    model.add_task("numbers", ["age", "size"], 1, kind="regression")
    model.add_task("masks", ["pet", "rest"], 1, kind="segmentation", values=[1, 2])
    for task in model.tasks.values():
        scatter(task)
    model.task("numbers").head.settled["mean"].fill_(20)
    model.task("labels").head.settled["thresholds"].fill_(0.25)
    model.eval()
    pixels = check_pixels(trunk.preprocessing, 3, 9)
    with torch.inference_mode():
        expected = model(pixels)
    made = export_onnx(model, tmp_path / "model.onnx")
    exported = OnnxModel(made.path, threads=1)
    assert largest(exported.run(pixels), expected) < 1e-4
    assert exported.run(pixels)["masks"].shape == (3, 2, 8, 8)
    told = exported.about["tasks"]
    assert told["labels"]["thresholds"] == [0.25] * 3
    assert told["numbers"]["mean"] == [20, 20]
    assert told["masks"]["values"] == [1, 2]
    assert export_onnx(model, tmp_path / "int8.onnx", int8=True).changes["masks"].relative < 0.3
    picture = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "picture.ppm")
    (said,) = engram.predict(model, [tmp_path / "picture.ppm"])
    script = standalone.Model(made.path)
    logits = script.logits(tmp_path / "picture.ppm", list(told))
    for name, answer in said["tasks"].items():
        wanted = answer["classes"] if name == "masks" else answer
        given = script.answer(name, logits[name], 5)
        assert len(given) == len(wanted)
        if name in ("masks", "classes"):
            assert len(script.answer(name, logits[name], 1)) == 1
        for one, other in zip(given, wanted, strict=True):
            assert one == pytest.approx(other, abs=1e-3)
            assert standalone.words(one)


def test_a_product_of_outliers_stays_in_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One channel behind an activation is far larger than the other 31, so sqrt(32) = 5.7 times
    as large as their root mean square."""
    import onnx

    monkeypatch.setattr(quantise, "OUTLIER", 5.5)
    trunk = random_trunk(image_size=8, patch=4, width=8, depth=1, heads=2, classes=3)
    trunk.preprocessing = Preprocessing((8, 8), None)
    with torch.no_grad():
        trunk.layers[0].mlp.fc1.bias[3] = 3000
    made = export_onnx(MemoryViT(trunk), tmp_path / "model.onnx", int8=True, tasks=["base"])
    graph = onnx.load(made.path).graph
    weights = {one.name: list(one.dims) for one in graph.initializer}
    kinds = {
        tuple(weights[node.input[1]]): node.op_type
        for node in graph.node
        if node.op_type.startswith("MatMul") and len(weights.get(node.input[1], [])) == 2
    }
    assert kinds[32, 8] == "MatMul"
    assert kinds[8, 32] == kinds[8, 24] == "MatMulInteger"


@pytest.mark.parametrize("regime", ["full", "memory+adapter"])
def test_a_task_that_changes_the_trunk_is_exported_beside_base(regime: str, tmp_path: Path) -> None:
    trunk = random_trunk(image_size=8, patch=4, width=8, depth=1, heads=2, classes=3)
    model = MemoryViT(trunk)
    scatter(model.add_task("alone", 4, 2, regime=regime))
    pixels = check_pixels(Preprocessing((8, 8), None), 3, 9)
    with torch.inference_mode():
        expected = model(pixels)
    made = export_onnx(model, tmp_path / "model.onnx")
    assert largest(OnnxModel(made.path, threads=1).run(pixels), expected) < 1e-4


# What is refused


def refuse_to_trace(patch: pytest.MonkeyPatch) -> None:
    def untraced(*_: object) -> None:
        raise AssertionError("the model was traced before the mistake was found")

    patch.setattr(export, "trace", untraced)
    patch.setattr(graphs, "trace", untraced)


def small() -> MemoryViT:
    model = MemoryViT(random_trunk(image_size=8, patch=4, width=8, depth=1, heads=2, classes=3))
    model.add_task("one", 2, 1)
    return model


def test_a_file_that_answers_otherwise_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(b"what was there")
    trace = export.trace

    def wrong(model: MemoryViT, names: list[str], pixels: torch.Tensor) -> Any:
        other = MemoryViT(model.trunk)
        scatter(other.add_task("one", 2, 1))
        return trace(other, names, pixels)

    monkeypatch.setattr(export, "trace", wrong)
    with pytest.raises(EngramError, match="The exported 'one' does not answer as the model does"):
        export_torch(small(), path)
    assert path.read_bytes() == b"what was there"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_exported_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_trace(monkeypatch)
    path = tmp_path / "model.onnx"
    with pytest.raises(EngramError, match=r"is in torch.bfloat16, .* cast it"):
        export_onnx(small().bfloat16(), path)
    nothing = MemoryViT(random_trunk(image_size=8, patch=4, width=8, depth=1, heads=2, classes=0))
    with pytest.raises(EngramError, match="nothing to export"):
        export_onnx(nothing, path)
    model = small()
    model.add_task("pixels", 2, 1)
    with pytest.raises(EngramError, match="A task is called 'pixels'"):
        export_onnx(model, path)
    monkeypatch.setattr(export, "_MOST_BYTES", 10)
    with pytest.raises(EngramError, match="an ONNX file holds at most 2 GB"):
        export_onnx(small(), path)
    assert not list(tmp_path.iterdir())


def test_what_is_no_exported_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngramError, match=r"gone\.onnx does not exist"):
        OnnxModel(tmp_path / "gone.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"not a graph")
    with pytest.raises(EngramError, match="is not an ONNX file that `engram export` wrote"):
        OnnxModel(tmp_path / "bad.onnx")


# predict.py


METHODS = list(INTERPOLATIONS)


@pytest.mark.parametrize("case", range(30))
def test_the_script_makes_the_same_pixels_as_engram(case: int) -> None:
    """Bit for bit, for every method, shape and size, without Pillow."""
    rng = np.random.default_rng(case)
    width, height = rng.integers(5, 300, 2).tolist()
    high, wide = rng.integers(8, 100, 2).tolist()
    resize = None if case % 3 == 0 else max(high, wide) + int(rng.integers(0, 30))
    how = Preprocessing((high, wide), resize, METHODS[case % 6], (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    picture = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    expected = evaluation_view(picture, how)
    seen = standalone.view(picture, (width, height), how.to_dict())
    assert np.array_equal(seen, expected)
    pixels = normalise(torch.from_numpy(expected)[None], how)
    assert np.array_equal(standalone.normalise(seen[None], how.to_dict()), pixels.numpy())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(301, 3), (300, 3), (950, 2), (150, 1), (3, 301)])
@pytest.mark.parametrize("resize", [None, 28])
def test_the_script_sees_very_long_pictures_as_pillow_does(
    shape: tuple[int, int], method: str, resize: int | None
) -> None:
    """One that is more than 100 times as high as it is wide is resized in another order."""
    how = Preprocessing((24, 16), resize, method)
    picture = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    seen = standalone.view(picture, (shape[1], shape[0]), how.to_dict())
    assert np.array_equal(seen, evaluation_view(picture, how))


def pictures(folder: Path) -> list[Path]:
    """One of every sort that is read in its own way."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (90, 120, 3), dtype=np.uint8)
    photo = Image.fromarray(noise).resize((1200, 900), Image.Resampling.BICUBIC)
    turned = Image.Exif()
    turned[0x0112] = 6
    photo.save(folder / "large.jpg")
    photo.resize((90, 60)).save(folder / "turned.jpg", exif=turned.tobytes())
    photo.resize((90, 60)).save(folder / "turned.tiff", tiffinfo={0x0112: 6})
    Image.fromarray(noise).save(folder / "colour.ppm")
    Image.fromarray(noise[..., 0]).save(folder / "gray.pgm")
    alpha = np.concatenate([noise, noise[..., :1]], axis=2)
    Image.fromarray(alpha).save(folder / "clear.png")
    Image.fromarray(noise[..., 0].astype(np.uint16) * 257).save(folder / "deep.png")
    Image.fromarray(noise).convert("P").save(folder / "few.gif")
    return sorted(path for path in folder.iterdir())


def test_the_script_reads_pictures_as_engram_does(tmp_path: Path) -> None:
    how = Preprocessing((24, 16), 28)
    paths = pictures(tmp_path)
    assert len(paths) == 8
    for path in paths:
        seen = standalone.view(*standalone.read(path, how.to_dict()), how.to_dict())
        assert np.array_equal(seen, evaluation_view(path, how)), path.name


def test_the_script_starts_no_other_program_for_a_picture(tmp_path: Path) -> None:
    assert [name for name in standalone.FORMATS if name in Image.OPEN] == FORMATS
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png", "EPS")  # Pillow runs Ghostscript for it
    with pytest.raises(standalone.Unusable, match="cannot identify image file"):
        standalone.read(tmp_path / "x.png", Preprocessing((8, 8), None).to_dict())


ALONE = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
import runpy
sys.argv = {arguments!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_script(
    script: Path, *arguments: object, blocked: tuple[str, ...] = ("torch", "engram", "PIL")
) -> subprocess.CompletedProcess[str]:
    """predict.py in a process that has neither torch nor engram nor Pillow."""
    code = ALONE.format(blocked=blocked, arguments=[str(script), *map(str, arguments)])
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )


def test_the_script_answers_with_onnxruntime_and_numpy_alone(made: Made, tmp_path: Path) -> None:
    assert made.float32.script == made.float32.path.with_name("predict.py")
    pictures(tmp_path)
    array = np.asarray(Image.open(tmp_path / "colour.ppm"))
    np.save(tmp_path / "array.npy", array)
    names = ["colour.ppm", "gray.pgm", "array.npy"]
    done = run_script(
        made.float32.script, *[tmp_path / name for name in names], "--json", "--top-k", 2
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for one, name in zip(said, ["colour.ppm", "gray.pgm", "colour.ppm"], strict=True):
        (expected,) = engram.predict(made.model, [tmp_path / name], top_k=2)
        assert list(one["tasks"]) == ["base", *made.model.tasks]
        for task, best in expected["tasks"].items():
            assert [o["class"] for o in one["tasks"][task]] == [o["class"] for o in best]
            for mine, theirs in zip(one["tasks"][task], best, strict=True):
                assert mine["probability"] == pytest.approx(theirs["probability"], abs=1e-4)


def test_the_script_uses_pillow_where_it_is_and_says_where_it_is_not(
    made: Made, tmp_path: Path
) -> None:
    script = made.int8.script
    assert script is not None
    pictures(tmp_path)
    photo = tmp_path / "large.jpg"
    done = run_script(script, photo, "--task", "plain", blocked=("torch", "engram"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(photo)
    assert "  plain: " in done.stdout
    done = run_script(script, photo, tmp_path / "gone.npy", tmp_path / "colour.ppm", "--json")
    assert done.returncode == 2
    jpeg, gone, colour = json.loads(done.stdout)
    assert "install Pillow to read other pictures" in jpeg["error"]
    assert gone["error"].endswith("gone.npy: the file does not exist")
    assert set(colour) == {"image", "tasks"}
    done = run_script(script, photo, "--task", "other")
    assert done.returncode == 2
    assert "Give tasks among base, plain" in done.stderr


def test_somebody_elses_script_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "predict.py").write_text("print('mine')\n")
    assert export._write_script(tmp_path / "model.onnx") is None
    assert (tmp_path / "predict.py").read_text() == "print('mine')\n"
    (tmp_path / "predict.py").unlink()
    assert export._write_script(tmp_path / "a.onnx") == tmp_path / "predict.py"
    assert "MODEL = 'a.onnx'" in (tmp_path / "predict.py").read_text()
    assert export._write_script(tmp_path / "b.onnx") is not None  # its own is replaced
    assert "MODEL = 'b.onnx'" in (tmp_path / "predict.py").read_text()
    (tmp_path / "folder" / "predict.py").mkdir(parents=True)
    assert export._write_script(tmp_path / "folder" / "model.onnx") is None


# The command


@pytest.fixture
def work(tmp_path: Path, colours: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle for a trunk of one layer: what an export takes grows with the layers."""
    monkeypatch.chdir(tmp_path)
    trunk = random_trunk(image_size=16, patch=4, width=32, depth=1, heads=2, classes=7)
    trunk.preprocessing = Preprocessing((16, 16), None)
    save_trunk(trunk, "vit")
    os.symlink(colours, "colours.npz")
    model = MemoryViT(load_trunk("vit"))
    for name in ("one", "two"):
        scatter(model.add_task(name, ["red", "green", "blue"], 2, seed=0), by=0.2)
        model.save(name, f"{name}.safetensors")
    assert cli.main(["compose", "one.safetensors", "two.safetensors", "-o", "bundle"]) == 0
    return tmp_path


def run(*arguments: object) -> int:
    return cli.main(["export", *map(str, arguments)])


def test_export_measures_tasks_before_and_after(work: Path, capsys: Output) -> None:
    capsys.readouterr()
    command = ("bundle", "-o", "model.onnx", "--int8", "--workers", 0)
    assert run(*command, "--data", "one=colours.npz", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["file"] == "model.onnx"
    assert said["bytes"] == (work / "model.onnx").stat().st_size
    assert list(said["tasks"]) == ["base", "one", "two"]
    one = said["tasks"]["one"]
    assert one["before"]["images"] == one["after"]["images"] == 21
    right = engram.evaluate(
        load_model("bundle"), "colours.npz", "one", workers=0
    )  # and so before is what eval says
    assert one["before"]["accuracy"] == right["accuracy"]
    assert abs(one["after"]["accuracy"] - right["accuracy"]) < 0.2
    assert "before" not in said["tasks"]["two"]
    assert run(*command) == 2
    assert "model.onnx is there already" in capsys.readouterr().err
    assert run(*command, "--overwrite", "--task", "two") == 0
    told = capsys.readouterr().out
    assert "ONNX, opset 20, int8" in told
    assert "not measured; give --data NAME=DATA" in told
    assert OnnxModel("model.onnx").tasks == ("two",)


def test_export_writes_what_torch_runs_alone(work: Path, capsys: Output) -> None:
    command = ("one.safetensors", "-o", "out/model.pt2", "--data", "colours.npz", "--workers", 0)
    assert run(*command) == 0
    told = capsys.readouterr().out
    assert "torch.export, float32" in told
    assert "+0.00%" in told
    code = (
        "import sys, torch; program = torch.export.load('out/model.pt2').module();"
        "assert 'engram' not in sys.modules; print(*program(torch.rand(5, 3, 16, 16)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["base", "one"]


REFUSED = {
    "model.txt has the ending '.txt'; formats are onnx (.onnx), torch (.pt2)": ("-o", "model.txt"),
    "There is no format 'tflite'": ("-o", "model.onnx", "--format", "tflite"),
    "model.onnx does not end in .pt2": ("-o", "model.onnx", "--format", "torch"),
    "folder.onnx is a folder": ("-o", "folder.onnx"),
    "cannot be written (File exists)": ("-o", "colours.npz/model.onnx"),
    "int8 is for ONNX": ("-o", "model.pt2", "--int8"),
    "There is no task 'three'": ("-o", "model.onnx", "--task", "three"),
    "There is no task 'four'": ("-o", "m.onnx", "--data", "four=colours.npz"),
    "colours.npz: which of the tasks one, two is": ("-o", "m.onnx", "--data", "colours.npz"),
    "gone.npz does not exist": ("-o", "model.onnx", "--data", "one=gone.npz"),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_mistake_is_one_sentence_before_any_work(
    sentence: str, work: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_trace(monkeypatch)
    (work / "folder.onnx").mkdir()
    capsys.readouterr()
    assert run("bundle", *REFUSED[sentence], "--json") == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert json.loads(said.out) == {"error": said.err.strip()}
    assert run("gone", "-o", "model.onnx") == 2
    assert "gone" in capsys.readouterr().err


def test_a_missing_extra_is_named(
    work: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert run("bundle", "-o", "model.onnx") == 2
    assert "install the extra with pip install 'engram-vit[export]'" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_a_sentence(work: Path, capsys: Output) -> None:
    (work / "locked").mkdir(mode=0o500)
    assert run("bundle", "-o", "locked/model.onnx") == 2
    assert "cannot be written (Permission denied)" in capsys.readouterr().err


@pytest.mark.parametrize("more", [(), ("--int8",)])
def test_a_full_disk_leaves_what_was_there(more: tuple[str, ...], work: Path, nursery: Any) -> None:
    """A limit on the size of files stands for the disk."""
    (work / "model.onnx").write_bytes(b"what was there")
    before = sorted(path.name for path in work.iterdir())
    done = nursery.run(
        "export", "bundle", "-o", "model.onnx", "--overwrite", *more, cwd=work, fsize=20_000
    )
    assert done.code == 2, done.stderr
    assert "model.onnx cannot be written (File too large)" in done.stderr
    assert (work / "model.onnx").read_bytes() == b"what was there"
    assert sorted(path.name for path in work.iterdir()) == before
