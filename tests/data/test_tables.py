"""Tables of paths and labels are read; a wrong table or row is refused with its reason."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.datasets import sample_names
from tests.support.masks import write_masks

from engram.data.datasets import load
from engram.errors import EngramError

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
    expected = {"train": ["blue/000.png", "red/000.png"], "val": ["red/001.png"]}
    expected["test"] = ["blue/001.png"]
    for split, paths in expected.items():
        assert sample_names(splits[split]) == [str(folder / path) for path in paths]
    assert [splits[split].labels.tolist() for split in expected] == [[0, 1], [1], [0]]


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
    assert sample_names(splits.train) == [str(folder / r["path"]) for r in RECORDS[:2]]
    assert sample_names(splits.test) == [str(folder / r["path"]) for r in RECORDS[2:]]
    with pytest.raises(
        EngramError,
        match="no column 'image'",
    ):
        load(table)
    with pytest.raises(EngramError, match="no column 'label'"):
        load(table, image="photo")
    with pytest.raises(EngramError, match="column 'fold', has the splits a, b"):
        load(table, image="photo", label="what", split_column="fold")
    with pytest.raises(EngramError, match="has no column 'kind'"):
        load(table, image="photo", label="kind")
    with pytest.raises(EngramError, match="has no split 'c'"):
        load(table, image="photo", label="what", split_column="fold", splits={"train": "c"})


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_the_separator_and_the_byte_order_mark_are_found(
    folder: Path, suffix: str, separator: str, encoding: str
) -> None:
    lines = [
        ["path", "label", "note"],
        ["blue/000.png", '"blue; or, as they say,\tazure"', "ä"],
        ["red/000.png", '"a ""red"" one"', ""],
    ]
    table = folder / f"table{suffix}"
    table.write_text("\r\n".join(separator.join(line) for line in lines), encoding=encoding)
    assert load(table).classes == ('a "red" one', "blue; or, as they say,\tazure")


def test_rows_of_a_group_are_held_out_together(folder: Path) -> None:
    records = [
        {"path": f"{c}/000.png", "label": c, "patient": f"{c}{i // 4}" if i < 20 else ""}
        for c in ("blue", "red")
        for i in range(24)
    ]
    table = write_table(folder / "table.csv", records)
    train = load(table, group_column="patient")["train"]
    assert train.groups is not None
    assert len(set(train.groups.tolist())) == 2 * (5 + 4)  # an empty cell belongs to nobody
    splits = load(table, group_column="patient")
    learned, held_out = splits.with_validation(0.25), splits.with_folds(5).folds
    assert held_out is not None
    for group in set(train.groups.tolist()):
        assert len(set(held_out.train[train.groups == group].tolist())) == 1
    both = [learned["train"].groups, learned["val"].groups]
    assert not set(np.asarray(both[0]).tolist()) & set(np.asarray(both[1]).tolist())
    with pytest.raises(EngramError, match="no column 'doctor'"):
        load(table, group_column="doctor")
    with pytest.raises(EngramError, match="group column"):
        load(folder, group_column="patient")


def test_number_labels_are_sorted_as_numbers(folder: Path) -> None:
    records = [{"path": "red/000.png", "label": label} for label in (10, 9, 2)]
    assert load(write_table(folder / "table.jsonl", records)).classes == ("2", "9", "10")
    long = "1" * 5000  # more digits than Python converts
    records = [{"path": "red/000.png", "label": label} for label in (long, "10", "007", "9")]
    assert load(write_table(folder / "table.csv", records)).classes == ("007", "9", "10", long)


def test_a_number_that_no_float_holds_is_refused(folder: Path) -> None:
    table = write_table(folder / "table.jsonl", [{"path": "red/000.png", "label": 10**400}])
    with pytest.raises(EngramError, match=r"row 1: .* expected a number"):
        load(table, kind="regression")


def test_a_table_may_have_many_columns(folder: Path) -> None:
    many = {f"column {i}": "1" for i in range(30_000)}
    records = [{**record, **many} for record in RECORDS[:2]]
    assert load(write_table(folder / "table.csv", records)).classes == ("blue", "red")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"path": "red/gone.png"}, r"row 2: .*gone\.png does not exist"),
        ({"path": ""}, "row 2: the column 'path' is empty"),
        ({"label": ""}, "row 2: the column 'label' is empty"),
    ],
)
def test_a_wrong_row_is_refused(folder: Path, change: dict[str, str], sentence: str) -> None:
    records = [RECORDS[0], RECORDS[1] | change, RECORDS[2]]
    with pytest.raises(EngramError, match=sentence):
        load(write_table(folder / "table.csv", records))


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("t.csv", "", "is an empty table"),
        (
            "t.csv",
            "path,label\na.png,red,or blue",
            "line 2: more fields",
        ),
        ("t.csv", 'path,label\n"a.png,red\n', "line 2: unexpected end of data"),
        ("t.jsonl", "{]", "cannot be read as a table"),
        ("t.jsonl", '{"path": 1}\n\n{"path": 2', "line 3 column 11"),
        ("t.jsonl", "[1]", "line 1.*an object"),
        ("t.parquet", "no parquet", "cannot be read as a table"),
        (
            "t.csv",
            f"image,label,{'x' * 200_000}\na.png,red,1\n",
            "as a table: line 1: field larger",
        ),
        ("t.csv", ",".join(map(str, range(100_000))) + "\n1\n", "no column 'image'.* and .* more"),
        ("t.jsonl", "[" * 100_000, "line 1: it is nested too deeply"),
        ("t.jsonl", "9" * 5000, "line 1: a number in it has thousands of digits"),
    ],
    ids=itertools.count(),
)
def test_a_broken_table_is_refused(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(text)
    with pytest.raises(EngramError, match=sentence) as caught:
        load(tmp_path / name)
    assert len(str(caught.value)) < 1000


def test_a_table_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes("path,label\na.png,grün\n".encode("cp1252"))
    with pytest.raises(EngramError, match="is not text in UTF-8"):
        load(tmp_path / "t.csv")


def test_a_table_can_have_a_column_of_masks(tmp_path: Path) -> None:
    write_masks(tmp_path, {"1": 1, "2": 2})
    path = tmp_path / "t.csv"
    path.write_text("image,mask\nimages/1.png,masks/1.png\nimages/2.png,masks/2.png\n")
    splits = load(path, kind="segmentation", ignore=3, classes=["near", "far"], values=[2, 1])
    assert splits.classes == ("near", "far")
    assert np.asarray(splits["train"].mask(0)).max() == 2
    assert np.asarray(splits["train"].mask(0))[-1, -1] == 1  # the value 2 is the first class
    path.write_text("image,mask\nimages/1.png,masks/9.png\n")
    with pytest.raises(EngramError, match=r"row 1: .*masks/9\.png does not exist"):
        load(path, kind="segmentation")


def test_a_small_table_does_not_become_gigabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path of a megabyte in the dictionary, and rows that repeat it: 500 bytes in the file."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("engram.data.tables.MAX_SMALL", 20_000_000)
    cells = pyarrow.DictionaryArray.from_arrays([0] * 3000, ["x" * 1_000_000])
    table = pyarrow.table({"path": cells, "label": ["a", "b"] * 1500})
    parquet.write_table(table, tmp_path / "t.parquet", compression="zstd", store_schema=False)
    assert (tmp_path / "t.parquet").stat().st_size < 10_000
    with pytest.raises(EngramError, match="expands"):
        load(tmp_path / "t.parquet")


def test_a_table_names_files_and_no_devices_or_addresses(folder: Path) -> None:
    for path in ("/dev/zero", "http://127.0.0.1:9/x.png", "file:///etc/hostname"):
        with pytest.raises(EngramError, match=r"row 1: .* does not exist"):
            load(write_table(folder / "table.csv", [{"path": path, "label": "blue"}]))
