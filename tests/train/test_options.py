"""What flags say about recipes, data and names."""

from pathlib import Path

import pytest
from PIL import Image

from engram import EngramError
from engram.cli import main as cli
from engram.train.options import DataOptions, named, recipe_from, split_data
from engram.train.recipe import RECIPES


def test_an_unknown_recipe_is_a_sentence() -> None:
    with pytest.raises(EngramError, match="There is no recipe 'best'"):
        recipe_from("best", {})


def test_flags_change_the_named_recipe_and_nothing_else() -> None:
    recipe = recipe_from("paper", {"steps": 10, "lr": None, "batch": None})
    assert recipe == RECIPES["paper"].but(steps=10)
    assert recipe_from("paper", {"epochs": 5}).steps == 0  # else its 20,000 would count
    assert recipe_from("paper", {"epochs": 5, "steps": 7}).steps == 7


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--kind", "poetry"], "no kind of task 'poetry'"),
        (["--kind", "regression", "--ignore", "3"], "--ignore is about masks"),
        (["--classes", "a=1,b=2"], "--classes with = is about masks"),
        (["--kind", "segmentation", "--classes", "a=1,b"], "give every class the value"),
    ],
)
def test_flags_that_make_no_sense_are_a_sentence(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fit", "digits", "--task", "t", "-o", "t.safetensors", *flags]) == 2
    assert sentence in capsys.readouterr().err


def test_a_name_is_what_stands_before_the_first_equals_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert named("flowers=photos/a=b") == ("flowers", "photos/a=b")
    assert named("photos") == ("", "photos")
    Path("lr=0.1").touch()
    assert named("lr=0.1") == ("", "lr=0.1")  # a path that exists
    assert named("lr=0.1", ["lr"]) == ("lr", "0.1")  # unless the name is known


def test_a_split_is_what_stands_behind_the_last_colon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text, expected in {
        "photos": ("photos", "test"),
        "photos:val": ("photos", "val"),
        "photos:Validation": ("photos", "val"),
        "a:b/photos:train": ("a:b/photos", "train"),
        r"C:\photos": (r"C:\photos", "test"),
        r"C:\photos:val": (r"C:\photos", "val"),
        "hf:owner/name": ("hf:owner/name", "test"),
        "hf:owner/name:config": ("hf:owner/name:config", "test"),
        "hf:owner/name:config:val": ("hf:owner/name:config", "val"),
        "hf:val": ("hf:val", "test"),
        "cifar100:./copy:val": ("cifar100:./copy", "val"),
        "pets::masks": ("pets::masks", "test"),
        "pets::test": ("pets::test", "test"),
        "pets::masks:val": ("pets::masks", "val"),
    }.items():
        assert split_data(text, "test") == expected
    Path("photos:val").touch()
    assert split_data("photos:val", "test") == ("photos:val", "test")  # a path that exists


def test_folders_have_no_columns(tmp_path: Path) -> None:
    for options in (DataOptions(image_column="photo"), DataOptions(split_column="fold")):
        with pytest.raises(EngramError, match="has no column"):
            options.load(str(tmp_path))


def test_classes_of_masks_have_values(tmp_path: Path) -> None:
    for i in range(10):
        for folder, value in (("images", 80), ("masks", 1 + i % 2)):
            (tmp_path / folder).mkdir(exist_ok=True)
            Image.new("L", (16, 16), value).save(tmp_path / folder / f"{i}.png")
    options = DataOptions(kind="segmentation", classes=" pet=1, sky=2", ignore=7)
    splits = options.load(str(tmp_path))
    assert splits.classes == ("pet", "sky")
    assert splits.legend is not None
    assert splits.legend.values == (1, 2)
    assert splits.legend.ignore == 7


def test_labels_are_in_the_columns_that_are_named(tmp_path: Path) -> None:
    rows = [f"{i}.png,{i % 2},{i % 3 == 0:d}" for i in range(12)]
    for i in range(12):
        Image.new("L", (16, 16), i).save(tmp_path / f"{i}.png")
    (tmp_path / "t.csv").write_text("\n".join(["path,red,large", *rows]) + "\n")
    splits = DataOptions(kind="multilabel", label="red, large").load(str(tmp_path / "t.csv"))
    assert splits.classes == ("red", "large")
    assert DataOptions(label="red").load(str(tmp_path / "t.csv")).classes == ("0", "1")
