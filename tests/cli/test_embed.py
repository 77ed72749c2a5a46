"""embed at the command line: the files it writes, what it prints and how it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from tests.support.commands import Output, assert_refused, document, run

from engram import embed, load_model

QUICK = ("--workers", 0, "--json")


def test_both_files_hold_the_vectors_of_the_model(work: Path, capsys: Output) -> None:
    whole = embed(load_model("old.safetensors", "vit"), "colours.npz", workers=0)
    for out in ("v.npz", "v.parquet"):
        given = ("--engram", "old.safetensors", "--backbone", "vit", "--batch", 16)
        assert run("embed", "colours.npz", "-o", out, *given, *QUICK) == 0
        summary = document(capsys)
        widths = {name: rows.shape[1] for name, rows in whole.vectors.items()}
        assert summary["vectors"] == widths
        assert (summary["images"], summary["path"], summary["unreadable"]) == (81, out, {})
    archive = np.load("v.npz", allow_pickle=False)
    table = pyarrow.parquet.read_table("v.parquet")
    assert table.column_names == list(archive) == ["path", "split", "label", "base", "old"]
    assert (
        str(table.schema.field("old").type) == f"fixed_size_list<element: float>[{widths['old']}]"
    )
    for name, texts in (("path", whole.images), ("split", whole.splits), ("label", whole.labels)):
        assert archive[name].tolist() == table[name].to_pylist() == list(texts)
    for name, rows in whole.vectors.items():
        assert archive[name].dtype == np.float32
        assert np.allclose(archive[name], rows, atol=1e-5)
        assert np.array_equal(np.array(table[name].to_pylist(), np.float32), archive[name])


def test_a_folder_without_engrams_gets_the_vectors_of_the_backbone(
    work: Path, capsys: Output
) -> None:
    (work / "album").mkdir()
    for i in range(3):
        Image.new("RGB", (20, 16), (90 * i, 50, 60)).save(work / "album" / f"{i}.png")
    (work / "album" / "bad.png").write_bytes(b"")
    assert run("embed", "album", "red.png", "-o", "v.npz", "--backbone", "vit", "--workers", 0) == 0
    printed = capsys.readouterr().out
    assert "unreadable  1, left out: album/bad.png: the file is empty" in printed
    with np.load("v.npz") as archive:
        assert list(archive) == ["path", "split", "label", "base"]
        paths = [f"album/{i}.png" for i in range(3)]
        assert archive["path"].tolist() == [*paths, "red.png"]
        assert archive["base"].shape == (4, 32)


def test_without_a_backbone_the_backbone_suits_the_size_of_the_images(
    work: Path, capsys: Output
) -> None:
    assert run("embed", "red.png", "-o", "v.npz", *QUICK) == 0
    assert document(capsys)["backbone"] == "pico"  # for 20 x 16 pixels


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("red.png", "-o", "v.csv"), "v.csv is no file for vectors"),
        (("nowhere", "-o", "v.npz"), "nowhere does not exist"),
        (("red.png", "-o", "nowhere/v.npz"), "nowhere/v.npz cannot be written"),
        (("red.png", "-o", "v.npz", "--task", "nobody"), "There is no task 'nobody'"),
        (("empty.png", "-o", "v.npz"), "No image can be read"),
    ],
)
def test_what_cannot_be_embedded_is_a_sentence_and_leaves_the_old_file(
    work: Path, capsys: Output, command: tuple[str, ...], sentence: str
) -> None:
    Path("empty.png").write_bytes(b"")
    Path("v.npz").write_bytes(b"old")
    code = run("embed", *command, "--backbone", "vit", *QUICK)
    assert_refused(sentence, code, capsys)
    assert Path("v.npz").read_bytes() == b"old"
    assert not [name for name in os.listdir() if name.endswith(".tmp")]
