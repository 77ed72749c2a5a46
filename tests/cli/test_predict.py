"""`engram predict --out`: a table of answers, as a user asks for it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.engrams import familiar

from engram import MemoryViT, load_backbone
from engram.cli.main import main


@pytest.fixture
def task(small_backbone: Path, tmp_path: Path) -> Path:
    model = MemoryViT(load_backbone(small_backbone))
    model.add_task("colours", ["red", "green"])
    return model.save("colours", tmp_path / "colours.safetensors")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    for i in range(3):
        pixels = np.full((8, 8, 3), 80 * i, np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{i}.png")
    return tmp_path / "photos"


def test_answers_go_to_a_file(
    task: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.jsonl"
    (photos / "1.png").write_bytes(b"")
    command = ["predict", str(task), str(photos), "--out", str(out), "--decoders", "0"]
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["images"], document["errors"]) == (3, 1)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [Path(row["image"]).name for row in rows] == ["0.png", "1.png", "2.png"]
    assert "error" in rows[1]
    assert {answer["class"] for answer in rows[0]["colours.top"]} == {"red", "green"}
    assert main(command) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    assert "1; the column error says why" in capsys.readouterr().out


def test_familiarity_is_a_column(
    small_backbone: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = MemoryViT(load_backbone(small_backbone))
    familiar(model.add_task("colours", ["red", "green"]))
    task = str(model.save("colours", tmp_path / "colours.safetensors"))
    assert main(["predict", task, str(photos), "--json"]) == 0
    expected = [one["familiarity"]["colours"] for one in json.loads(capsys.readouterr().out)]
    assert main(["predict", task, str(photos)]) == 0
    shown = capsys.readouterr().out
    assert "familiarity" in shown
    assert all(f"{value:.2f}" in shown for value in expected)
    assert shown.count("1 is usual") == 1
    out = tmp_path / "answers.jsonl"
    assert main(["predict", task, str(photos), "--out", str(out), "--decoders", "0"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["colours.familiarity"] for row in rows] == pytest.approx(expected, abs=1e-3)


def test_a_task_of_too_few_images_says_why_it_has_no_familiarity(
    small_backbone: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = MemoryViT(load_backbone(small_backbone))
    model.add_task("colours", ["red", "green"])
    for statistics, said in (("on", 1), ("off", 0)):
        file = tmp_path / f"{statistics}.safetensors"
        model.save("colours", file, recipe={"statistics": statistics})
        assert main(["predict", str(file), str(photos)]) == 0
        assert capsys.readouterr().out.count("too few images") == said


def test_mistakes_are_sentences(
    task: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, sentence in (
        ([str(task), str(photos), "--logits"], "--logits needs --out"),
        ([str(task), str(photos), "--overwrite"], "--overwrite needs --out"),
        ([str(task), str(photos), "--on", "ray"], "--on needs --out"),
        ([str(task), "-o", str(tmp_path / "a.csv")], "No image was given"),
        ([str(task), str(photos), "-o", str(tmp_path / "a.xlsx")], ".parquet, .jsonl or .csv"),
        ([str(task), str(tmp_path / "no.tar"), "-o", str(tmp_path / "a.csv")], "cannot be read"),
    ):
        assert main(["predict", *arguments]) == 2
        assert sentence in capsys.readouterr().err


def test_paths_come_from_standard_input_and_a_folder_keeps_the_parts(
    task: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = "\n".join(map(str, sorted(photos.iterdir())))
    monkeypatch.setattr("sys.stdin", io.StringIO(listing))
    out = tmp_path / "answers"
    assert main(["predict", str(task), "-", "-o", str(out), "--decoders", "0"]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "_job.json",
        "_lock",
        "part-000000.parquet",
    ]


def test_mistakes_about_a_cluster_are_sentences(
    task: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "a.parquet")
    for arguments, sentence in (
        (["--actors", "2"], "--actors needs --on"),
        (["--gpus-per-actor", "0.5"], "--gpus-per-actor needs --on"),
        (["--on", "ray", "--timeout", "0"], "--timeout is 0"),
        (["--on", "ray", "--device", "cuda"], "--gpus-per-actor"),
        (["--on", "127.0.0.1:1", "--backbone", "gone"], "No Ray cluster answers at 127.0.0.1:1"),
        (["--on", "somewhere"], "--on is 'somewhere'"),
    ):
        assert main(["predict", str(task), str(photos), "-o", out, *arguments]) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert "Traceback" not in error


@pytest.mark.parametrize("engine", ["onnx", "openvino"])
def test_another_engine_answers_as_the_model_does(
    engine: str, task: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime" if engine == "onnx" else engine)
    command = ["predict", str(task), str(photos), "--json"]

    def answers() -> list[float]:
        images = json.loads(capsys.readouterr().out)
        return [one["probability"] for image in images for one in image["tasks"]["colours"]]

    assert main(command) == 0
    expected = answers()
    assert main([*command, "--engine", engine]) == 0
    assert answers() == pytest.approx(expected, abs=0.01)
    out = tmp_path / "answers.jsonl"
    bulk = [*command[:-1], "--out", str(out), "--decoders", "0", "--engine", engine, "--embed"]
    assert main(bulk) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    found = [one["probability"] for row in rows for one in row["colours.top"]]
    assert found == pytest.approx(expected, abs=0.01)
    assert all("colours.embedding" in row for row in rows)
    assert main([*command, "--engine", engine, "--precision", "bf16"]) == 2
    assert "--precision" in capsys.readouterr().out
