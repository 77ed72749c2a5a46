"""Loading in general, splits, hashes of samples, and whether data fits a task."""

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.datasets import sample_names, write_class_folders, write_image
from tests.support.masks import write_masks

from engram.data.datasets import Dataset, Splits, load
from engram.data.source import Arrays
from engram.errors import EngramError
from engram.images.decode import BadImage
from engram.images.masks import Legend
from engram.tasks.spec import TaskSpec

# Loading


def test_the_classes_of_a_split_are_those_of_the_training_data(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train", {"blue": 1, "green": 1, "red": 1})
    write_class_folders(tmp_path / "test", {"red": 2})
    test = load(tmp_path, split="test")["test"]
    assert test.classes == ("blue", "green", "red")
    assert test.labels.tolist() == [2, 2]


def test_given_classes_fix_the_order(folder: Path) -> None:
    train = load(folder, classes=["red", "violet", "green", "blue"])["train"]
    assert train.classes[train.labels[0]] == "blue"
    assert set(train.labels.tolist()) == {0, 2, 3}
    with pytest.raises(EngramError, match="label 'blue'"):
        load(folder, classes=["red", "green"])


def test_what_is_not_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngramError, match="nowhere does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(EngramError, match="not data of a known kind"):
        load(write_image(tmp_path / "one.png"))
    with pytest.raises(EngramError, match="There is no split 'training'"):
        load(tmp_path, split="training")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnist").mkdir()
    with pytest.raises(EngramError, match=r"write \./mnist for the path"):
        load("mnist")


def test_the_spec_of_a_task_says_what_masks_mean(tmp_path: Path) -> None:
    root = write_masks(tmp_path, {"1": 1})
    spec = TaskSpec("t", ("a", "b"), "segmentation", values=(2, 1), ignore=3)
    splits = load(root, split="test", like=spec)
    assert splits.legend == Legend((2, 1), 3)
    assert splits.task == {
        "classes": ("a", "b"),
        "kind": "segmentation",
        "values": (2, 1),
        "ignore": 3,
    }


def test_the_real_photographs_are_found(assets: Path) -> None:
    splits: Splits = load(assets / "data" / "flowers")
    assert (len(splits["train"]), len(splits["test"]), len(splits.classes)) == (1020, 781, 102)
    splits = splits.with_validation()
    assert np.bincount(splits["val"].labels).tolist() == [1] * 102


# A dataset


def test_the_same_image_has_the_same_hash_wherever_it_is_stored(folder: Path, hub: Path) -> None:
    train = load(folder)["train"]
    hashes = [train.sample_hash(i) for i in range(len(train))]
    assert len(set(hashes)) == 30
    shutil.copytree(folder, folder.parent / "copy")
    copy = load(folder.parent / "copy")["train"]
    assert [copy.sample_hash(i) for i in range(len(copy))] == hashes
    assert load(f"hf:{hub / 'dict'}")["train"].sample_hash(1) == copy.sample_hash(1)
    Path(copy.sample_name(0)).unlink()
    with pytest.raises(BadImage, match="does not exist"):
        copy.sample_hash(0)


def test_hashes_of_arrays_depend_on_the_shape() -> None:
    def first(pixels: torch.Tensor) -> str:
        rows = Arrays(pixels, "a")
        return Dataset(
            "a", "train", ("x",), np.zeros(1, np.int64), rows, np.zeros(1, np.int64)
        ).sample_hash(0)

    assert first(torch.zeros(1, 2, 8, dtype=torch.uint8)) != first(
        torch.zeros(1, 4, 4, dtype=torch.uint8)
    )


def test_datasets_of_every_kind_can_be_pickled(folder: Path, hub: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 4, 4), np.uint8), y=np.array([0, 1, 0]))
    for spec in (folder, f"hf:{hub / 'dict'}", tmp_path / "a.npz"):
        train = load(spec)["train"]
        again = pickle.loads(pickle.dumps(train))
        assert again.sample_hash(1) == train.sample_hash(1)
        assert (again.labels == train.labels).all()


def test_a_subset_keeps_its_samples(folder: Path) -> None:
    train = load(folder)["train"]
    part = train.subset([29, 3]).subset([1])
    assert sample_names(part) == [train.sample_name(3)]
    assert part.labels.tolist() == [train.labels[3]]
