"""Vectors of files and datasets: the model's own, with path, split and label of each."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from engram import EngramError, MemoryViT, data, embed
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.inference.embed import Embeddings, check_names, check_vector_file, vector_file


def test_vectors_of_labelled_data_have_path_split_and_label(model: MemoryViT, photos: Path) -> None:
    found = embed(model, photos, batch=2, workers=0)
    assert list(found.vectors) == ["base", "colours"]
    assert len(found.images) == 9
    assert len(found.failed) == 3
    assert set(found.splits) == {"test"}
    assert [Path(path).parent.name for path in found.images] == list(found.labels)
    empty = str(photos / "test" / "red" / "empty.png")
    assert found.failed[empty] == f"{empty}: the file is empty"
    for i, path in enumerate(found.images):
        view = torch.from_numpy(evaluation_view(path, model.preprocessing))[None]
        own = model.embed(normalise(view, model.preprocessing))
        for name, vectors in found.vectors.items():
            assert vectors.dtype == np.float32
            assert np.allclose(vectors[i], own[name][0].detach().numpy(), atol=1e-5)


def test_images_need_no_labels(model: MemoryViT, photos: Path) -> None:
    folder = photos / "test" / "red"
    whole = embed(model, folder, tasks=["base"], workers=0)
    assert [Path(path).name for path in whole.images] == ["0.png", "1.png", "2.png"]
    assert whole.labels == whole.splits == ("", "", "")
    some = embed(model, [folder / "2.png", photos / "test" / "blue"], tasks=["base"], workers=0)
    assert [Path(path).name for path in some.images] == ["2.png", "0.png", "1.png", "2.png"]
    assert np.allclose(some.vectors["base"][0], whole.vectors["base"][2], atol=1e-6)
    assert len(embed(model, folder / "2.png", workers=0).images) == 1


def test_what_was_loaded_can_be_embedded(model: MemoryViT, photos: Path) -> None:
    splits = data.load(photos)
    whole, part = embed(model, splits, workers=0), embed(model, splits["test"], workers=0)
    assert whole.images == part.images
    unsplit = embed(model, data.load(photos / "test"), workers=0)
    assert set(unsplit.splits) == {""}
    assert set(unsplit.labels) == {"red", "green", "blue"}


def test_masks_are_no_labels_and_are_not_read(model: MemoryViT, tmp_path: Path) -> None:
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "images" / "a.png")
    Image.new("L", (16, 16)).save(tmp_path / "masks" / "a.png")
    splits = data.load(tmp_path, kind="segmentation", classes=["a"], values=[0])
    (tmp_path / "masks" / "a.png").unlink()
    assert embed(model, splits, workers=0).labels == ("",)


def test_nothing_to_embed_is_a_sentence(model: MemoryViT, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(EngramError, match="No image can be read"):
        embed(model, photos / "test" / "red" / "empty.png", workers=0)
    with pytest.raises(EngramError, match="No image was given"):
        embed(model, [], workers=0)
    with pytest.raises(EngramError, match="does not exist"):
        embed(model, tmp_path / "nowhere", workers=0)
    with pytest.raises(EngramError, match="There is no task 'b'"):
        embed(model, photos, tasks=["b"], workers=0)


def test_progress_counts_images_and_those_that_cannot_be_read(
    model: MemoryViT, photos: Path
) -> None:
    seen: list[tuple[int, int]] = []
    embed(model, photos, batch=5, workers=0, progress=lambda *far: seen.append(far))
    assert seen == [(5, 12), (10, 12), (12, 12)]


# Files of embeddings


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
