"""Files of embeddings, written batch by batch: parquet tables and .npz archives."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from engram.errors import EngramError
from engram.inference.embed import Embeddings
from engram.util.files import replaced
from engram.util.parquet import pyarrow
from engram.util.text import utf8

_PURPOSE = "A parquet file"
TEXTS = ("path", "split", "label")  # the columns next to the vectors


def check_vector_file(path: Path) -> None:
    """Refuse, before the work, a file that cannot be written."""
    if path.suffix.lower() not in _FORMATS:
        raise EngramError(f"{path} is no file for vectors; give one that ends in .parquet or .npz.")
    if path.suffix.lower() == ".parquet":
        pyarrow(_PURPOSE, "pyarrow.parquet")


def check_names(names: Sequence[str]) -> None:
    """Refuse a task that has the name of another column."""
    for name in set(names) & set(TEXTS):
        raise EngramError(
            f"The task {name!r} has the name of a column of the file; choose other tasks with "
            "--task."
        )


@contextmanager
def vector_file(path: Path) -> Iterator[_Parquet | _Npz]:
    """A file of vectors, by its ending; it appears whole at the end, or not at all."""
    with replaced(path) as file:
        vectors = _FORMATS[path.suffix.lower()](file)
        try:
            yield vectors
            vectors.finish()
        except BaseException:
            vectors.discard()
            raise


def _texts(part: Embeddings) -> dict[str, tuple[str, ...]]:
    images = tuple(utf8(name).decode() for name in part.images)
    return dict(zip(TEXTS, (images, part.splits, part.labels), strict=True))


class _Parquet:
    """A table: texts as strings, vectors as lists of a fixed length of float32."""

    def __init__(self, file: IO[bytes]) -> None:
        self._arrow, self._parquet = pyarrow(_PURPOSE), pyarrow(_PURPOSE, "pyarrow.parquet")
        self._file = file
        self._writer: Any = None

    def add(self, part: Embeddings) -> None:
        columns = {name: self._arrow.array(texts) for name, texts in _texts(part).items()}
        for name, rows in part.vectors.items():
            flat = self._arrow.array(rows.reshape(-1))
            columns[name] = self._arrow.FixedSizeListArray.from_arrays(flat, rows.shape[1])
        table = self._arrow.table(columns)
        self._writer = self._writer or self._parquet.ParquetWriter(self._file, table.schema)
        self._writer.write_table(table)

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()

    discard = finish  # it would write to the closed file when it is collected


class _Npz:
    """An archive of arrays, as `np.load` reads it, without pickle.

    An archive holds one array after the other, so vectors wait in files of their own.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._texts: dict[str, list[str]] = {name: [] for name in TEXTS}
        self._rows: dict[str, tuple[IO[bytes], int]] = {}  # the waiting numbers, and a row's width

    def add(self, part: Embeddings) -> None:
        for name, texts in _texts(part).items():
            self._texts[name] += texts
        for name, rows in part.vectors.items():
            if name not in self._rows:
                self._rows[name] = tempfile.TemporaryFile(), rows.shape[1]  # noqa: SIM115
            self._rows[name][0].write(rows.astype("<f4").tobytes())

    def finish(self) -> None:
        count = len(self._texts["path"])
        with zipfile.ZipFile(self._file, "w") as archive:
            for name, texts in self._texts.items():
                with archive.open(f"{name}.npy", "w") as member:
                    np.save(member, np.array(texts, dtype=str), allow_pickle=False)
            for name, (waiting, width) in self._rows.items():
                header = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
                with waiting, archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array_header_1_0(member, header)
                    waiting.seek(0)
                    shutil.copyfileobj(waiting, member)

    def discard(self) -> None:
        for waiting, _ in self._rows.values():
            waiting.close()


_FORMATS: dict[str, type[_Parquet | _Npz]] = {".parquet": _Parquet, ".npz": _Npz}
