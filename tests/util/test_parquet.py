"""A parquet file is read in batches that memory has room for, whatever its footer says."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest

from engram.util.parquet import batches

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def written(table: dict[str, Any], **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(table), file, **options)
    return file


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("encoding", [None, "PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_every_row_is_read_once_and_in_order(version: str, encoding: str | None) -> None:
    images = [os.urandom(i) for i in range(2000)]
    options: dict[str, Any] = {"data_page_version": version, "row_group_size": 700}
    if encoding:
        options |= {"column_encoding": {"image": encoding}, "use_dictionary": False}
    file = written({"image": images, "n": range(2000)}, **options)
    assert [v for batch in batches(file, ["image"]) for v in batch.column(0).to_pylist()] == images
    assert sum(len(batch) for batch in batches(file)) == 2000


def test_a_value_that_rows_repeat_makes_small_batches() -> None:
    cells = pyarrow.DictionaryArray.from_arrays([0] * 300, [b"\0" * 4_000_000])
    options = {"dictionary_pagesize_limit": 2**30, "store_schema": False}
    first = next(batches(written({"image": cells}, **options)))
    assert first.nbytes < 100_000_000


def test_a_page_that_becomes_far_larger_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.util.parquet._SMALL", 1_000_000)
    file = written({"image": [b"\0" * 3_000_000]}, compression="zstd", use_dictionary=False)
    with pytest.raises(ValueError, match="decompressed"):
        next(batches(file))


def test_damaged_pages_are_a_value_error() -> None:
    whole = written({"image": ["a.png", "b.png"]}).getvalue()
    for damage in (b"\0" * 16, b"\xff" * 16, b"\x19" * 16):
        with pytest.raises((ValueError, OSError)):
            list(batches(io.BytesIO(whole[:4] + damage + whole[20:])))
