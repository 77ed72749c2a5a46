"""eval and predict at the command line: what they print and how they refuse."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.commands import Output, assert_refused, document, fit, run
from tests.support.regimes import known
from tests.support.strategies import scatter

from engram import MemoryViT, load_backbone
from engram.errors import Notice

# eval


def test_eval_measures_tasks_together_as_alone(work: Path, capsys: Output) -> None:
    assert fit() == 0
    capsys.readouterr()
    both = ("--data", "old=colours.npz", "--data", "new=colours.npz", "--workers", 0, "--json")
    assert run("eval", "old.safetensors", "new.safetensors", *both) == 0
    together = document(capsys)
    assert list(together) == ["old", "new"]
    for name in ("old", "new"):
        assert (
            run("eval", f"{name}.safetensors", "--data", "colours.npz", "--workers", 0, "--json")
            == 0
        )
        alone = document(capsys)[name]
        assert alone["images"] == together[name]["images"] == 21
        assert alone["accuracy"] == together[name]["accuracy"]
        assert alone["loss"] == pytest.approx(together[name]["loss"], abs=1e-5)
    keys = {"accuracy", "balanced_accuracy", "images", "loss"}
    keys |= {"macro_f1", "ece", "split", "unreadable"}
    assert set(together["new"]) == keys
    assert run("eval", "old.safetensors", "--data", "colours.npz", "--split", "train") == 0
    assert "60" in capsys.readouterr().out
    assert run("eval", "new.safetensors", "--data", "colours.npz", "--workers", 0) == 0
    assert f"{together['new']['accuracy']:.2%}" in capsys.readouterr().out  # as `fit` prints it


def test_every_task_is_measured_on_its_own_split(work: Path, capsys: Output) -> None:
    model = MemoryViT(load_backbone("vit"))
    model.add_task("other", ["red", "green", "blue"], 2, seed=1)
    model.save("other", "other.safetensors")
    data = ("--data", "old=colours.npz:train", "--data", "other=colours.npz", "--workers", 0)
    assert run("eval", "old.safetensors", "other.safetensors", *data, "--json") == 0
    metrics = document(capsys)
    assert [metrics["old"]["split"], metrics["other"]["split"]] == ["train", "test"]
    assert [metrics["old"]["images"], metrics["other"]["images"]] == [60, 21]


def test_eval_names_the_split_that_there_is(work: Path, capsys: Output) -> None:
    for split in ("train", "val"):
        for name in ("red", "green", "blue"):
            (work / "photos" / split / name).mkdir(parents=True)
            Image.new("RGB", (16, 16), name).save(work / "photos" / split / name / "0.png")
    command = ("eval", "old.safetensors", "--data", "photos", "--workers", 0, "--json")
    sentence = "photos has no test split; it has train and val. Choose with --split val"
    assert_refused(sentence, run(*command), capsys)
    assert run(*command, "--split", "val") == 0
    assert document(capsys)["old"]["images"] == 3


def test_eval_says_that_data_without_splits_is_no_test(work: Path, capsys: Output) -> None:
    for name in ("red", "green", "blue"):
        (work / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (16, 16), name).save(work / "photos" / name / "0.png")
    with pytest.warns(Notice, match="photos has no splits, .* 3 images"):
        assert run("eval", "old.safetensors", "--data", "photos", "--workers", 0, "--json") == 0
    assert document(capsys)["old"]["images"] == 3


def test_eval_finds_labels_in_the_column_that_is_named(work: Path, capsys: Output) -> None:
    Path("table.csv").write_text("path,split,colour\nred.png,test,red\n")
    command = ("eval", "old.safetensors", "--data", "table.csv", "--workers", 0, "--json")
    assert run(*command) == 2
    assert "has no column 'label'" in capsys.readouterr().err
    assert run(*command, "--label", "colour") == 0
    assert document(capsys)["old"]["images"] == 1


def test_eval_finds_images_and_splits_in_the_columns_that_are_named(
    work: Path, capsys: Output
) -> None:
    rows = ["photo;label;fold;stage", "red.png;red;test;train", "red.png;red;train;test"]
    Path("table.csv").write_text("\n".join([*rows, "red.png;red;train;test"]))
    command = ("eval", "old.safetensors", "--data", "table.csv", "--workers", 0, "--json")
    assert_refused("--image-column", run(*command), capsys)
    columns = ("--image-column", "photo")
    assert_refused("--split-column fold", run(*command, *columns), capsys)
    assert run(*command, *columns, "--split-column", "stage") == 0
    assert document(capsys)["old"]["images"] == 2


def test_paths_may_have_an_equals_sign(work: Path, capsys: Output) -> None:
    (work / "lr=0.1").mkdir()
    (work / "old.safetensors").rename("lr=0.1/old.safetensors")
    os.symlink(work / "colours.npz", "set=a.npz")
    for number, text in enumerate(("lr=0.1/old.safetensors", "old=lr=0.1/old.safetensors")):
        assert fit("--extends", text, out=f"{number}.safetensors") == 0
    capsys.readouterr()
    for text in ("set=a.npz", "old=set=a.npz"):
        command = ("eval", "lr=0.1/old.safetensors", "--data", text, "--workers", 0, "--json")
        assert run(*command) == 0
        assert document(capsys)["old"]["images"] == 21


def test_eval_counts_bad_files_unless_told_otherwise(work: Path, capsys: Output) -> None:
    rng = np.random.default_rng(0)
    for name in ("red", "green", "blue"):
        (work / "photos" / "test" / name).mkdir(parents=True)
        for i in range(2):
            pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(work / "photos" / "test" / name / f"{i}.png")
    bad = Path("photos") / "test" / "red" / "bad.png"
    bad.write_bytes(b"")
    command = ("eval", "old.safetensors", "--data", "old=photos", "--workers", 0, "--json")
    assert run(*command) == 0
    assert (said := document(capsys)["old"])["images"] == 7
    assert said["unreadable"] == [str(bad)]
    assert run(*command, "--skip-bad") == 0
    assert document(capsys)["old"]["images"] == 6


def test_eval_compares_two_versions_by_class_and_by_image(work: Path, capsys: Output) -> None:
    model = MemoryViT(load_backbone("vit"))
    task = model.add_task("old", ["red", "green", "blue"], regime="head")
    with torch.no_grad():
        task.head.weight.zero_()
    for name, best in (("red", 0), ("blue", 2)):  # one answer for all images
        with torch.no_grad():
            task.head.bias.copy_(torch.eye(3)[best])
        model.save("old", f"{name}.safetensors")
    command = ("eval", "blue.safetensors", "--data", "colours.npz", "--workers", 0)
    assert run(*command, "--against", "red.safetensors", "--json") == 0
    found = document(capsys)["old"]["against"]
    assert found["classes"]["red"] == {"before": 1.0, "after": 0.0}
    assert found["classes"]["blue"] == {"before": 0.0, "after": 1.0}
    assert found["classes"]["green"] == {"before": 0.0, "after": 0.0}
    assert (found["mended"], found["broken"], len(found["changed"])) == (7, 7, 21)
    change = found["changed"][0]
    assert (change["before"], change["after"]) == ("red", "blue")
    assert found["before"]["accuracy"] == pytest.approx(1 / 3)
    assert run(*command, "--against", "red.safetensors") == 0
    assert "7 mended, 7 broken of 21 changed" in (said := capsys.readouterr().out)
    assert "-100.00%" in said
    assert run(*command, "--against", "blue.safetensors", "--json") == 0
    assert document(capsys)["old"]["against"]["changed"] == []


# predict


def test_predict_prints_one_object_for_each_image(work: Path, capsys: Output) -> None:
    (work / "more").mkdir()
    for name in ("b.png", "a.png"):
        Image.new("RGB", (16, 16)).save(work / "more" / name)
    (work / "more" / "notes.txt").write_text("no image")
    (work / "more" / "._a.png").write_text("what macOS leaves beside a file")
    assert run("predict", "old.safetensors", "red.png", "more", "--top-k", 2, "--json") == 0
    said = document(capsys)
    assert [one["image"] for one in said] == ["red.png", "more/a.png", "more/b.png"]
    for one in said:
        assert set(one) == {"image", "tasks"}
        assert list(one["tasks"]) == ["old"]
        assert len(one["tasks"]["old"]) == 2
        assert set(one["tasks"]["old"][0]) == {"class", "probability"}
    assert run("predict", "old.safetensors", "red.png", "--task", "old") == 0
    table = capsys.readouterr().out
    assert "red.png" in table
    assert "%" in table
    assert run("predict", "red.png", "--backbone", "vit", "--json") == 0
    assert list(document(capsys)[0]["tasks"]) == ["base"]


def test_side_patches_and_readouts_are_measured_and_answer(work: Path, capsys: Output) -> None:
    model = MemoryViT(load_backbone("vit"))
    names = {"thin": "side", "layers": "readout", "both": "side+readout"}
    for seed, (name, regime) in enumerate(names.items()):
        settings = known(regime, cells=2, rank=4)
        task = model.add_task(name, ["red", "green", "blue"], regime=regime, seed=seed, **settings)
        scatter(task, by=0.3, seed=seed)
        model.save(name, f"{name}.safetensors")
    files = [f"{name}.safetensors" for name in names]
    data = [part for name in names for part in ("--data", f"{name}=colours.npz")]
    assert run("eval", *files, *data, "--workers", 0, "--json") == 0
    together = document(capsys)
    for name, measured in together.items():
        only = ("--data", "colours.npz", "--workers", 0, "--json")
        assert run("eval", f"{name}.safetensors", *only) == 0
        assert document(capsys)[name]["loss"] == pytest.approx(measured["loss"], abs=1e-5)
    assert run("predict", "old.safetensors", *files, "red.png", "--json") == 0
    (answer,) = document(capsys)
    assert list(answer["tasks"]) == ["old", *names]
    assert all(len(answer["tasks"][name]) == 3 for name in names)


def test_predict_names_what_is_no_image_and_answers_the_rest(work: Path, capsys: Output) -> None:
    (work / "text.png").write_text("not a picture")
    assert run("predict", "old.safetensors", "text.png", "red.png", "gone.png", "--json") == 2
    text, red, gone = document(capsys)
    assert text == {"image": "text.png", "error": "text.png: not an image that can be read"}
    assert set(red) == {"image", "tasks"}
    assert gone["error"] == "gone.png: the file does not exist"
    assert run("predict", "old.safetensors", "text.png") == 2
    assert "not an image" in capsys.readouterr().out


# How they refuse


EVAL = ("eval", "old.safetensors", "--data", "colours.npz")
PREDICT = ("predict", "old.safetensors", "red.png")
REFUSED = {
    "there is data for 'old' already": (*EVAL, "--data", "old=colours.npz"),
    "--batch is 0; it must be at least 1": (*EVAL, "--batch", "0"),
    "--workers is -1; it must be at least 0": (*EVAL, "--workers", "-1"),
    "page.html cannot be written (No such": (*EVAL, "--report", "gone/page.html"),
    "folder cannot be written (it is a folder)": (*EVAL, "--report", "folder"),
    "old.safetensors exists and is not an HTML page": (*EVAL, "--report", "old.safetensors"),
    "/dev/null cannot be written (it is not a regular file)": (*EVAL, "--report", "/dev/null"),
    "which is none of the 3 classes": ("eval", "old.safetensors", "--data", "old=digits"),
    "There is no task 'flowers'": ("eval", "old.safetensors", "--data", "flowers=colours.npz"),
    "has no val split": (*EVAL, "--split", "val"),
    "no split 'any'": (*EVAL, "--split", "any"),
    "gone.safetensors cannot be": ("eval", "gone.safetensors", "--data", "colours.npz"),
    "No engram was given": ("predict", "red.png"),
    "lost.safetensors cannot be read": ("predict", "lost.safetensors", "red.png"),
    "No image was given": ("predict", "old.safetensors"),
    "--device is 'tpu', but PyTorch finds only cpu": (*EVAL, "--device", "tpu"),
    "--precision is 'int8'; it can be fp32, bf16, fp16": (*EVAL, "--precision", "int8"),
    "backbone can be in fp32 or bf16, not in 'int8'.": (*PREDICT, "--backbone-dtype", "int8"),
    "--device is 'cuda:99', but": (*PREDICT, "--device", "cuda:99"),
    "--top-k is 0; it must be a whole number, at least 1": (*PREDICT, "--top-k", "0"),
    "There is no task 'young'": (*PREDICT, "--task", "young"),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    sentence: str, work: Path, capsys: Output
) -> None:
    (work / "folder").mkdir()
    assert_refused(sentence, run(*REFUSED[sentence], "--json"), capsys)
