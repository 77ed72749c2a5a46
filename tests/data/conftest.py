"""Datasets on disk that several tests read."""

import sys
from pathlib import Path

import pytest
from tests.support.datasets import write_class_folders, write_image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_class_folders(tmp_path / "colours", {"blue": 10, "green": 10, "red": 10})


@pytest.fixture(scope="session")
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
            {"bytes": write_image(root / f"{i}.png", names[c], i).read_bytes(), "path": None}
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
