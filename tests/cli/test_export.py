"""`engram export` measures tasks before and after, and refuses mistakes before any work."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.exports import refuse_to_trace, trace_once
from tests.support.strategies import scatter

import engram
from engram import MemoryViT, load_backbone, random_backbone, save_backbone
from engram.cli import main as cli
from engram.export import OnnxModel
from engram.images.preprocessing import Preprocessing
from engram.inference.engine import load_model

Output = pytest.CaptureFixture[str]


@pytest.fixture
def work(tmp_path: Path, colours: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle for a backbone of one layer: what an export takes grows with the layers."""
    monkeypatch.chdir(tmp_path)
    trace_once(monkeypatch)
    backbone = random_backbone(image_size=16, patch=4, width=32, depth=1, heads=2, classes=7)
    backbone.preprocessing = Preprocessing((16, 16), None)
    save_backbone(backbone, "vit")
    os.symlink(colours, "colours.npz")
    model = MemoryViT(load_backbone("vit"))
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
    result = json.loads(capsys.readouterr().out)
    assert result["file"] == "model.onnx"
    assert result["bytes"] == (work / "model.onnx").stat().st_size
    assert list(result["tasks"]) == ["base", "one", "two"]
    one = result["tasks"]["one"]
    assert one["before"]["images"] == one["after"]["images"] == 21
    right = engram.evaluate(
        load_model("bundle"), "colours.npz", "one", workers=0
    )  # and so before is what eval says
    assert one["before"]["accuracy"] == right["accuracy"]
    assert abs(one["after"]["accuracy"] - right["accuracy"]) < 0.2
    assert "before" not in result["tasks"]["two"]
    assert run(*command) == 2
    assert "model.onnx already exists" in capsys.readouterr().err
    assert run(*command, "--overwrite", "--task", "two") == 0
    printed = capsys.readouterr().out
    assert "ONNX, opset 20, int8" in printed
    assert "not measured; give --data NAME=DATA" in printed
    assert OnnxModel("model.onnx").tasks == ("two",)


def test_export_writes_what_torch_runs_alone(work: Path, capsys: Output) -> None:
    data = ("--data", "colours.npz:train", "--workers", 0)
    assert run("one.safetensors", "-o", "out/model.pt2", *data) == 0
    printed = capsys.readouterr().out
    assert "torch.export, float32" in printed
    assert " 60 " in printed  # images of the split behind the colon
    assert "+0.00%" in printed
    code = (
        "import sys, torch; program = torch.export.load('out/model.pt2').module();"
        "assert 'engram' not in sys.modules; print(*program(torch.rand(5, 3, 16, 16)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["base", "one"]


REFUSED = {
    "model.txt has the ending '.txt'; formats are onnx (.onnx), torch (.pt2)": ("-o", "model.txt"),
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
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert json.loads(printed.out) == {"error": printed.err.strip()}
    assert run("gone", "-o", "model.onnx") == 2
    assert "gone" in capsys.readouterr().err


def test_a_missing_extra_is_named(
    work: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert run("bundle", "-o", "model.onnx") == 2
    assert "pip install" in (said := capsys.readouterr().err)
    assert "onnxscript>=" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_a_sentence(work: Path, capsys: Output) -> None:
    (work / "locked").mkdir(mode=0o500)
    assert run("bundle", "-o", "locked/model.onnx") == 2
    assert "cannot be written (Permission denied)" in capsys.readouterr().err


@contextmanager
def file_size_limit(most: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("more", [(), ("--int8",)])
def test_a_full_disk_leaves_what_was_there(
    more: tuple[str, ...], work: Path, capsys: Output
) -> None:
    """A limit on the size of files stands for the disk."""
    (work / "model.onnx").write_bytes(b"what was there")
    before = sorted(path.name for path in work.iterdir())
    capsys.readouterr()
    with file_size_limit(20_000):
        assert run("bundle", "-o", "model.onnx", "--overwrite", *more) == 2
    assert "model.onnx cannot be written (File too large)" in capsys.readouterr().err
    assert (work / "model.onnx").read_bytes() == b"what was there"
    assert sorted(path.name for path in work.iterdir()) == before


def test_a_page_is_written_and_its_runtime_is_named(work: Path, capsys: Output) -> None:
    capsys.readouterr()
    assert run("bundle", "--web", "page", "--task", "one", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["format"], said["weights"], said["folder"]) == ("web", "float16", "page")
    assert "onnxruntime-web@" in said["runtime"]
    assert list(said["tasks"]) == ["one"]
    assert (work / "page" / "index.html").is_file()
    mistakes = {
        "--overwrite": ("--web", "page"),
        "one of them": (),
        "--runtime is for --web": ("-o", "a.onnx", "--runtime", "x"),
    }
    for words, arguments in mistakes.items():
        assert run("bundle", *arguments) == 2
        assert words in " ".join(capsys.readouterr().err.split())
