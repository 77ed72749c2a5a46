"""Files of embeddings, written batch by batch: parquet tables and .npz archives."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
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
def vector_file(path: Path) -> Iterator[Callable[[Embeddings], None]]:
    """What adds vectors to a file; the file appears whole at the end, or not at all."""
    with replaced(path) as file, _FORMATS[path.suffix.lower()](file) as add:
        yield add


def _texts(part: Embeddings) -> dict[str, tuple[str, ...]]:
    images = tuple(utf8(name).decode() for name in part.images)
    return dict(zip(TEXTS, (images, part.splits, part.labels), strict=True))


@contextmanager
def _parquet(file: IO[bytes]) -> Iterator[Callable[[Embeddings], None]]:
    """A table: texts as strings, vectors as lists of a fixed length of float32."""
    arrow, parquet = pyarrow(_PURPOSE), pyarrow(_PURPOSE, "pyarrow.parquet")
    writer: Any = None

    def add(part: Embeddings) -> None:
        nonlocal writer
        columns = {name: arrow.array(texts) for name, texts in _texts(part).items()}
        for name, rows in part.vectors.items():
            flat = arrow.array(rows.reshape(-1))
            columns[name] = arrow.FixedSizeListArray.from_arrays(flat, rows.shape[1])
        table = arrow.table(columns)
        writer = writer or parquet.ParquetWriter(file, table.schema)
        writer.write_table(table)

    try:
        yield add
    finally:  # else it would write to the closed file when it is collected
        if writer is not None:
            writer.close()


@contextmanager
def _npz(file: IO[bytes]) -> Iterator[Callable[[Embeddings], None]]:
    """An archive of arrays, as `np.load` reads it, without pickle.

    An archive holds one array after the other, so vectors wait in files of their own.
    """
    listed: dict[str, list[str]] = {name: [] for name in TEXTS}
    waiting: dict[str, tuple[IO[bytes], int]] = {}  # numbers, and how many of them are a vector
    with ExitStack() as stack:

        def add(part: Embeddings) -> None:
            for name, texts in _texts(part).items():
                listed[name] += texts
            for name, rows in part.vectors.items():
                if name not in waiting:
                    waiting[name] = stack.enter_context(TemporaryFile()), rows.shape[1]
                waiting[name][0].write(rows.astype("<f4").tobytes())

        yield add
        with zipfile.ZipFile(file, "w") as archive:
            for name, texts in listed.items():
                with archive.open(f"{name}.npy", "w") as member:
                    np.save(member, np.array(texts, dtype=str), allow_pickle=False)
            for name, (numbers, width) in waiting.items():
                shape = len(listed["path"]), width
                header = {"descr": "<f4", "fortran_order": False, "shape": shape}
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array_header_1_0(member, header)
                    numbers.seek(0)
                    shutil.copyfileobj(numbers, member)


_FORMATS = {".parquet": _parquet, ".npz": _npz}
