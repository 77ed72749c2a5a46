"""`engram suggest`: a list, a contact sheet and folders, from every source of images."""

from __future__ import annotations

import csv
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.commands import Output, assert_refused, document, run
from tests.support.engrams import familiar

from engram import MemoryViT, load_backbone

QUICK = ("--decoders", 0)


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_backbone: Path) -> Path:
    """Eight images, one of them twice, and a broken one; an engram of two classes."""
    monkeypatch.chdir(tmp_path)
    Path("pool/more").mkdir(parents=True)
    random = np.random.default_rng(0)
    for i in range(8):
        pixels = random.integers(0, 255, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(f"pool/{'more/' if i > 5 else ''}{i}.png")
    shutil.copy("pool/3.png", "pool/copy.png")
    Path("pool/broken.png").write_bytes(b"no image")
    model = MemoryViT(load_backbone(small_backbone))
    task = familiar(model.add_task("colours", ["red", "green"]))
    task.head.weight.data.normal_()
    model.save("colours", "colours.safetensors")
    return tmp_path


def test_suggestions_are_different_and_written_as_asked(
    pool: Path, small_backbone: Path, capsys: Output
) -> None:
    command = ("suggest", "pool", "--task", "colours.safetensors", "-n", 20, *QUICK)
    outputs = ("-o", "next.csv", "-o", "next.txt", "-o", "next.html", "--folders", "sort")
    assert run(*command, *outputs, "--json") == 0
    found = document(capsys)
    assert (found["images"], found["task"]) == (9, "colours")
    assert list(found["unreadable"]) == ["pool/broken.png"]
    names = [row["image"] for row in found["suggested"]]
    assert len(names) == len(set(names)) == 8
    (twice,) = [row for row in found["suggested"] if row["copies"]]
    assert (twice["image"], twice["copies"]) in {("pool/3.png", 1), ("pool/copy.png", 1)}
    assert all(0 <= row["uncertainty"] <= 1 for row in found["suggested"])
    assert all(isinstance(row["familiarity"], float) for row in found["suggested"])
    assert Path("next.txt").read_text().splitlines() == names
    with open("next.csv", newline="") as file:
        assert [row["image"] for row in csv.DictReader(file)] == names
    page = Path("next.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("data:image/") == 8
    assert {p.name for p in Path("sort").iterdir() if p.is_dir()} == {"red", "green"}
    copied = sorted(p.read_bytes() for p in Path("sort").glob("*.png"))
    assert copied == sorted(Path(name).read_bytes() for name in names)

    # Sorted, they are training data, and not suggested again.
    for i, path in enumerate(sorted(Path("sort").glob("*.png"))):
        if i < 7:
            path.rename(path.parent / ("red" if i % 2 else "green") / path.name)
    fit = ("fit", "sort", "--task", "new", "--backbone", small_backbone, "--regime", "head")
    assert run(*fit, "-o", "new.safetensors", "--workers", 0, "--json") == 0
    capsys.readouterr()
    assert run(*command, "--labelled", "sort", "--folders", "sort") == 2
    assert "already" in capsys.readouterr().err


def test_every_source_gives_the_same_images(pool: Path, capsys: Output) -> None:
    Path("pool/broken.png").unlink()
    with tarfile.open("pool.tar", "w") as archive:
        archive.add("pool")
    names = sorted(str(path) for path in Path("pool").rglob("*.png"))
    Path("list.txt").write_text("\n".join(names))
    Path("list.csv").write_text("image\n" + "\n".join(names))
    command = ("--task", "colours.safetensors", "-n", 4, *QUICK, "--json")
    found = {}
    for source in ("pool", "pool.tar", "list.txt", "list.csv"):
        assert run("suggest", source, *command, "--folders", f"{source}.sorted") == 0
        rows = document(capsys)["suggested"]
        found[source] = [(Path(row["image"]).name, row["uncertainty"]) for row in rows]
        copied = {path.name for path in Path(f"{source}.sorted").glob("*.png")}
        assert copied == {name for name, _ in found[source]}
    assert len(set(map(tuple, found.values()))) == 1


def test_a_list_in_another_folder_is_read_from_there(pool: Path, capsys: Output) -> None:
    Path("lists").mkdir()
    command = ("suggest", "pool", "--task", "colours.safetensors", "-n", 4, *QUICK)
    assert run(*command, "-o", "lists/next.txt", "-o", "lists/next.csv") == 0
    for name in ("lists/next.txt", "lists/next.csv"):
        capsys.readouterr()
        out = f"{name}.jsonl"
        assert run("predict", "colours.safetensors", name, "--out", out, *QUICK, "--json") == 0
        found = document(capsys)
        assert (found["images"], found["errors"]) == (4, 0)


def test_without_a_task_the_backbone_chooses(
    pool: Path, small_backbone: Path, capsys: Output
) -> None:
    assert run("suggest", "pool", "--backbone", small_backbone, "-n", 3, *QUICK) == 0
    said = capsys.readouterr().out
    assert "3 images" in said
    assert "no task" in said


def test_a_regression_is_asked_for_different_images(
    pool: Path, small_backbone: Path, capsys: Output
) -> None:
    model = MemoryViT(load_backbone(small_backbone))
    model.add_task("age", ["years"], kind="regression")
    model.save("age", "age.safetensors")
    assert run("suggest", "pool", "--task", "age.safetensors", "-n", 3, *QUICK) == 0
    assert "regression" in capsys.readouterr().out
    code = run("suggest", "pool", "--task", "age.safetensors", "--folders", "x", "--json")
    assert_refused("one class", code, capsys)


def test_refusals_are_sentences(pool: Path, capsys: Output) -> None:
    Path("empty").mkdir()
    Path("file.html").write_text("not a page")
    task = ("--task", "colours.safetensors", "--json", *QUICK)
    wrong = {
        "no images in empty": ("suggest", "empty", *task),
        "No image can be read": ("suggest", "gone.png", *task),
        "gone": ("suggest", "gone/", *task),
        "at least 1": ("suggest", "pool", *task, "-n", 0),
        ".csv": ("suggest", "pool", *task, "-o", "next.xlsx"),
        "not an HTML page": ("suggest", "pool", *task, "-o", "file.html"),
        "--backbone": ("suggest", "pool", "--json"),
        "nothing.safetensors": ("suggest", "pool", "--task", "nothing.safetensors", "--json"),
        "nowhere": ("suggest", "pool", *task, "--labelled", "nowhere"),
    }
    for sentence, command in wrong.items():
        assert_refused(sentence, run(*command), capsys)
    assert not Path("sort").exists()


def test_drift_compares_two_tables_of_predict(pool: Path, capsys: Output) -> None:
    predict = ("predict", "colours.safetensors", "pool", "--decoders", 0, "--out")
    assert run(*predict, "a.jsonl") == 0
    assert run(*predict, "b.csv") == 0
    capsys.readouterr()
    assert run("drift", "a.jsonl", "b.csv", "-o", "drift.html", "--fail", "--json") == 0
    found = document(capsys)
    assert found["drift"] == []
    assert {one["name"] for one in found["comparisons"]} == {"familiarity", "confidence", "answers"}
    assert {one["size"] for one in found["comparisons"]} == {0.0}
    assert found["tables"]["new"] == {"path": "b.csv", "rows": 10, "unreadable": 1}
    page = Path("drift.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("data:image/") == 9  # the least familiar


def test_drift_fails_where_it_is_asked_to(pool: Path, capsys: Output) -> None:
    for name, best in (("a", "red"), ("b", "green")):
        rows = [
            {"image": f"{i}.png", "colours": best, "colours.top": [], "colours.probability": 0.9}
            for i in range(50)
        ]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run("drift", "a.jsonl", "b.jsonl", "-o", "drift.html") == 0
    said = capsys.readouterr().out
    assert "no familiarity of colours" in said
    assert "red 100.0% → 0.0%" in said
    assert run("drift", "a.jsonl", "b.jsonl", "--fail", "--json") == 1
    assert document(capsys)["drift"] == ["colours"]
    assert "50 of 50 images" in Path("drift.html").read_text()
    assert_refused("from 0 to 1", run("drift", "a.jsonl", "b.jsonl", "--size", 2, "--json"), capsys)
