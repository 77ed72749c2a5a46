"""Embeddings of images: the backbone's, and that of every task."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

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
from engram.util.processes import ProcessGroup
from engram.util.tensors import to_device

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
