"""Embeddings of images, the backbone's and that of every task, and files of them."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from engram.data.datasets import Dataset, Splits, load
from engram.data.folders import SUFFIXES, image_paths
from engram.data.loader import Loader
from engram.data.source import Files
from engram.errors import EngramError
from engram.images.preprocessing import normalise
from engram.inference.engine import TorchEngine, on_cpu
from engram.model import MemoryViT
from engram.util.cpus import DECODERS
from engram.util.files import replaced
from engram.util.parquet import pyarrow
from engram.util.processes import ProcessGroup
from engram.util.tensors import to_device
from engram.util.text import utf8

Data = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Splits | Dataset
Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Images as vectors: entry i of every field is about the same image.

    Attributes:
        images: Paths of the images, or the names of their rows.
        splits: The split of each, or `""` if the data has none.
        labels: The class of each, or `""` if it has no single class.
        vectors: By name, `"base"` for the backbone: float32 (images, numbers).
        failed: The images that could not be read, which have no entry: path and reason.
    """

    images: tuple[str, ...]
    splits: tuple[str, ...]
    labels: tuple[str, ...]
    vectors: dict[str, Vectors]
    failed: dict[str, str] = field(default_factory=dict)


def embed(
    model: MemoryViT,
    data: Data,
    *,
    tasks: Sequence[str] | None = None,
    batch: int = 64,
    workers: int = DECODERS,
    exact: bool = False,
    device: str = "auto",
    precision: str = "fp32",
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Embeddings:
    """Turn images into vectors, one of the backbone and one of every task per image.

    `MemoryViT.embed` says what the vectors are.

    Args:
        model: The model.
        data: A folder of images, the path of an image or a list of these; or labelled data, as
            `engram.data.load` takes it or gave it, of which all splits are embedded.
        tasks: The tasks to embed for; `"base"` is the backbone. By default `"base"` and all tasks.
        batch: Images in a batch.
        workers: Processes that decode images.
        exact: Make every vector bit for bit what it would be without the other tasks.
        device: Where to compute: `auto`, `cpu`, `cuda`, `cuda:1`, `mps` or `xpu`.
        precision: `fp32`, or `bf16` or `fp16`, whose vectors differ a little.
        progress: Called with the number of images done and of all.

    Returns:
        The vectors, and for each the path, split and label of its image. Images that cannot be
        read are left out and listed in `failed`.

    Raises:
        EngramError: A task is not attached, the data cannot be found, or no image can be read.

    Examples:
        >>> found = engram.embed(model, "photos", tasks=["base"], workers=0)
        >>> found.vectors["base"].shape, found.labels[0]
        ((16, 192), 'rose')
    """
    engine = TorchEngine(model, exact, ProcessGroup(device).device, precision)
    datasets = find_datasets(data)
    parts = list(embed_batches(engine, datasets, tasks, batch, workers, progress))
    failed = {path: reason for part in parts for path, reason in part.failed.items()}
    good = [part for part in parts if part.images]
    if not good:
        raise EngramError(f"No image can be read: {next(iter(failed.values()))}.")
    return Embeddings(
        tuple(image for part in good for image in part.images),
        tuple(split for part in good for split in part.splits),
        tuple(label for part in good for label in part.labels),
        {name: np.concatenate([p.vectors[name] for p in good]) for name in good[0].vectors},
        failed,
    )


def embed_batches(
    engine: TorchEngine,
    datasets: Sequence[Dataset],
    tasks: Sequence[str] | None = None,
    batch: int = 64,
    workers: int = DECODERS,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Iterator[Embeddings]:
    """The embeddings of one batch after the other; one without a readable image has none."""
    preprocessing, names = engine.model.preprocessing, engine.model.embedding_names(tasks)
    done, total = 0, sum(map(len, datasets))
    for dataset in datasets:
        only = "images" if dataset.masks else ""
        loader = Loader(dataset, preprocessing, batch, workers=workers, only=only)
        for part in loader:
            vectors: dict[str, Vectors] = {}
            if len(part.indices):
                pixels = normalise(to_device(part.images, engine.device), preprocessing)
                found = on_cpu(engine.embed(pixels, names))
                vectors = {name: rows.numpy() for name, rows in found.items()}
            samples = part.indices.tolist()
            failed = [dataset.sample_name(i) for i in part.failed.tolist()]
            yield Embeddings(
                tuple(dataset.sample_name(i) for i in samples),
                (dataset.split,) * len(samples),
                tuple(_label(dataset, i) for i in samples),
                vectors,
                {name: loader.bad[name] for name in failed},
            )
            done += len(samples) + len(failed)
            progress(done, total)


def _label(dataset: Dataset, i: int) -> str:
    """The class of a sample, if it has one."""
    if dataset.masks is not None or dataset.labels.ndim != 1 or not dataset.classes:
        return ""
    return dataset.classes[int(dataset.labels[i])]


def find_datasets(data: Data, read: Callable[[str], Splits] = load) -> list[Dataset]:
    """Datasets to embed: every split of labelled data, which `read` loads, or images alone.

    A folder that holds images itself, next to folders or not, is one of images without labels.
    """
    if isinstance(data, (str, os.PathLike)):
        path = Path(data)
        files = [one for one in path.iterdir() if one.is_file()] if path.is_dir() else [path]
        if any(one.suffix.lower() in SUFFIXES for one in files):
            return [_unlabelled([data])]
        data = read(os.fspath(data))
    if isinstance(data, Dataset):
        return [data]
    if not isinstance(data, Splits):
        return [_unlabelled(data)]
    found = data.datasets.values()
    return [replace(one, split="") for one in found] if data.unsplit else list(found)


def _unlabelled(images: Iterable[str | os.PathLike[str]]) -> Dataset:
    """The images at these paths, and in these folders."""
    paths = image_paths(images)
    labels = np.zeros(len(paths), dtype=np.int64)
    return Dataset("images", "", (), labels, Files(tuple(paths)), np.arange(len(paths)))


# Files of embeddings, written batch by batch

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
    """A writer that adds vectors to a file, which appears whole at the end, or not at all."""
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
    """An archive of arrays, one after the other: vectors wait in files of their own for it."""
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
