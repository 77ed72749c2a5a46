"""Folders of classes and folders of masks are read; a wrong folder is refused with its reason."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.support.datasets import COLOURS, sample_names, write_class_folders, write_image
from tests.support.masks import image_with_mask, write_masks
from tests.support.pictures import encoded
from tests.support.waiting import computing_less_than

from engram.data.datasets import load
from engram.data.overview import describe
from engram.errors import EngramError, Notice
from engram.images.decode import read_image
from engram.images.masks import Legend

# A folder per class


def test_a_folder_per_class_is_training_data(folder: Path) -> None:
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
        write_class_folders(tmp_path / split, {"red": count, "blue": count})
    splits = load(str(tmp_path))
    for split, folder, count in (("train", "train", 3), ("val", val, 2), ("test", "test", 1)):
        expected = [
            str(tmp_path / folder / colour / f"{i:03}.png")
            for colour in ("blue", "red")
            for i in range(count)
        ]
        assert sample_names(splits[split]) == expected
        assert splits[split].labels.tolist() == [0] * count + [1] * count


def test_train_can_be_a_class_of_vehicles(tmp_path: Path) -> None:
    for vehicle in ("car", "plane", "train"):
        write_image(tmp_path / vehicle / "a.png")
    assert load(tmp_path).classes == ("car", "plane", "train")


def test_a_folder_without_splits_can_be_used_as_test_data_but_a_train_folder_cannot(
    folder: Path, tmp_path: Path
) -> None:
    splits = load(folder, split="test")
    assert sample_names(splits["test"]) == sample_names(load(folder)["train"])
    assert splits.train is None
    write_class_folders(tmp_path / "other" / "train", {"red": 2, "blue": 2})
    with pytest.raises(EngramError, match="has no test split"):
        load(tmp_path / "other", split="test")


def test_files_that_are_not_images_are_counted_and_ignored(folder: Path) -> None:
    (folder / "red" / "notes.txt").write_text("hello")
    (folder / "red" / ".DS_Store").write_bytes(b"x")
    (folder / "blue" / "._001.png").write_bytes(b"x")
    (folder / ".git").mkdir()
    splits = load(folder)
    assert (len(splits["train"]), splits.ignored) == (30, 3)


def test_hidden_folders_are_skipped(folder: Path) -> None:
    visible = sample_names(load(folder).train)
    for hidden in (".ipynb_checkpoints", "__MACOSX"):
        write_image(folder / "red" / hidden / "000.png")
    assert sample_names(load(folder).train) == visible


def test_links_to_folders_are_followed_but_not_in_a_cycle(folder: Path, tmp_path: Path) -> None:
    write_class_folders(tmp_path / "elsewhere", {"red": 2})
    (folder / "red" / "more").symlink_to(tmp_path / "elsewhere" / "red")
    (folder / "red" / "again").symlink_to(folder / "red")
    (folder / "red" / "all").symlink_to(folder)
    found = [path for path in sample_names(load(folder).train) if "/red/" in path]
    assert len(found) == 12
    assert found[-1] == str(folder / "red" / "more" / "001.png")


def test_folders_that_link_to_each_other_are_visited_once(tmp_path: Path) -> None:
    """Nine class folders, each with links to all others, have more than 100,000 paths."""
    names = [f"class{i}" for i in range(9)]
    root = tmp_path / "data"
    for name in names:
        for i in range(2):
            write_image(root / name / f"{i:03}.png", shade=i)
        for other in names:
            (root / name / f"to-{other}").symlink_to(root / other)
    with computing_less_than(5):
        train = load(root)["train"]
    expected = [str(root / name / f"00{i}.png") for name in names for i in range(2)]
    assert sample_names(train) == expected
    assert train.labels.tolist() == [label for label in range(9) for _ in range(2)]


def test_an_image_belongs_to_the_class_it_is_in_and_not_to_one_that_links_there(
    folder: Path, tmp_path: Path
) -> None:
    before = sample_names(load(folder).train)
    inside = write_image(folder / "red" / "dark" / "000.png")
    shared = write_image(tmp_path / "elsewhere" / "000.png").parent
    (folder / "blue" / "dark").symlink_to(inside.parent)  # comes before red
    (folder / "blue" / "both").symlink_to(shared)
    (folder / "red" / "both").symlink_to(shared)
    (folder / "red" / "nowhere").symlink_to(tmp_path / "nowhere")
    first = str(folder / "blue" / "both" / "000.png")
    assert sample_names(load(folder).train) == sorted([*before, str(inside), first])


def test_two_classes_that_are_one_folder_are_refused(folder: Path) -> None:
    (folder / "scarlet").symlink_to(folder / "red")
    with pytest.raises(EngramError, match=r"scarlet and .*red are the same folder"):
        load(folder)


def test_a_class_whose_images_all_belong_to_another_is_refused(folder: Path) -> None:
    (folder / "scarlet").mkdir()
    (folder / "scarlet" / "more").symlink_to(folder / "red")
    with pytest.raises(EngramError, match="scarlet is a class without images"):
        load(folder)


def test_a_folder_that_cannot_be_read_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = write_image(folder / "red" / "closed" / "a.png").parent
    scandir = os.scandir

    def refusing(path: str) -> Any:  # chmod would not stop root
        if str(path) == str(closed):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr("os.scandir", refusing)
    with pytest.raises(EngramError, match="red/closed cannot be read"):
        load(folder)


def test_pipes_and_links_to_themselves_are_images_that_cannot_be_read(folder: Path) -> None:
    os.mkfifo(folder / "red" / "pipe.png")
    (folder / "red" / "self.png").symlink_to(folder / "red" / "self.png")
    (folder / "loop").symlink_to(folder / "loop")
    found = describe(load(folder), check=True).document
    assert sorted(sentence.partition(":")[0] for sentence in found["unreadable"]) == [
        str(folder / "red" / "pipe.png"),
        str(folder / "red" / "self.png"),
    ]


def test_folders_of_images_may_share_one_folder_of_masks(tmp_path: Path) -> None:
    root = write_masks(tmp_path, {"bright/1": 1, "bright/2": 2, "bright/3": 3})
    shutil.copytree(root / "images" / "bright", root / "images" / "dark")
    (root / "masks" / "dark").symlink_to(root / "masks" / "bright")
    assert len(load(root, kind="segmentation")["train"]) == 6


def make_folder(root: Path, *paths: str) -> Path:
    for path in paths:
        if path.endswith("/"):
            (root / path).mkdir(parents=True)
        else:
            write_image(root / path)
    return root


@pytest.mark.parametrize(
    ("paths", "sentence"),
    [
        ([], "has no images"),
        (["a.png"], "has images but no class folders"),
        (["red/a.png", "blue/"], r"blue is a class without images"),
        (["red/a.png"], r"has only one class \(red\)"),
        (["train/red/a.png", "train/blue/b.png", "test/"], "test has no images"),
        (
            ["train/red/a.png", "train/blue/b.png", "test/green/c.png"],
            "label 'green'",
        ),
        (
            ["train/red/a.png", "val/red/a.png", "validation/red/a.png"],
            "two val splits, val and validation",
        ),
        (
            ["red/a.png", "blue/b.png", "test/red/c.png"],
            "class folders next to test/",
        ),
    ],
)
def test_a_wrong_folder_is_refused(tmp_path: Path, paths: list[str], sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        load(make_folder(tmp_path, *paths))


def test_a_folder_per_class_is_for_classification_only(tmp_path: Path) -> None:
    for kind in ("multilabel", "regression"):
        with pytest.raises(EngramError, match="needs a table"):
            load(tmp_path, kind=kind)


# Images and masks


def test_images_and_masks_are_two_folders_of_the_same_shape(tmp_path: Path) -> None:
    names = {"train/a/1": 1, "train/b/1": 2, "test/c": 3}
    inside = write_masks(tmp_path / "one", names)
    apart = write_masks(tmp_path / "two", names, "pets", "pets_masks")
    splitwise = tmp_path / "three"
    for split in ("train", "test"):
        own = {n.partition("/")[2]: s for n, s in names.items() if n.startswith(split)}
        write_masks(splitwise / split, own)
    for spec in (inside, f"{apart}/pets::{apart}/pets_masks", splitwise):
        splits = load(spec, kind="segmentation", ignore=3)
        assert splits.classes == ("1", "2")
        assert splits.legend == Legend((1, 2), 3)
        assert (len(splits["train"]), len(splits["test"])) == (2, 1)
        expected = np.where(image_with_mask(3)[1] == 3, 0, image_with_mask(3)[1])
        assert np.array_equal(np.asarray(splits["test"].mask(0)), expected)


def _break(root: Path, how: str) -> None:
    if how == "missing":
        (root / "masks" / "2.png").unlink()
    elif how == "twice":
        Image.fromarray(image_with_mask(1)[1]).save(root / "masks" / "1.bmp")
    elif how == "no masks":
        for path in (root / "masks").iterdir():
            path.unlink()
        (root / "masks").rmdir()
    elif how == "no images":
        for path in (root / "images").iterdir():
            path.unlink()
    elif how == "ignored":
        for path in (root / "masks").iterdir():
            Image.fromarray(np.ones((20, 24), dtype=np.uint8)).save(path)
    elif how == "colours":
        for path in (root / "masks").iterdir():
            Image.fromarray(image_with_mask(1)[0]).save(path)
    elif how == "photographs":
        noise = np.arange(4096, dtype=np.uint16).reshape(64, 64)
        Image.fromarray(noise).save(root / "masks" / "1.png")


@pytest.mark.parametrize(
    ("how", "arguments", "sentence"),
    [
        ("missing", {}, r"images/2\.png has no mask"),
        ("twice", {}, "of the same image"),
        ("no masks", {}, "has no masks"),
        ("no images", {}, "images contains no images"),
        ("ignored", {"ignore": 1}, "the masks hold nothing but 1"),
        ("colours", {}, r"masks/1\.png.*one integer per pixel"),
        ("", {"ignore": 70000}, "70000 is not a value"),
        ("", {"ignore": 3, "values": [1, -2]}, "-2 is not a value"),
        ("photographs", {}, "the masks hold 4095 values"),
        ("", {"classes": ["a"], "ignore": 3}, "1 names for 2 classes"),
    ],
)
def test_wrong_masks_are_refused(
    tmp_path: Path, how: str, arguments: dict[str, Any], sentence: str
) -> None:
    root = write_masks(tmp_path, {"1": 1, "2": 2})
    _break(root, how)
    with pytest.raises(EngramError, match=sentence):
        load(root, kind="segmentation", **arguments)


def test_masks_without_splits_can_be_used_as_any_split(tmp_path: Path) -> None:
    root = write_masks(tmp_path, {"1": 1, "2": 2})
    splits = load(root, kind="segmentation", ignore=3, split="val", splits={"val": "x"})
    assert sample_names(splits["val"]) == [str(root / "images" / f"{i}.png") for i in (1, 2)]
    assert splits.train is None


def test_two_folders_have_to_be_folders(tmp_path: Path) -> None:
    root = write_masks(tmp_path, {"1": 1})
    for spec, sentence in (
        (f"{root}/images::{root}/nothing", "nothing is not a folder"),
        (
            f"{root}/nothing::{root}/masks",
            "nothing is not a folder",
        ),
    ):
        with pytest.raises(EngramError, match=sentence):
            load(spec, kind="segmentation")


# What phones and computers put into folders


def phone_folder(root: Path) -> Path:
    """Photographs as phones store them, and what phones and computers put next to them."""
    cats, dogs = root / "cats", root / "dogs"
    for folder in (cats, dogs):
        write_image(folder / "IMG_0001.JPG")
        (folder / "IMG_0002.HEIC").write_bytes(encoded("HEIF", 6))
        (folder / "PXL_0003.avif").write_bytes(encoded("AVIF"))
        write_image(folder / "IMG-0004.webp")
        Image.new("RGBA", (12, 10), (255, 0, 0, 128)).save(folder / "Screenshot.PNG")
        (folder / "IMG_0002.MOV").write_bytes(b"film")  # of a Live Photo
        (folder / "Thumbs.db").write_bytes(b"x")
        (folder / ".DS_Store").write_bytes(b"x")
        (folder / "._IMG_0001.JPG").write_bytes(b"AppleDouble")
        write_image(folder / "@eaDir" / "IMG_0001.JPG")
    write_image(root / "IMG_0009.JPG")
    (root / ".DS_Store").write_bytes(b"x")
    return root


def test_a_folder_of_phone_photographs_is_read_and_the_rest_is_counted(tmp_path: Path) -> None:
    pytest.importorskip("pillow_heif")
    splits = load(phone_folder(tmp_path))
    assert splits.classes == ("cats", "dogs")
    assert len(splits["train"]) == 10
    assert all(read_image(splits["train"].read(i)).mode == "RGB" for i in range(10))
    expected = {".mov": 2, ".db": 2, "hidden": 5, "outside of the class folders": 1}
    assert splits.left_out == expected
    assert splits.ignored == 10


def test_without_pillow_heif_photographs_are_counted_and_said_how_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pillow_heif")  # makes the photographs
    monkeypatch.setattr("engram.data.folders.can_read_heic", lambda: False)
    root = phone_folder(tmp_path)
    install = "pip install pillow-heif"
    with pytest.warns(Notice, match=f"Left out: 2 HEIC images; .*{install}"):
        splits = load(root)
    assert len(splits["train"]) == 8
    assert splits.left_out["HEIC"] == 2
    for path in root.glob("cats/*"):
        if path.is_file() and path.suffix != ".HEIC":
            path.unlink()
    with pytest.raises(EngramError, match=rf"cats has 1 HEIC image, such as .*HEIC, .*{install}"):
        load(root)


def test_images_next_to_masks_are_not_two_classes(tmp_path: Path) -> None:
    write_masks(tmp_path, {"1": 1, "2": 2})
    with pytest.raises(EngramError, match="as data for segmentation has"):
        load(tmp_path)


# Good images, and others


def write_defects(root: Path, names: dict[str, int]) -> Path:
    for folder, count in names.items():
        for i in range(count):
            write_image(root / folder / f"{i:03}.png")
    return root


@pytest.mark.parametrize("folder", ["", "good", "train/good", "train", "Normal"])
def test_good_images_are_in_a_folder_as_they_are_or_in_one_that_says_so(
    tmp_path: Path, folder: str
) -> None:
    write_defects(tmp_path, {folder: 3})
    splits = load(tmp_path, kind="anomaly")
    assert splits.classes == ("anomalous",)
    assert splits["train"].labels.tolist() == [0, 0, 0]
    assert list(splits.datasets) == ["train"]


def test_folders_beside_good_ones_are_to_test_with(tmp_path: Path) -> None:
    splits = load(write_defects(tmp_path, {"good": 3, "crack": 2, "hole": 1}), kind="anomaly")
    assert splits["train"].labels.tolist() == [0] * 3
    assert splits["test"].labels.tolist() == [1] * 3


def test_masks_of_defects_are_those_of_mvtec(tmp_path: Path) -> None:
    write_defects(tmp_path, {"train/good": 2, "test/good": 1, "test/crack": 1})
    (tmp_path / "ground_truth/crack").mkdir(parents=True)
    width, height = Image.open(tmp_path / "test/crack/000.png").size
    mask = np.zeros((height, width), dtype=np.uint8)
    mask[2:5, 3:9] = 255
    Image.fromarray(mask).save(tmp_path / "ground_truth/crack/000_mask.png")
    splits = load(tmp_path, kind="anomaly")
    test = splits["test"]
    assert splits["train"].masks is None
    assert test.labels.tolist() == [1, 0]
    assert np.array_equal(np.asarray(test.mask(0)) - 1, np.where(mask > 0, 1, 2))
    assert not (np.asarray(test.mask(1)) - 1).any()


def test_without_a_mask_of_every_defect_there_are_none(tmp_path: Path) -> None:
    write_defects(tmp_path, {"train/good": 2, "test/crack": 2, "ground_truth/crack": 1})
    write_image(tmp_path / "test/good/000.png")
    assert load(tmp_path, kind="anomaly")["test"].masks is None


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({"train/good": 2, "train/crack": 1}, "good images alone"),
        ({"cat": 2, "dog": 2}, "none of them is called good"),
        ({"train/other": 2}, "none of them is called good"),
    ],
)
def test_images_that_are_not_good_are_not_learned(
    tmp_path: Path, names: dict[str, int], reason: str
) -> None:
    with pytest.raises(EngramError, match=reason):
        load(write_defects(tmp_path, names), kind="anomaly")


def test_a_table_says_what_is_good(tmp_path: Path) -> None:
    write_defects(tmp_path, {"": 4})
    rows = [f"{i:03}.png,{label},{split}" for i, (label, split) in enumerate(
        [("ok", "train"), ("OK", "train"), ("good", "test"), ("bent", "test")]
    )]  # fmt: skip
    (tmp_path / "t.csv").write_text("path,label,split\n" + "\n".join(rows) + "\n")
    splits = load(tmp_path / "t.csv", kind="anomaly")
    assert (splits["train"].labels.tolist(), splits["test"].labels.tolist()) == ([0, 0], [0, 1])
    (tmp_path / "all.csv").write_text("path\n000.png\n001.png\n")
    assert load(tmp_path / "all.csv", kind="anomaly")["train"].labels.tolist() == [0, 0]
