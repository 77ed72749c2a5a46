"""Tables of answers: parts that are whole by themselves, and one table of all of them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from engram import EngramError
from engram.inference.bulk.tables import part_name, table_for
from engram.util.files import replaced

KINDS = {"flowers": "classification", "age": "regression"}
VECTORS = {"flowers.logits": True}


def rows(first: int) -> list[dict[str, Any]]:
    answer = [{"class": 'a "rose"', "probability": 0.75}]
    return [
        {"image": f"{first}.png", "flowers": answer, "age": [{"name": "age", "value": 3.5}],
         "flowers.logits": np.array([1.5, np.inf], np.float16), "error": None},
        {"image": f"{first + 1}.png", "error": "1.png: not an image"},
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".csv"])
def test_parts_joined_are_the_rows_of_all(tmp_path: Path, suffix: str) -> None:
    table = table_for(suffix, KINDS, VECTORS)
    parts = [tmp_path / part_name(i, suffix) for i in range(3)]
    for i, part in enumerate(parts):
        table.write(part, rows(10 * i))
    assert table.images(parts[1]) == ["10.png", "11.png"]
    whole = tmp_path / f"whole{suffix}"
    with replaced(whole) as file:
        table.join(parts, file)
    assert table.images(whole) == ["0.png", "1.png", "10.png", "11.png", "20.png", "21.png"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*(p.name for p in parts), whole.name]


def test_parquet_has_types_and_json_has_null(tmp_path: Path) -> None:
    table_for(".parquet", KINDS, VECTORS).write(tmp_path / "a.parquet", rows(0))
    first, second = pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert first["flowers"] == [{"class": 'a "rose"', "probability": 0.75}]
    assert first["flowers.logits"] == [1.5, np.inf]
    assert second == {**dict.fromkeys(first), "image": "1.png", "error": "1.png: not an image"}
    table_for(".jsonl", KINDS, VECTORS).write(tmp_path / "a.jsonl", rows(0))
    line, _ = (tmp_path / "a.jsonl").read_text().splitlines()
    assert json.loads(line)["flowers.logits"] == [1.5, None]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".csv"])
def test_a_score_is_a_column_of_numbers(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    table = table_for(suffix, KINDS, VECTORS, ["flowers.score"])
    table.write(path, [{**rows(0)[0], "flowers.score": -1.5}, rows(0)[1]])
    if suffix == ".parquet":
        assert pyarrow.parquet.read_table(path).column("flowers.score").to_pylist() == [-1.5, None]
    elif suffix == ".csv":
        with path.open(newline="") as file:
            assert [row["flowers.score"] for row in csv.DictReader(file)] == ["-1.5", ""]
    else:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line.get("flowers.score") for line in lines] == [-1.5, None]


def test_other_formats_are_refused() -> None:
    with pytest.raises(EngramError, match=r"\.parquet, \.jsonl or \.csv"):
        table_for(".xlsx", KINDS, VECTORS)
