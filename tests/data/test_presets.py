"""Datasets of the Hub and those known by name are read from copies on disk."""

import json
import sys
from pathlib import Path

import pytest
from tests.support.datasets import COLOURS, sample_names

from engram.data.datasets import load
from engram.data.presets import PRESETS
from engram.errors import EngramError
from engram.images.decode import read_image
from engram.images.views import AUGMENTATIONS


def test_a_hub_dataset_is_read_from_disk(hub: Path) -> None:
    splits = load(f"hf:{hub / 'dict'}")
    assert splits.classes == ("blue", "green", "red")
    assert splits["train"].labels.tolist() == [2, 0, 1, 2]
    assert splits["test"].labels.tolist() == [2, 0]
    assert read_image(splits["train"].read(1)).getpixel((5, 5)) == COLOURS["blue"]
    assert splits["train"].sample_name(1).endswith("dict/train[1]")


def test_another_label_column_can_be_chosen(hub: Path) -> None:
    splits = load(f"hf:{hub / 'dict'}", label="coarse_label")
    assert splits.classes == ("cold", "warm")
    assert splits["train"].labels.tolist() == [1, 0, 0, 1]
    with pytest.raises(EngramError, match="has no column 'label2'"):
        load(f"hf:{hub / 'dict'}", label="label2")


def test_a_hub_dataset_without_splits_can_be_any_split(hub: Path) -> None:
    spec = f"hf:{hub / 'single'}"
    assert load(spec)["train"].labels.tolist() == [2, 0, 1, 2]
    splits = load(spec, split="test")
    assert splits["test"].labels.tolist() == [2, 0, 1, 2]
    assert splits.train is None


def test_parquet_files_are_a_hub_dataset(hub: Path) -> None:
    splits = load(f"hf:{hub / 'parquet'}")
    assert splits["train"].labels.tolist() == splits["val"].labels.tolist() == [2, 0, 1, 2]
    one = hub / "parquet" / "train-00000-of-00001.parquet"
    assert load(f"hf:{one}", split="test")["test"].labels.tolist() == [2, 0, 1, 2]
    with pytest.raises(EngramError, match="holds images, not paths"):
        load(one, image="img")


def test_a_preset_reads_a_copy_on_disk(hub: Path) -> None:
    splits = load(f"cifar100:{hub / 'dict'}")
    assert splits.classes == ("blue", "green", "red")
    assert (splits.augment, splits.flip) == ("pad-crop", True)
    assert splits.val is None


def test_labels_that_are_not_public_are_explained(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"image": datasets.Value("string"), "label": datasets.ClassLabel(2)}
    )
    table = datasets.Dataset.from_dict({"image": ["a", "b"], "label": [-1, -1]}, features=features)
    table.save_to_disk(tmp_path / "secret")
    with pytest.raises(EngramError, match="not public"):
        load(f"hf:{tmp_path / 'secret'}")


def test_a_hub_dataset_that_cannot_be_loaded_is_an_error() -> None:
    pytest.importorskip("datasets")
    with pytest.raises(EngramError, match="hf:owner/name cannot be loaded"):
        load("hf:owner/name")
    with pytest.raises(EngramError, match=r"hf:\./gone does not exist on disk"):
        load("hf:./gone")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EngramError, match="cifar10 needs the package datasets"):
        load("hf:uoft-cs/cifar10")


def test_inaturalist_is_read_from_its_own_annotations(folder: Path) -> None:
    def annotations(samples: list[tuple[str, int]]) -> str:
        return json.dumps(
            {
                "categories": [{"id": 7, "name": "Blue"}, {"id": 3, "name": "Red"}],
                "images": [{"id": i, "file_name": file} for i, (file, _) in enumerate(samples)],
                "annotations": [
                    {"image_id": i, "category_id": c} for i, (_, c) in enumerate(samples)
                ],
            }
        )

    (folder / "train2017.json").write_text(annotations([("red/001.png", 3), ("blue/000.png", 7)]))
    (folder / "val2017.json").write_text(annotations([("red/002.png", 3)]))
    splits = load(f"inaturalist2017:{folder}")
    assert splits.classes == ("Blue", "Red")
    assert sample_names(splits.train) == [str(folder / "blue/000.png"), str(folder / "red/001.png")]
    assert sample_names(splits.test) == [str(folder / "red/002.png")]
    with pytest.raises(EngramError, match="is not on the Hub"):
        load("inaturalist2017")
    for text in ("{}", "[" * 100_000, "9" * 5000):
        (folder / "val2017.json").write_text(text)
        with pytest.raises(EngramError, match="is not an annotation file"):
            load(f"inaturalist2017:{folder}")


def test_every_preset_has_an_augmentation_and_training_data() -> None:
    assert {preset.augment for preset in PRESETS.values()} <= set(AUGMENTATIONS) - {"none"}
    assert all("train" in preset.splits for preset in PRESETS.values())


@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
def test_a_copy_on_disk_that_names_an_address_is_refused(tmp_path: Path, name: str) -> None:
    path = '"http:\\x2f/127.0.0.1:9/x.parquet"'  # as YAML may write it
    card = f"a: &a [{path}]\nconfigs:\n- config_name: default\n  data_files: *a\n"
    (tmp_path / name).write_text(f"---\n{card}---\n" if name == "README.md" else card)
    with pytest.raises(EngramError, match="not fetched"):
        load(f"hf:{tmp_path}")
