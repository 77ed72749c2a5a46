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
from engram.inference.bulk.table_formats import table_format
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
    table = table_format(suffix, KINDS, VECTORS)
    parts = [tmp_path / f"part-{i:06}{suffix}" for i in range(3)]
    for i, part in enumerate(parts):
        table.write(part, rows(10 * i))
    assert table.images(parts[1]) == ["10.png", "11.png"]
    whole = tmp_path / f"whole{suffix}"
    with replaced(whole) as file:
        table.join(parts, file)
    assert table.images(whole) == ["0.png", "1.png", "10.png", "11.png", "20.png", "21.png"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*(p.name for p in parts), whole.name]


def test_parquet_has_types_and_json_has_null(tmp_path: Path) -> None:
    table_format(".parquet", KINDS, VECTORS).write(tmp_path / "a.parquet", rows(0))
    first, second = pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert first["flowers"] == [{"class": 'a "rose"', "probability": 0.75}]
    assert first["flowers.logits"] == [1.5, np.inf]
    assert second == {**dict.fromkeys(first), "image": "1.png", "error": "1.png: not an image"}
    table_format(".jsonl", KINDS, VECTORS).write(tmp_path / "a.jsonl", rows(0))
    line, _ = (tmp_path / "a.jsonl").read_text().splitlines()
    assert json.loads(line)["flowers.logits"] == [1.5, None]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".csv"])
def test_a_score_is_a_column_of_numbers(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    table = table_format(suffix, KINDS, VECTORS, ["flowers.familiarity"])
    table.write(path, [{**rows(0)[0], "flowers.familiarity": -1.5}, rows(0)[1]])
    if suffix == ".parquet":
        assert pyarrow.parquet.read_table(path).column("flowers.familiarity").to_pylist() == [
            -1.5,
            None,
        ]
    elif suffix == ".csv":
        with path.open(newline="") as file:
            assert [row["flowers.familiarity"] for row in csv.DictReader(file)] == ["-1.5", ""]
    else:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line.get("flowers.familiarity") for line in lines] == [-1.5, None]


def test_other_formats_are_refused() -> None:
    with pytest.raises(EngramError, match=r"\.parquet, \.jsonl or \.csv"):
        table_format(".xlsx", KINDS, VECTORS)


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-1", "@x", " =1", "＝1", "\t=1", "\x1b[31mred", "a\nb"]
)
def test_a_cell_of_csv_is_no_formula_and_no_escape(tmp_path: Path, text: str) -> None:
    """What a file or a class is called reaches a spreadsheet and a terminal as text."""
    table, path = table_format(".csv", KINDS, {}), tmp_path / "a.csv"
    answer = [{"class": text, "probability": 0.5}]
    table.write(path, [{"image": text, "flowers": answer, "error": f"{text}: no"}, {"image": "-"}])
    assert table.rows(path) == 2
    assert table.images(path) == [table.image_cell(text), "'-"]
    with path.open(newline="") as file:
        row = next(csv.DictReader(file))
    for cell in (row["image"], row["flowers"]):
        assert cell.isprintable()
        assert not cell.strip().startswith(tuple("=+-@＝"))
    assert float(row["flowers.probability"]) == 0.5


def test_names_that_are_no_formula_stay_as_they_are(tmp_path: Path) -> None:
    table, path = table_format(".csv", KINDS, {}), tmp_path / "a.csv"
    names = ["a b.png", '/photos/ä, "ö".png', "a=b-c.png", "s3://x/y.png"]
    table.write(path, [{"image": name} for name in names])
    assert table.images(path) == names


DAMAGE = {
    ".parquet": [b"", b"PAR1", b"PAR1PAR1"],
    ".jsonl": [b"\xff", b"[]\n", b"{}\n", b"null\n", b'{"image":', b"[" * 100_000],
    ".csv": [b"", b"\xff\n", b"[]\n1\n", b"image,x\na.png"],
}


@pytest.mark.parametrize(("suffix", "data"), [(s, data) for s in DAMAGE for data in DAMAGE[s]])
def test_a_damaged_part_is_a_sentence(tmp_path: Path, suffix: str, data: bytes) -> None:
    part = tmp_path / f"part-000000{suffix}"
    part.write_bytes(data)
    with pytest.raises(EngramError, match="is damaged"):
        table_format(suffix, KINDS, VECTORS).images(part)


def test_a_part_that_is_damaged_further_on_makes_no_table(tmp_path: Path) -> None:
    table = table_format(".parquet", KINDS, VECTORS)
    part = tmp_path / "part-000000.parquet"
    table.write(part, rows(0))
    data = bytearray(part.read_bytes())
    data[data.index(b"rose") - 20 : data.index(b"rose") + 20] = bytes(40)
    part.write_bytes(data)
    with pytest.raises(EngramError, match="is damaged"), replaced(tmp_path / "a") as file:
        table.join([part], file)
