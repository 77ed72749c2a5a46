"""inspect, compose, merge and convert at the command line."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from tests.support.commands import Output, run

import engram
from engram import MemoryViT
from engram.backbones.load import load_backbone
from engram.store.bundles import read_bundle


def test_inspect_says_what_an_engram_is(folder: Path, capsys: Output) -> None:
    assert run("inspect", "flowers.safetensors") == 0
    said = capsys.readouterr().out
    header = engram.inspect("flowers.safetensors")
    for expected in (
        "flowers",
        "classification",
        "2 classes (rose, tulip)",
        "masked, cells per layer 3",
        "146, 34 of them in the head",
        "kMAC per image",
        "% of the backbone's",
        "backbone  ",
        header.backbone.fingerprint,
        "16 x 16, squashed, bicubic",
        "accuracy 91.25%",
        "lr 0.01",
        header.created,
        header.content,
    ):
        assert expected in said


def test_merge_writes_the_average_and_shows_what_it_is_of(folder: Path, capsys: Output) -> None:
    model = MemoryViT(load_backbone(folder / "backbone"))
    model.add_task("flowers", classes=["rose", "tulip"], cells=3)
    model.save("flowers", "again.safetensors")
    files = ("flowers.safetensors", "again.safetensors")
    assert run("merge", *files, "--weights", "0.4,0.6", "-o", "both.safetensors", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [source["weight"] for source in document["recipe"]["merged"]] == [0.4, 0.6]
    assert document["content"] == engram.inspect("both.safetensors").content
    assert run("merge", *files, "-o", "both.safetensors") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert run("merge", *files, "--weights", "1,1", "-o", "more.safetensors") == 2
    assert "--weights is 1, 1, which is 2 together" in " ".join(capsys.readouterr().err.split())
    assert run("merge", *files, "-o", "both.pt") == 2
    assert "both.safetensors" in capsys.readouterr().err
    assert not Path("both.pt").exists()


def test_inspect_needs_no_backbone(folder: Path, capsys: Output) -> None:
    (folder / "backbone" / "model.safetensors").unlink()
    assert run("inspect", "roses.safetensors") == 0
    assert "extends flowers" in " ".join(capsys.readouterr().out.split())


def test_json_is_one_document(folder: Path, capsys: Output) -> None:
    assert run("inspect", "flowers.safetensors", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["what"] == "engram"
    assert document["task"]["classes"] == ["rose", "tulip"]
    assert document["parameters"] == 146
    assert document["costs"]["macs"] > 0
    assert document["content"] == engram.inspect("flowers.safetensors").content
    assert document["bytes"] == os.path.getsize("flowers.safetensors")


def test_compose_and_inspect_a_bundle(folder: Path, capsys: Output) -> None:
    arguments = ("compose", "roses.safetensors", "flowers.safetensors", "--backbone", "backbone")
    assert run(*arguments, "-o", "garden/", "--json") == 0
    composed = json.loads(capsys.readouterr().out)
    assert [e["task"] for e in composed["engrams"]] == ["flowers", "roses"]
    assert len(read_bundle("garden").engrams) == 2
    assert run("inspect", "garden", "--json") == 0
    assert json.loads(capsys.readouterr().out) == composed
    assert run("inspect", "garden") == 0
    said = capsys.readouterr().out
    assert re.search(r"roses +classification +7 +- +masked +cells 2, tokens 1 +flowers", said)


def test_side_patches_and_readouts_are_inspected_listed_and_composed(
    folder: Path, capsys: Output
) -> None:
    model = MemoryViT(load_backbone("backbone"))
    model.add_task("thin", classes=3, cells=2, regime="side", rank=4)
    model.add_task("finer", classes=3, cells=1, regime="side", rank=4, extends=["thin"])
    model.add_task("layers", classes=3, regime="readout")
    (folder / "new").mkdir()
    for name in model.tasks:
        model.save(name, f"new/{name}.safetensors")
    assert run("inspect", "new/finer.safetensors") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "side, cells per layer 1, rank of its side network 4, extends thin" in said
    assert run("list", "new", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["engrams"]
    assert {one["task"]: one["regime"] for one in listed} == {
        "finer": "side",
        "layers": "readout",
        "thin": "side",
    }
    paths = [f"new/{name}.safetensors" for name in ("finer", "layers", "thin")]
    assert run("compose", *paths, "flowers.safetensors", "--backbone", "backbone", "-o", "all") == 0
    capsys.readouterr()
    assert run("inspect", "all", "--json") == 0
    entries = json.loads(capsys.readouterr().out)["engrams"]
    sizes = {one["task"]: (one.get("rank"), one.get("layers")) for one in entries}
    assert sizes["thin"] == sizes["finer"] == (4, None)
    assert sizes["layers"] == (None, 3)
    assert sizes["flowers"] == (None, None)
    tasks = [one["task"] for one in entries]
    assert tasks.index("thin") < tasks.index("finer")


def test_inspect_a_backbone(folder: Path, capsys: Output) -> None:
    for source in ("backbone", "backbone/model.safetensors"):
        assert run("inspect", source, "--json") == 0
        document = json.loads(capsys.readouterr().out)
        assert document["what"] == "backbone"
        assert document["fingerprint"] == load_backbone("backbone").fingerprint
    assert run("inspect", "backbone") == 0
    assert "width 16, 2 layers" in capsys.readouterr().out


def test_what_a_file_says_cannot_write_to_the_terminal(folder: Path, capsys: Output) -> None:
    model = MemoryViT(load_backbone("backbone"))
    model.backbone.source = "evil\x1b[2J\nsource"
    model.add_task("t", classes=["\x1b]0;title\x07", "\u202e"])
    model.save("t", "t.safetensors")
    assert run("inspect", "t.safetensors") == 0
    assert run("inspect", "t.safetensors", "--json") == 0
    assert "\x1b" not in capsys.readouterr().out
    assert "\x1b" not in str(engram.inspect("t.safetensors"))


def test_convert(assets: Path, tmp_path: Path, capsys: Output) -> None:
    legacy = assets / "legacy"
    arguments = ("convert", legacy / "extended.pt", "--base", legacy / "base", "--names", "a,b")
    assert run(*arguments, "-o", tmp_path / "out", "--json") == 0
    first, second = json.loads(capsys.readouterr().out)["engrams"]
    assert first["file"] == str(tmp_path / "out" / "a.safetensors")
    assert second["task"]["extends"] == ["a"]
    assert run(*arguments, "-o", tmp_path / "out") == 0
    assert "b.safetensors" in capsys.readouterr().out


MISTAKES = [
    ("inspect", "missing.safetensors"),
    ("inspect", "."),
    ("inspect", "old.pt"),
    ("inspect", "text.safetensors"),
    ("compose", "roses.safetensors", "-o", "out"),
    ("compose", "flowers.safetensors", "-o", "."),
    ("compose", "flowers.safetensors", "-o", "out", "--backbone", "missing"),
    ("convert", "old.pt", "--base", "backbone", "-o", "out"),
    ("convert", "flowers.safetensors", "--base", "backbone", "-o", "out"),
]


@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_sentence(
    arguments: tuple[str, ...], folder: Path, capsys: Output
) -> None:
    torch.save({"a": 1}, "old.pt")
    Path("text.safetensors").write_text("no safetensors at all")
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.rstrip().endswith(".")
    assert run(*arguments, "--json") == 2
    assert json.loads(capsys.readouterr().out) == {"error": err.rstrip()}


def test_bundle_remove_takes_a_task_and_its_file_out(folder: Path, capsys: Output) -> None:
    assert run("compose", "roses.safetensors", "flowers.safetensors", "-o", "garden") == 0
    capsys.readouterr()
    for arguments, sentence in (
        (("garden", "flowers"), "'flowers' is extended by roses"),
        (("garden", "tulips"), "garden has no task 'tulips'"),
        (("backbone", "roses"), "backbone is not a bundle"),
    ):
        assert run("bundle", "remove", *arguments) == 2
        assert sentence in capsys.readouterr().err
    assert run("bundle", "remove", "garden", "roses", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert [entry["task"] for entry in said["engrams"]] == ["flowers"]
    assert [engram.spec.name for engram in read_bundle("garden").engrams] == ["flowers"]
    assert not Path("garden/roses.safetensors").exists()
    assert run("compose", "garden", "roses.safetensors", "-o", "garden") == 0  # adds it again
    assert len(read_bundle("garden").engrams) == 2
    assert run("compose", "flowers.safetensors", "-o", "garden") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert run("compose", "flowers.safetensors", "-o", "garden", "--overwrite") == 0
    assert run("bundle", "remove", "garden", "flowers") == 2
    assert "is the only task" in capsys.readouterr().err


def test_lists_and_bundles_say_how_good_tasks_are(folder: Path, capsys: Output) -> None:
    assert run("compose", "roses.safetensors", "flowers.safetensors", "-o", "garden") == 0
    assert "accuracy 91.25%" in " ".join(capsys.readouterr().out.split())
    assert run("list", ".") == 0
    assert "accuracy 91.25%" in " ".join(capsys.readouterr().out.split())
