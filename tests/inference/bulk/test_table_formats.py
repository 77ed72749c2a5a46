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

COLUMNS = {
    "image": "text",
    "flowers": "text",
    "flowers.probability": "number",
    "flowers.top": {"class": "text", "probability": "number"},
    "seen": "texts",
    "flowers.logits": "halves",
    "error": "text",
}


def rows(first: int) -> list[dict[str, Any]]:
    answer = [{"class": 'a "rose"', "probability": 0.75}]
    return [
        {"image": f"{first}.png", "flowers": 'a "rose"', "flowers.probability": 0.75,
         "flowers.top": answer, "seen": ["sea", "sand"],
         "flowers.logits": np.array([1.5, np.inf], np.float16), "error": None},
        {"image": f"{first + 1}.png", "error": "1.png: not an image"},
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".csv"])
def test_parts_joined_are_the_rows_of_all(tmp_path: Path, suffix: str) -> None:
    table = table_format(suffix, COLUMNS)
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
    table_format(".parquet", COLUMNS).write(tmp_path / "a.parquet", rows(0))
    first, second = pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert first["flowers.top"] == [{"class": 'a "rose"', "probability": 0.75}]
    assert (first["flowers"], first["flowers.probability"]) == ('a "rose"', 0.75)
    assert first["flowers.logits"] == [1.5, np.inf]
    assert second == {**dict.fromkeys(first), "image": "1.png", "error": "1.png: not an image"}
    table_format(".jsonl", COLUMNS).write(tmp_path / "a.jsonl", rows(0))
    line, _ = (tmp_path / "a.jsonl").read_text().splitlines()
    assert json.loads(line)["flowers.logits"] == [1.5, None]


def test_all_formats_have_the_same_columns(tmp_path: Path) -> None:
    paths = [tmp_path / f"a{suffix}" for suffix in (".parquet", ".jsonl", ".csv")]
    for path in paths:
        table_format(path.suffix, COLUMNS).write(path, [{**rows(0)[0], "error": "no"}])
    assert pyarrow.parquet.read_table(paths[0]).column_names == list(COLUMNS)
    assert json.loads(paths[1].read_text()).keys() == COLUMNS.keys()
    with paths[2].open(newline="") as file:
        [line] = csv.DictReader(file)
    assert list(line) == list(COLUMNS)
    assert line["seen"] == "sea; sand"
    assert json.loads(line["flowers.top"]) == rows(0)[0]["flowers.top"]


def test_other_formats_are_refused() -> None:
    with pytest.raises(EngramError, match=r"\.parquet, \.jsonl or \.csv"):
        table_format(".xlsx", COLUMNS)


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-1", "@x", " =1", "＝1", "\t=1", "\x1b[31mred", "a\nb"]
)
def test_a_cell_of_csv_is_no_formula_and_no_escape(tmp_path: Path, text: str) -> None:
    """What a file or a class is called reaches a spreadsheet and a terminal as text."""
    table, path = table_format(".csv", COLUMNS), tmp_path / "a.csv"
    answer = {"flowers": text, "flowers.probability": -0.5, "seen": [text]}
    table.write(path, [{"image": text, **answer, "error": f"{text}: no"}, {"image": "-"}])
    assert table.rows(path) == 2
    assert table.images(path) == [table.image_cell(text), "'-"]
    with path.open(newline="") as file:
        row = next(csv.DictReader(file))
    for cell in (row["image"], row["flowers"], row["seen"]):
        assert cell.isprintable()
        assert not cell.strip().startswith(tuple("=+-@＝"))
    assert float(row["flowers.probability"]) == -0.5


def test_names_that_are_no_formula_stay_as_they_are(tmp_path: Path) -> None:
    table, path = table_format(".csv", COLUMNS), tmp_path / "a.csv"
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
        table_format(suffix, COLUMNS).images(part)


def test_a_part_that_is_damaged_further_on_makes_no_table(tmp_path: Path) -> None:
    table = table_format(".parquet", COLUMNS)
    part = tmp_path / "part-000000.parquet"
    table.write(part, rows(0))
    data = bytearray(part.read_bytes())
    data[data.index(b"rose") - 20 : data.index(b"rose") + 20] = bytes(40)
    part.write_bytes(data)
    with pytest.raises(EngramError, match="is damaged"), replaced(tmp_path / "a") as file:
        table.join([part], file)
