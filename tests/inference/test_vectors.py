"""Files of vectors: batch by batch, whole or not at all, and nothing in them runs."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from engram import EngramError
from engram.inference.embed import Embeddings
from engram.inference.vectors import check_names, check_vector_file, vector_file

PARTS = [
    Embeddings(("a", "ä\n"), ("train",) * 2, ("x", ""), {"base": np.eye(2, 3, dtype=np.float32)}),
    Embeddings(("c",), ("test",), ("y",), {"base": np.full((1, 3), 0.1, np.float32)}),
]
ROWS = np.concatenate([part.vectors["base"] for part in PARTS])


@pytest.mark.parametrize("name", ["v.npz", "v.parquet", "V.NPZ"])
def test_batches_are_one_file_in_their_order(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with vector_file(path) as add:
        for part in PARTS:
            add(part)
        assert not path.exists()
    if path.suffix.lower() == ".npz":
        with np.load(path, allow_pickle=False) as archive:
            found = {key: archive[key] for key in archive}
    else:
        table = pyarrow.parquet.read_table(path)
        found = {key: np.array(table[key].to_pylist()) for key in table.column_names}
    assert list(found) == ["path", "split", "label", "base"]
    assert found["path"].tolist() == ["a", "ä\n", "c"]
    assert found["split"].tolist() == ["train", "train", "test"]
    assert found["label"].tolist() == ["x", "", "y"]
    assert np.array_equal(found["base"].astype(np.float32), ROWS)


@pytest.mark.parametrize("name", ["v.npz", "v.parquet"])
def test_work_that_fails_leaves_the_old_file(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, late = tmp_path / name, list[object]()
    monkeypatch.setattr(sys, "unraisablehook", late.append)
    path.write_bytes(b"old")

    def interrupted() -> None:
        with vector_file(path) as add:
            add(PARTS[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    gc.collect()
    assert late == []
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == [name]


def test_a_file_that_cannot_hold_vectors_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(EngramError, match=r"v.csv is no file for vectors"):
        check_vector_file(Path("v.csv"))
    with pytest.raises(EngramError, match="'label' has the name"):
        check_names(["base", "label"])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(EngramError, match=r"pip install .*pyarrow"):
        check_vector_file(Path("v.parquet"))


@pytest.mark.parametrize("name", ["v.npz", "v.parquet"])
def test_names_of_images_may_be_no_utf8(tmp_path: Path, name: str) -> None:
    with vector_file(tmp_path / name) as add:
        add(Embeddings(("\udcff.png",), ("",), ("",), {"base": ROWS[:1]}))
    if name == "v.npz":
        names = np.load(tmp_path / name)["path"].tolist()
    else:
        names = pyarrow.parquet.read_table(tmp_path / name)["path"].to_pylist()
    assert names == ["\\udcff.png"]
