"""Every source becomes the same thing, mistakes are sentences, batches are the same for all."""

import io
import json
import os
import pickle
import random
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from engram.data.datasets import Dataset, Splits, load, split_validation
from engram.data.loader import Batch, Loader
from engram.data.presets import PRESETS
from engram.data.source import Arrays
from engram.errors import EngramError
from engram.images.decode import BadImage, read_image
from engram.images.preprocessing import Preprocessing
from engram.images.views import evaluation_view

TINY = Preprocessing(size=(8, 8), resize=8)
COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


def paint(path: Path, colour: str = "red", shade: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    red, green, blue = COLOURS[colour]
    image = Image.new("RGB", (12, 10), (red, green, blue))
    image.putpixel((0, 0), (shade, shade, shade))  # no two pictures are the same
    image.save(path)
    return path


def tree(root: Path, counts: Mapping[str, int]) -> Path:
    for colour, count in counts.items():
        for i in range(count):
            paint(root / colour / f"{i:03}.png", colour, i)
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tree(tmp_path / "colours", {"blue": 10, "green": 10, "red": 10})


def files(dataset: Dataset | None) -> list[str]:
    assert dataset is not None
    return [dataset.sample_name(i) for i in range(len(dataset))]


# ---------------------------------------------------------------------------- folders


def test_a_class_folder_tree_is_training_data(folder: Path) -> None:
    splits = load(folder)
    train = splits["train"]
    assert splits.classes == train.classes == ("blue", "green", "red")
    assert (splits.val, splits.test) == (None, None)
    assert len(train) == 30
    for i in (0, 15, 29):
        name = train.classes[train.labels[i]]
        assert read_image(train.read(i)).getpixel((5, 5)) == COLOURS[name]


@pytest.mark.parametrize("val", ["val", "valid", "validation"])
def test_split_folders_are_recognised(tmp_path: Path, val: str) -> None:
    for split, count in (("train", 3), (val, 2), ("test", 1)):
        tree(tmp_path / split, {"red": count, "blue": count})
    splits = load(str(tmp_path))
    assert [len(splits[name]) for name in ("train", "val", "test")] == [6, 4, 2]


def test_train_can_be_a_class_of_vehicles(tmp_path: Path) -> None:
    for vehicle in ("car", "plane", "train"):
        paint(tmp_path / vehicle / "a.png")
    assert load(tmp_path).classes == ("car", "plane", "train")


def test_a_folder_without_splits_can_serve_as_test_data_but_training_data_cannot(
    folder: Path, tmp_path: Path
) -> None:
    splits = load(folder, split="test")
    assert len(splits["test"]) == 30
    assert splits.train is None
    tree(tmp_path / "other" / "train", {"red": 2, "blue": 2})
    with pytest.raises(EngramError, match="has no test split; it has train"):
        load(tmp_path / "other", split="test")


def test_the_classes_of_a_split_are_those_of_the_training_data(tmp_path: Path) -> None:
    tree(tmp_path / "train", {"blue": 1, "green": 1, "red": 1})
    tree(tmp_path / "test", {"red": 2})
    test = load(tmp_path, split="test")["test"]
    assert test.classes == ("blue", "green", "red")
    assert test.labels.tolist() == [2, 2]


def test_given_classes_fix_the_order(folder: Path) -> None:
    train = load(folder, classes=["red", "violet", "green", "blue"])["train"]
    assert train.classes[train.labels[0]] == "blue"
    assert set(train.labels.tolist()) == {0, 2, 3}
    with pytest.raises(EngramError, match="label 'blue', which is none of the 2 classes"):
        load(folder, classes=["red", "green"])


def test_files_that_are_no_images_are_counted_and_ignored(folder: Path) -> None:
    (folder / "red" / "notes.txt").write_text("hello")
    (folder / "red" / ".DS_Store").write_bytes(b"x")
    (folder / "blue" / "._001.png").write_bytes(b"x")
    (folder / ".git").mkdir()
    splits = load(folder)
    assert (len(splits["train"]), splits.ignored) == (30, 3)


def test_hidden_folders_are_passed_over(folder: Path) -> None:
    for hidden in (".ipynb_checkpoints", "__MACOSX"):
        paint(folder / "red" / hidden / "000.png")
    assert len(load(folder)["train"]) == 30


def test_links_to_folders_are_followed_but_never_in_a_circle(folder: Path, tmp_path: Path) -> None:
    tree(tmp_path / "elsewhere", {"red": 2})
    (folder / "red" / "more").symlink_to(tmp_path / "elsewhere" / "red")
    (folder / "red" / "again").symlink_to(folder / "red")
    (folder / "red" / "all").symlink_to(folder)
    found = [path for path in files(load(folder).train) if "/red/" in path]
    assert len(found) == 12
    assert found[-1] == str(folder / "red" / "more" / "001.png")


def test_a_folder_that_cannot_be_read_is_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = paint(folder / "red" / "closed" / "a.png").parent
    scandir = os.scandir

    def refusing(path: str) -> Any:  # chmod would not stop root
        if str(path) == str(closed):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr("os.scandir", refusing)
    with pytest.raises(EngramError, match=r"red/closed cannot be read \(Permission denied\)"):
        load(folder)


def make_folder(root: Path, *paths: str) -> Path:
    for path in paths:
        if path.endswith("/"):
            (root / path).mkdir(parents=True)
        else:
            paint(root / path)
    return root


@pytest.mark.parametrize(
    ("paths", "sentence"),
    [
        ([], "is an empty folder"),
        (["a.png"], "has images but no class folders"),
        (["red/a.png", "blue/"], r"blue is a class without images"),
        (["red/a.png"], r"has only one class \(red\)"),
        (["train/red/a.png", "train/blue/b.png", "test/"], "test is an empty folder"),
        (
            ["train/red/a.png", "train/blue/b.png", "test/green/c.png"],
            "the test split has the label 'green', which is none of the 2 classes",
        ),
        (
            ["train/red/a.png", "val/red/a.png", "validation/red/a.png"],
            "two val splits, val and validation; keep one",
        ),
        (
            ["red/a.png", "blue/b.png", "test/red/c.png"],
            r"class folders next to test/, .*; move blue and red into .*/train/\.$",
        ),
    ],
)
def test_a_wrong_folder_is_a_sentence(tmp_path: Path, paths: list[str], sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        load(make_folder(tmp_path, *paths))


def test_what_is_no_data_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngramError, match="nowhere does not exist; data can be a folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(EngramError, match="not data of a known kind"):
        load(paint(tmp_path / "one.png"))
    with pytest.raises(EngramError, match="There is no split 'training'"):
        load(tmp_path, split="training")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnist").mkdir()
    with pytest.raises(EngramError, match=r"write \./mnist for the path"):
        load("mnist")


# ----------------------------------------------------------------------------- tables

RECORDS = [
    {"path": "blue/000.png", "label": "blue", "split": "train"},
    {"path": "red/000.png", "label": "red", "split": "train"},
    {"path": "red/001.png", "label": "red", "split": "validation"},
    {"path": "blue/001.png", "label": "blue", "split": "test"},
]


def write_table(path: Path, records: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(record) for record in records))
    elif path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        pyarrow = pytest.importorskip("pyarrow")
        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        comma = "\t" if path.suffix == ".tsv" else ","
        lines = [comma.join(records[0]), *(comma.join(map(str, r.values())) for r in records)]
        path.write_text("\n".join(lines), encoding="utf-8-sig")
    return path


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_a_table_of_paths_and_labels_is_read(folder: Path, suffix: str) -> None:
    splits = load(write_table(folder / f"table{suffix}", RECORDS))
    assert splits.classes == ("blue", "red")
    assert [len(splits[name]) for name in ("train", "val", "test")] == [2, 1, 1]
    assert files(splits.val) == [str(folder / "red/001.png")]


def test_columns_and_splits_can_be_named(folder: Path) -> None:
    records = [
        {"what": r["label"], "photo": r["path"], "fold": "a" if i < 2 else "b"}
        for i, r in enumerate(RECORDS)
    ]
    table = write_table(folder / "table.csv", records)
    splits = load(
        table,
        image="photo",
        label="what",
        split_column="fold",
        splits={"train": "a", "test": "b"},
    )
    assert (len(splits["train"]), len(splits["test"])) == (2, 2)
    with pytest.raises(
        EngramError,
        match=r"no column 'image'; it has what, photo, fold; .* to one of image, img, ",
    ):
        load(table)
    with pytest.raises(EngramError, match=r"no column 'label'; .*; name one of them with --label"):
        load(table, image="photo")
    with pytest.raises(
        EngramError, match=r"column 'fold', has the splits a, b; rename them to .*train, training, "
    ):
        load(table, image="photo", label="what", split_column="fold")
    with pytest.raises(EngramError, match=r"has no column 'kind'; it has what, photo, fold"):
        load(table, image="photo", label="kind")
    with pytest.raises(EngramError, match="has no split 'c'; it has a, b"):
        load(table, image="photo", label="what", split_column="fold", splits={"train": "c"})


def test_number_labels_are_sorted_as_numbers(folder: Path) -> None:
    records = [{"path": "red/000.png", "label": label} for label in (10, 9, 2)]
    assert load(write_table(folder / "table.jsonl", records)).classes == ("2", "9", "10")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"path": "red/gone.png"}, r"row 2: .*gone\.png does not exist"),
        ({"path": ""}, "row 2: the column 'path' is empty"),
        ({"label": ""}, "row 2: the column 'label' is empty"),
    ],
)
def test_a_wrong_row_is_a_sentence(folder: Path, change: dict[str, str], sentence: str) -> None:
    records = [RECORDS[0], RECORDS[1] | change, RECORDS[2]]
    with pytest.raises(EngramError, match=sentence):
        load(write_table(folder / "table.csv", records))


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("t.csv", "", "is an empty table"),
        ("t.jsonl", "{]", "cannot be read as a table"),
        ("t.jsonl", '{"path": 1}\n\n{"path": 2', r"as a table: line 3 column 11: Expecting"),
        ("t.jsonl", "[1]", "line 1: every line must be an object"),
        ("t.parquet", "no parquet", "cannot be read as a table"),
    ],
)
def test_a_broken_table_is_a_sentence(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(text)
    with pytest.raises(EngramError, match=sentence):
        load(tmp_path / name)


# ----------------------------------------------------------------------------- arrays


@pytest.mark.parametrize("shape", [(9, 7), (9, 7, 1), (9, 7, 3), (3, 9, 7), (1, 9, 7)])
@pytest.mark.parametrize("kind", [np.uint8, np.float32, np.int64])
def test_arrays_of_every_layout_are_read(
    tmp_path: Path, shape: tuple[int, ...], kind: type[Any]
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, *shape))
    stored = pixels / 255 if kind is np.float32 else pixels
    np.savez(
        tmp_path / "a.npz", x_train=stored.astype(kind), y_train=np.array([[0], [1], [1], [0]])
    )
    train = load(tmp_path / "a.npz")["train"]
    image = np.asarray(read_image(train.read(2)))
    expected = np.moveaxis(pixels[2], 0, -1) if shape[0] in (1, 3) else pixels[2]
    expected = expected if expected.ndim == 3 else expected[..., None]
    assert (image == expected).all()
    assert train.labels.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    "keys",
    [
        ("x_train", "y_train", "x_test", "y_test"),
        ("train_images", "train_labels", "test_images", "test_labels"),
    ],
)
def test_arrays_have_splits_and_class_names(tmp_path: Path, keys: tuple[str, ...]) -> None:
    x, y = np.zeros((3, 4, 4), np.uint8), np.array([1, 0, 1])
    arrays = dict(zip(keys, (x, y, x, y), strict=True))
    np.savez(tmp_path / "a.npz", **arrays, class_names=np.array(["no", "yes"]))  # type: ignore[arg-type]
    splits = load(tmp_path / "a.npz")
    assert splits.classes == ("no", "yes")
    assert splits["test"].labels.tolist() == [1, 0, 1]


def test_names_in_arrays_may_be_bytes(tmp_path: Path) -> None:
    x = np.zeros((3, 4, 4), np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.char.encode(["löwe", "cat", "cat"], "utf-8"))
    assert load(tmp_path / "a.npz").classes == ("cat", "löwe")
    names = np.array([b"no", b"yes"])
    np.savez(tmp_path / "b.npz", x=x, y=np.array([1, 0, 1]), class_names=names)
    assert load(tmp_path / "b.npz").classes == ("no", "yes")


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"a": np.zeros(3)}, "has the arrays a; expected x_train"),
        ({"x": np.zeros((2, 4)), "y": np.arange(2)}, r"has the shape \(2, 4\)"),
        ({"x": np.full((2, 4, 4), 9.0), "y": np.arange(2)}, "float64 values from 9.0 to 9.0"),
        ({"x": np.zeros((2, 4, 4)), "y": np.arange(3)}, "2 images need as many labels"),
        (
            {"x": np.zeros((2, 4, 4)), "y": np.array([0, 5]), "classes": np.array(["a", "b"])},
            "label 5 is none of 2 classes",
        ),
        ({"x": np.zeros((0, 4, 4)), "y": np.zeros(0)}, "the train split is empty"),
    ],
)
def test_wrong_arrays_are_a_sentence(tmp_path: Path, arrays: dict[str, Any], sentence: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(EngramError, match=sentence):
        load(tmp_path / "a.npz")


def saved(save: Callable[..., None]) -> bytes:
    file = io.BytesIO()
    save(file, np.arange(9999))
    return file.getvalue()


NPZ = saved(np.savez_compressed)


@pytest.mark.parametrize(
    "data",
    [
        b"PK not really",
        b"",
        saved(np.save),
        NPZ[:-99],
        NPZ[:200] + bytes(100) + NPZ[300:],
    ],
    ids=["text", "empty", "npy", "truncated", "damaged"],
)
def test_a_file_that_is_no_npz_is_a_sentence(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(EngramError, match=r"a\.npz cannot be read as \.npz arrays: "):
        load(tmp_path / "a.npz")


def test_digits_need_no_download() -> None:
    pytest.importorskip("sklearn")
    splits = load("digits")
    assert len(splits["train"]) + len(splits["test"]) == 1797
    assert len(splits.classes) == 10
    assert (splits.augment, splits.flip) == ("pad-crop", False)
    assert np.asarray(read_image(splits["train"].read(0))).max() > 200


# --------------------------------------------------------------------------- Hub data


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hub datasets on disk: saved with splits, saved without, and as parquet files."""
    datasets = pytest.importorskip("datasets")
    root = tmp_path_factory.mktemp("hub")
    features = datasets.Features(
        {
            "img": datasets.Image(),
            "fine_label": datasets.ClassLabel(names=["blue", "green", "red"]),
            "coarse_label": datasets.ClassLabel(names=["cold", "warm"]),
        }
    )
    labels = [2, 0, 1, 2]
    names = features["fine_label"].names
    rows = {
        "img": [
            {"bytes": paint(root / f"{i}.png", names[c], i).read_bytes(), "path": None}
            for i, c in enumerate(labels)
        ],
        "fine_label": labels,
        "coarse_label": [int(c == 2) for c in labels],
    }
    table = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": table, "test": table.select([0, 1])}).save_to_disk(root / "dict")
    table.save_to_disk(root / "single")
    (root / "parquet").mkdir()
    table.to_parquet(root / "parquet" / "train-00000-of-00001.parquet")
    table.to_parquet(root / "parquet" / "validation-00000-of-00001.parquet")
    return root


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "datasets" in sys.modules:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def test_a_hub_dataset_on_disk_is_read(hub: Path) -> None:
    splits = load(f"hf:{hub / 'dict'}")
    assert splits.classes == ("blue", "green", "red")
    assert splits["train"].labels.tolist() == [2, 0, 1, 2]
    assert len(splits["test"]) == 2
    assert read_image(splits["train"].read(1)).getpixel((5, 5)) == COLOURS["blue"]
    assert splits["train"].sample_name(1).endswith("dict/train[1]")


def test_another_label_column_can_be_chosen(hub: Path) -> None:
    splits = load(f"hf:{hub / 'dict'}", label="coarse_label")
    assert splits.classes == ("cold", "warm")
    with pytest.raises(EngramError, match="has no column 'label2'; it has img, fine_label"):
        load(f"hf:{hub / 'dict'}", label="label2")


def test_a_hub_dataset_without_splits_can_be_any_split(hub: Path) -> None:
    assert len(load(f"hf:{hub / 'single'}")["train"]) == 4
    assert len(load(f"hf:{hub / 'single'}", split="test")["test"]) == 4


def test_parquet_files_are_a_hub_dataset(hub: Path) -> None:
    splits = load(f"hf:{hub / 'parquet'}")
    assert len(splits["train"]) == len(splits["val"]) == 4
    one = hub / "parquet" / "train-00000-of-00001.parquet"
    assert len(load(f"hf:{one}", split="test")["test"]) == 4
    with pytest.raises(EngramError, match="holds images, not paths; load it as hf:"):
        load(one, image="img")


def test_a_preset_reads_a_copy_on_disk(hub: Path) -> None:
    splits = load(f"cifar100:{hub / 'dict'}")
    assert splits.classes == ("blue", "green", "red")
    assert (splits.augment, splits.flip) == ("pad-crop", True)
    assert splits.val is None


def test_secret_test_labels_are_a_sentence(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"image": datasets.Value("string"), "label": datasets.ClassLabel(2)}
    )
    table = datasets.Dataset.from_dict({"image": ["a", "b"], "label": [-1, -1]}, features=features)
    table.save_to_disk(tmp_path / "secret")
    with pytest.raises(EngramError, match="-1 means that the labels are not public"):
        load(f"hf:{tmp_path / 'secret'}")


def test_a_hub_that_cannot_be_reached_is_a_sentence() -> None:
    pytest.importorskip("datasets")
    with pytest.raises(EngramError, match="hf:owner/name cannot be loaded: "):
        load("hf:owner/name")
    with pytest.raises(EngramError, match=r"hf:\./gone does not exist on disk"):
        load("hf:./gone")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("datasets", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        EngramError, match=r"cifar10 needs the package datasets, .*vit\[hub-data\]'"
    ):
        load("hf:uoft-cs/cifar10")
    with pytest.raises(EngramError, match=r"digits needs the package sklearn, .*vit\[demo\]'"):
        load("digits")


def test_inaturalist_is_read_from_its_own_annotations(folder: Path) -> None:
    def notes(samples: list[tuple[str, int]]) -> str:
        return json.dumps(
            {
                "categories": [{"id": 7, "name": "Blue"}, {"id": 3, "name": "Red"}],
                "images": [{"id": i, "file_name": file} for i, (file, _) in enumerate(samples)],
                "annotations": [
                    {"image_id": i, "category_id": c} for i, (_, c) in enumerate(samples)
                ],
            }
        )

    (folder / "train2017.json").write_text(notes([("red/001.png", 3), ("blue/000.png", 7)]))
    (folder / "val2017.json").write_text(notes([("red/002.png", 3)]))
    splits = load(f"inaturalist2017:{folder}")
    assert splits.classes == ("Blue", "Red")
    assert files(splits.train) == [str(folder / "blue/000.png"), str(folder / "red/001.png")]
    assert files(splits.test) == [str(folder / "red/002.png")]
    with pytest.raises(
        EngramError, match="is not on the Hub; give the folder that holds train2017"
    ):
        load("inaturalist2017")
    (folder / "val2017.json").write_text("{}")
    with pytest.raises(EngramError, match="is not an annotation file"):
        load(f"inaturalist2017:{folder}")


def test_every_preset_says_how_to_augment() -> None:
    assert {preset.augment for preset in PRESETS.values()} == {"inception", "pad-crop"}
    assert all("train" in preset.splits for preset in PRESETS.values())


# ----------------------------------------------------------------- the dataset itself


def test_the_same_picture_has_the_same_hash_wherever_it_lies(folder: Path, hub: Path) -> None:
    train = load(folder)["train"]
    hashes = [train.sample_hash(i) for i in range(len(train))]
    assert len(set(hashes)) == 30
    shutil.copytree(folder, folder.parent / "copy")
    copy = load(folder.parent / "copy")["train"]
    assert [copy.sample_hash(i) for i in range(len(copy))] == hashes
    assert load(f"hf:{hub / 'dict'}")["train"].sample_hash(1) == copy.sample_hash(1)
    Path(copy.sample_name(0)).unlink()
    with pytest.raises(BadImage, match="No such file"):
        copy.sample_hash(0)


def test_array_hashes_tell_shapes_apart() -> None:
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
    assert files(part) == [train.sample_name(3)]
    assert part.labels.tolist() == [train.labels[3]]


# ------------------------------------------------------------------------- validation


def memory(labels: list[int], classes: int) -> Dataset:
    pixels = torch.arange(len(labels), dtype=torch.uint8)[:, None, None].expand(-1, 4, 4)
    return Dataset(
        "memory",
        "train",
        tuple(map(str, range(classes))),
        np.array(labels, dtype=np.int64),
        Arrays(pixels.contiguous(), "memory"),
        np.arange(len(labels)),
    )


@given(
    st.lists(st.integers(0, 4), min_size=8, max_size=80),
    st.floats(0.05, 0.6),
    st.integers(0, 1000),
)
def test_the_held_out_share_is_stratified_disjoint_and_seeded(
    labels: list[int], share: float, seed: int
) -> None:
    whole = memory(labels, 5)
    try:
        train, val = split_validation(whole, share, seed)
    except EngramError:
        assert round(share * len(labels)) == 0 or max(np.bincount(labels)) == 1
        return
    assert sorted(files(train) + files(val)) == sorted(files(whole))
    before, kept, held = (np.bincount(d.labels, minlength=5) for d in (whole, train, val))
    assert (kept[before > 0] >= 1).all()
    assert (np.abs(held - share * before) < 1).all() or (
        kept[held < np.floor(share * before)] == 1
    ).all()
    assert len(val) <= round(share * len(labels))
    assert files(split_validation(whole, share, seed)[1]) == files(val)
    assert (train.split, val.split) == ("train", "val")


def test_the_held_out_share_depends_on_the_seed_and_not_on_the_order(folder: Path) -> None:
    train = load(folder)["train"]
    shuffled = train.subset(np.random.default_rng(3).permutation(len(train)))
    _, val = split_validation(train, 0.2, seed=5)
    assert sorted(files(split_validation(shuffled, 0.2, seed=5)[1])) == sorted(files(val))
    assert sorted(files(split_validation(train, 0.2, seed=6)[1])) != sorted(files(val))
    assert np.bincount(val.labels).tolist() == [2, 2, 2]


def test_validation_is_never_taken_from_the_test_split(tmp_path: Path) -> None:
    tree(tmp_path / "train", {"red": 10, "blue": 10})
    tree(tmp_path / "test", {"red": 10, "blue": 10})
    splits = load(tmp_path).with_validation(0.1, seed=0)
    assert len(splits["test"]) == 20
    assert all("/train/" in file for file in files(splits.val) + files(splits.train))
    assert splits.with_validation(0.5) is splits


def test_too_little_data_to_hold_out_is_a_sentence() -> None:
    with pytest.raises(EngramError, match="too small to hold out 10% for validation: 3 images"):
        split_validation(memory([0, 1, 2], 3))
    with pytest.raises(EngramError, match=r"share is 1\.0; it must be between 0 and 1"):
        split_validation(memory([0, 1, 2], 3), 1.0)


# ---------------------------------------------------------------------------- batches


def digest(batches: list[Batch]) -> list[tuple[Any, ...]]:
    return [
        (b.images.numpy().tobytes(), *(x.tolist() for x in (b.labels, b.indices, b.failed)))
        for b in batches
    ]


def test_an_evaluation_batch_is_the_evaluation_view_in_order(folder: Path) -> None:
    dataset = load(folder)["train"]
    loader = Loader(dataset, TINY, 8)
    batches = list(loader)
    assert [len(b.labels) for b in batches] == [8, 8, 8, 6]
    assert len(loader) == 4
    assert torch.cat([b.indices for b in batches]).tolist() == list(range(30))
    assert torch.cat([b.labels for b in batches]).tolist() == dataset.labels.tolist()
    assert batches[1].images.dtype == torch.uint8
    assert np.array_equal(
        batches[1].images[2].numpy(), evaluation_view(dataset.sample_name(10), TINY)
    )


@pytest.mark.parametrize("augment", ["none", "inception", "pad-crop"])
def test_batches_do_not_depend_on_the_number_of_workers(folder: Path, augment: str) -> None:
    (folder / "red" / "003.png").write_bytes(b"broken")
    dataset = load(folder)["train"]

    def run(workers: int) -> tuple[list[tuple[Any, ...]], dict[str, str]]:
        loader = Loader(dataset, TINY, 7, mode="train", augment=augment, seed=4, workers=workers)
        epochs = [digest(list(loader.epoch(epoch))) for epoch in (0, 1)]
        assert epochs[0] != epochs[1]
        return epochs[0] + epochs[1], loader.bad

    alone = run(0)
    assert len(alone[1]) == 1
    assert run(1) == alone
    assert run(2) == alone


def noisy(image: Image.Image) -> torch.Tensor:
    """A transform that draws from every global generator there is."""
    noise = random.random() + float(np.random.rand()) + float(torch.rand(()))  # noqa: NPY002
    return torch.full((3, 4, 4), noise + image.width)


def test_a_random_transform_is_as_deterministic_as_the_views(folder: Path) -> None:
    dataset = load(folder)["train"]

    def run(workers: int) -> list[tuple[Any, ...]]:
        loader = Loader(dataset, TINY, 16, mode="train", transform=noisy, seed=1, workers=workers)
        return digest(list(loader.epoch(3)))

    before = (random.getstate(), torch.get_rng_state().tolist())
    alone = run(0)
    assert (random.getstate(), torch.get_rng_state().tolist()) == before
    assert run(2) == alone
    batch = next(iter(Loader(dataset, TINY, 16, transform=noisy)))
    assert batch.images.dtype == torch.float32
    assert len(set(batch.images[:, 0, 0, 0].tolist())) == 16


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("transform", "got"),
    [
        (lambda image: np.zeros((3, 4, 4), np.uint8), r"uint8 \(3, 4, 4\)"),
        (lambda image: torch.zeros(4, 4), r"float32 \(4, 4\)"),
        (lambda image: np.zeros((3, 4, 4)), r"float64 \(3, 4, 4\)"),
        (lambda image: np.zeros((4, int(image.getpixel((0, 0))[0]) + 1, 3), np.uint8), " and "),
    ],
)
def test_a_transform_of_the_wrong_kind_is_a_sentence(
    folder: Path, workers: int, transform: Callable[[Any], Any], got: str
) -> None:
    loader = Loader(load(folder)["train"], TINY, 4, transform=transform, workers=workers)
    with pytest.raises(EngramError, match=r"^a transform must give .*" + got):
        next(iter(loader))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_can_start_at_any_step_without_reading_what_is_before(
    folder: Path, workers: int
) -> None:
    dataset = load(folder)["train"]
    loader = Loader(dataset, TINY, 4, mode="train", seed=2, workers=workers)
    whole = list(loader.epoch(1))
    for index in torch.cat([b.indices for b in whole[:5]]).tolist():
        Path(dataset.sample_name(index)).unlink()
    resumed = Loader(dataset, TINY, 4, mode="train", seed=2, workers=workers)
    assert digest(list(resumed.epoch(1, skip=5))) == digest(whole[5:])
    assert resumed.bad == {}
    assert list(resumed.epoch(1, skip=8)) == []


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5), st.integers(0, 9), st.booleans())
def test_the_shards_together_are_the_batches_of_one_process(
    samples: int, batch: int, world: int, epoch: int, drop_last: bool
) -> None:
    dataset = memory([i % 2 for i in range(samples)], 2)

    def run(rank: int, world: int) -> list[Batch]:
        loader = Loader(
            dataset,
            TINY,
            batch,
            mode="train",
            augment="pad-crop",
            seed=9,
            rank=rank,
            world=world,
            drop_last=drop_last,
        )
        batches = list(loader.epoch(epoch))
        assert len(batches) == len(loader)
        return batches

    alone = run(0, 1)
    shards = [run(rank, world) for rank in range(world)]
    assert {len(shard) for shard in shards} == {len(alone)}
    for step, expected in enumerate(alone):
        parts = {
            int(i): image.numpy().tobytes()
            for shard in shards
            for i, image in zip(shard[step].indices, shard[step].images, strict=True)
        }
        assert parts == {
            int(i): image.numpy().tobytes()
            for i, image in zip(expected.indices, expected.images, strict=True)
        }


def test_an_abandoned_epoch_does_not_disturb_the_next(folder: Path) -> None:
    loader = Loader(load(folder)["train"], TINY, 4, mode="train", workers=2)
    expected = digest(list(loader.epoch(1)))
    next(loader.epoch(0))
    assert digest(list(loader.epoch(1))) == expected


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_pictures_are_left_out_and_told(folder: Path, mode: str, workers: int) -> None:
    dataset = load(folder)["train"]
    bad = [3, 4, 5, 20]
    for i in bad:
        Path(dataset.sample_name(i)).write_bytes(b"")
    loader = Loader(dataset, TINY, 3, mode=mode, workers=workers)
    batches = list(loader.epoch(0))
    assert len(batches) == len(loader) == 10
    assert sorted(torch.cat([b.failed for b in batches]).tolist()) == bad
    good = torch.cat([b.indices for b in batches]).tolist()
    assert sorted(good) == [i for i in range(30) if i not in bad]
    assert sum(len(b.images) for b in batches) == 26
    assert set(loader.bad) == {dataset.sample_name(i) for i in bad}
    assert all(sentence.endswith("the file is empty") for sentence in loader.bad.values())
    if mode == "eval":  # a batch may have nothing left
        assert batches[1].images.shape == (0, 8, 8, 3)


def test_chosen_samples_are_augmented_as_in_the_whole_epoch(folder: Path) -> None:
    loader = Loader(load(folder)["train"], TINY, 30, mode="train", seed=7)
    (whole,) = loader.epoch(2)
    (part,) = loader.epoch(2, samples=[11, 4])
    assert part.indices.tolist() == [11, 4]
    at = [whole.indices.tolist().index(i) for i in (11, 4)]
    assert torch.equal(part.images, whole.images[at])


def test_loading_draws_nothing_from_the_global_generator(folder: Path) -> None:
    before = torch.get_rng_state()
    loader = Loader(load(folder)["train"], TINY, 8, mode="train", workers=1)
    list(loader.epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_spawned_workers_read_the_same(folder: Path) -> None:
    dataset = load(folder)["train"]
    alone = digest(list(Loader(dataset, TINY, 16, mode="train").epoch(0)))
    spawned = Loader(dataset, TINY, 16, mode="train", workers=1, start_method="spawn")
    assert digest(list(spawned.epoch(0))) == alone


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"mode": "test"}, "mode is 'test'; it can be train or eval"),
        ({"augment": "flip"}, "augment is 'flip'; it can be none, inception, pad-crop"),
        ({"batch_size": 0}, "batch is 0; it must be at least 1"),
        ({"rank": 2, "world": 2}, "world is 2; it must be at least 3"),
    ],
)
def test_a_senseless_loader_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        Loader(memory([0, 1], 2), TINY, **({"batch_size": 1} | settings))


def test_the_real_photographs_are_found(assets: Path) -> None:
    splits: Splits = load(assets / "data" / "flowers")
    assert (len(splits["train"]), len(splits["test"]), len(splits.classes)) == (1020, 781, 102)
    splits = splits.with_validation()
    assert np.bincount(splits["val"].labels).tolist() == [1] * 102
