"""Data for training and evaluation: what was found (`load`), and batches of it (`Loader`).

A `Dataset` lists samples and decodes none of them. A `Loader` reads them in worker processes;
what it yields depends on its seed, the epoch and the samples alone, never on the workers.
"""

import hashlib
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import DataLoader

from engram import sources
from engram.errors import EngramError
from engram.images import (
    AUGMENTATIONS,
    BadImage,
    Preprocessing,
    read_image,
    training_view,
)
from engram.sources import PRESETS, SPLITS, Columns, Picture, Rows, Source

Integers: TypeAlias = npt.NDArray[np.int64]
#: A user's own view: an RGB picture in, a float tensor (3, H, W) or a uint8 array (H, W, 3) out.
Transform: TypeAlias = Callable[[Image.Image], "torch.Tensor | npt.NDArray[Any]"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples of one split: pictures that are read one at a time, and a label for each.

    `labels[i]` is the class of sample i, a number below `len(classes)`.
    """

    name: str
    split: str
    classes: tuple[str, ...]
    labels: Integers
    rows: Rows
    order: Integers  # sample -> row

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, i: int) -> Picture:
        """The picture of sample i, not yet decoded: `images.read_image` takes it."""
        return self.rows.read(int(self.order[i]))

    def where(self, i: int) -> str:
        """What to call sample i: its path, or its row."""
        return self.rows.where(int(self.order[i]))

    def sample_hash(self, i: int) -> str:
        """SHA-256 of the picture's bytes: the same picture has the same hash wherever it lies."""
        picture = self.read(i)
        if isinstance(picture, bytes):
            content = picture
        elif isinstance(picture, str):
            try:
                content = Path(picture).read_bytes()
            except OSError as error:
                raise BadImage(f"{picture}: {error.strerror}") from error
        else:
            content = str(picture.shape).encode() + picture.tobytes()
        return hashlib.sha256(content).hexdigest()

    def subset(self, samples: Sequence[int] | Integers, split: str | None = None) -> "Dataset":
        """Only these samples, in this order; nothing is copied but their numbers."""
        chosen = np.asarray(samples, dtype=np.int64)
        return replace(
            self,
            split=split or self.split,
            labels=self.labels[chosen],
            order=self.order[chosen],
        )


@dataclass(frozen=True)
class Splits:
    """What `load` found: the splits it has (None for those it has not) and how to augment them.

    `augment` and `flip` are what suits this data ("inception" or "pad-crop", mirrored or not);
    `ignored` counts the files that are no images by their name.
    """

    name: str
    classes: tuple[str, ...]
    train: Dataset | None = None
    val: Dataset | None = None
    test: Dataset | None = None
    augment: str = "inception"
    flip: bool = True
    ignored: int = 0

    def __getitem__(self, split: str) -> Dataset:
        """The split by name; an EngramError if there is none."""
        dataset = getattr(self, split) if split in SPLITS else None
        if not isinstance(dataset, Dataset):
            have = ", ".join(name for name in SPLITS if getattr(self, name) is not None)
            raise EngramError(f"{self.name} has no {split} split; it has {have}")
        return dataset

    def with_validation(self, share: float = 0.1, seed: int = 0) -> "Splits":
        """These splits, with a validation split taken from the training data if there is none."""
        if self.val is not None:
            return self
        train, val = split_validation(self["train"], share, seed)
        return replace(self, train=train, val=val)


def split_validation(train: Dataset, share: float = 0.1, seed: int = 0) -> tuple[Dataset, Dataset]:
    """(train, val): a stratified share of the training data, the same for the same seed.

    Every class keeps at least one training image. The choice depends on the samples' names, not
    on their order. If no sample can be spared, an EngramError.
    """
    if not 0 < share < 1:
        raise EngramError(f"the validation share must lie between 0 and 1, not {share}")
    by_name = np.array(sorted(range(len(train)), key=train.where), dtype=np.int64)
    by_class = by_name[np.argsort(train.labels[by_name], kind="stable")]
    sizes = np.bincount(train.labels, minlength=len(train.classes))
    groups = np.split(by_class, np.cumsum(sizes)[:-1])
    wanted, spare = share * sizes, np.maximum(sizes - 1, 0)
    take = np.minimum(np.floor(wanted).astype(np.int64), spare)
    # What rounding down left over goes to the classes that lost most by it, ties by the seed.
    tie = np.random.default_rng([seed]).random(len(groups))
    for c in np.lexsort((tie, np.floor(wanted) - wanted)):
        if take.sum() < round(share * len(train)) and take[c] < spare[c]:
            take[c] += 1
    chosen = [
        np.random.default_rng([seed, c]).permutation(group)[: take[c]]
        for c, group in enumerate(groups)
    ]
    held_out = np.sort(np.concatenate(chosen))
    if len(held_out) == 0:
        raise EngramError(
            f"{train.name} is too small to hold out {share:.0%} for validation: "
            f"{len(train)} images in {len(train.classes)} classes; add images or a val split"
        )
    kept = np.setdiff1d(np.arange(len(train)), held_out)
    return train.subset(kept, "train"), train.subset(held_out, "val")


# -------------------------------------------------------------------------------- loading


def load(
    spec: str | os.PathLike[str],
    *,
    split: str | None = None,
    classes: Sequence[str] | None = None,
    image: str | None = None,
    label: str | None = None,
    split_column: str | None = None,
    splits: Mapping[str, str] | None = None,
) -> Splits:
    """The dataset that `spec` names, as train / val / test; what is wrong with it is a sentence.

    `spec` is a folder of class folders, a .csv/.tsv/.jsonl/.parquet table, an .npz file,
    "hf:owner/name[:config]" or "hf:" and a local path, "digits", or a preset ("cifar100", or
    "cifar100:PATH" for a copy on disk).

    With `split`, only that split is kept, and a source without splits becomes it as a whole.
    `classes` fixes the names and their order, for data that must fit a task already learned.
    `image`, `label` and `split_column` name columns; `splits` maps train/val/test to the names
    that the source uses.
    """
    for name in (*(splits or ()), *([split] if split else ())):
        if name not in SPLITS:
            raise EngramError(f"unknown split {name!r}; it can be train, val or test")
    text = os.fspath(spec)
    found = _find(text, Columns(image, label, split_column, splits or {}))
    names = list(classes or _class_names(text, found))
    if split is not None:
        if found.unsplit:
            found.splits = {split: found.splits["train"]}
        if split not in found.splits:
            have = ", ".join(found.splits)
            raise EngramError(f"{text} has no {split} split; it has {have}")
        found.splits = {split: found.splits[split]}
    return _numbered(text, found, names)


def _find(text: str, names: Columns) -> Source:
    kind, _, rest = text.partition(":")
    path = Path(text)
    if kind == "hf" and rest:
        return sources.hub(rest, names)
    if (text == "digits" or text in PRESETS) and path.exists():
        raise EngramError(
            f"{text} is a dataset's name and a path here; write ./{text} for the path"
        )
    if text == "digits":
        return sources.digits()
    if kind in PRESETS:
        return sources.preset(kind, rest, names)
    if not path.exists():
        raise EngramError(
            f"{text} does not exist; data can be a folder, a table, an .npz file, "
            f"hf:owner/name, digits, or one of {', '.join(PRESETS)}"
        )
    if path.is_dir():
        return sources.folder(path)
    if path.suffix.lower() in sources.TABLES:
        return sources.table(path, names)
    if path.suffix.lower() == ".npz":
        return sources.arrays(path)
    raise EngramError(
        f"{text} is not data of a known kind: give a folder of class folders, "
        f"a table ({', '.join(sources.TABLES)}) or an .npz file"
    )


def _class_names(name: str, source: Source) -> Sequence[str]:
    """The classes as the source lists them, or those of its training data, sorted."""
    train = source.splits.get("train")
    labels = train.labels if train else [x for s in source.splits.values() for x in s.labels]
    classes = source.classes or sorted(set(labels), key=_class_order)
    if len(classes) == 1:
        raise EngramError(f"{name} has only one class ({classes[0]}); a task needs at least two")
    return classes


def _class_order(label: str) -> tuple[int, int, str]:
    """Numbers by their value, then names by the alphabet."""
    is_number = label.isascii() and label.isdigit()
    return (0, int(label), label) if is_number else (1, 0, label)


def _numbered(name: str, source: Source, classes: Sequence[str]) -> Splits:
    """Number the labels by class; a label that is no class is an EngramError."""
    number = {label: i for i, label in enumerate(classes)}
    if len(number) != len(classes):
        raise EngramError(f"{name}: the list of classes names one of them twice")
    datasets = {}
    for split, found in source.splits.items():
        if not found.labels:
            raise EngramError(f"{name}: the {split} split is empty")
        strange = sorted(set(found.labels) - set(number))
        if strange:
            raise EngramError(
                f"{name}: the {split} split has the label {strange[0]!r}, which is none of the "
                f"{len(classes)} classes"
                + (f" (nor are {len(strange) - 1} others)" if len(strange) > 1 else "")
            )
        labels = np.array([number[label] for label in found.labels], dtype=np.int64)
        order = np.arange(len(labels))
        datasets[split] = Dataset(name, split, tuple(classes), labels, found.rows, order)
    return Splits(
        name,
        tuple(classes),
        **datasets,
        augment=source.augment,
        flip=source.flip,
        ignored=source.ignored,
    )


# -------------------------------------------------------------------------------- batches


def _as_it_is(result: Any) -> Any:
    return result


def _leave_signals(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal, but when to stop is for the main one to say."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def shuffled(count: int, seed: int, epoch: int) -> Integers:
    """The order of an epoch's samples."""
    return np.random.default_rng([seed, epoch]).permutation(count)


class Batch(NamedTuple):
    """Pictures as uint8 (B, H, W, 3), or as a user's transform made them, with their samples.

    `failed` are the samples of this batch whose picture could not be read: they are absent from
    the other fields. Training goes on without them; evaluation counts them.
    """

    images: torch.Tensor
    labels: torch.Tensor
    indices: torch.Tensor
    failed: torch.Tensor


_Job: TypeAlias = tuple[int, Integers]  # an epoch, and the samples of one batch


@dataclass
class _Jobs:
    """What a loader has to read now; the DataLoader asks for it at the start of every epoch."""

    now: list[_Job]

    def __iter__(self) -> Iterator[_Job]:
        return iter(self.now)

    def __len__(self) -> int:
        return len(self.now)


class Loader:
    """Batches of a dataset, the same for the same settings whatever the number of workers.

    Order and augmentation of a sample depend on (`seed`, epoch, sample) only. `batch_size` is
    the batch of all `world` processes together; process `rank` gets every world-th sample of it,
    so the processes together see the batches that one alone would see.

    In mode "train" samples are shuffled and augmented, in mode "eval" neither; `shuffle` says
    otherwise. `transform` replaces the views. `bad` lists the pictures that could not be read so
    far, by name, with the reason; what to do about them is the caller's decision.
    """

    def __init__(
        self,
        dataset: Dataset,
        preprocessing: Preprocessing,
        batch_size: int,
        *,
        mode: str = "eval",
        augment: str = "inception",
        flip: bool = True,
        min_area: float = 0.08,
        transform: Transform | None = None,
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool = False,
        workers: int = 0,
        rank: int = 0,
        world: int = 1,
        start_method: str | None = None,
    ) -> None:
        if mode not in ("train", "eval"):
            raise EngramError(f"mode is {mode!r}; it can be train or eval")
        if augment not in AUGMENTATIONS:
            raise EngramError(f"augment is {augment!r}; it can be {', '.join(AUGMENTATIONS)}")
        if batch_size < 1 or workers < 0 or seed < 0 or not 0 <= rank < world:
            raise EngramError(
                "batch_size must be at least 1, workers and seed at least 0 and rank below world; "
                f"got {batch_size}, {workers}, {seed}, {rank} of {world}"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.bad: dict[str, str] = {}
        self._seed = seed
        self._shuffle = mode == "train" if shuffle is None else shuffle
        self._drop_last = drop_last
        self._rank, self._world = rank, world
        self._jobs = _Jobs([])
        self._batches: DataLoader[Any] = DataLoader(
            _Reader(  # type: ignore[arg-type]  # a mapping from jobs to batches is all it takes
                dataset,
                preprocessing,
                augment if mode == "train" else "none",
                flip,
                min_area,
                transform,
                seed,
            ),
            batch_size=None,
            sampler=self._jobs,
            num_workers=workers,
            collate_fn=_as_it_is,
            persistent_workers=workers > 0,
            multiprocessing_context=start_method if workers > 0 else None,
            generator=torch.Generator(),  # its own: the global one belongs to training
            worker_init_fn=_leave_signals,
        )

    def __len__(self) -> int:
        """Batches in an epoch."""
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch(0)

    def epoch(
        self, epoch: int = 0, *, skip: int = 0, samples: Sequence[int] | Integers | None = None
    ) -> Iterator[Batch]:
        """The batches of one epoch from batch `skip` on; those before it are not even read.

        `samples` replaces the epoch's order: only these, in this order.
        """
        if samples is not None:
            order = np.asarray(samples, dtype=np.int64)
        elif self._shuffle:
            order = shuffled(len(self.dataset), self._seed, epoch)
        else:
            order = np.arange(len(self.dataset))
        starts = range(0, len(order), self.batch_size)
        if self._drop_last:
            starts = starts[: len(order) // self.batch_size]
        return self._read(
            [
                (epoch, order[start : start + self.batch_size][self._rank :: self._world])
                for start in starts[skip:]
            ]
        )

    def _read(self, jobs: list[_Job]) -> Iterator[Batch]:
        self._jobs.now = jobs
        try:
            for result in self._batches:
                if isinstance(result, str):
                    raise EngramError(result)
                images, indices, failures = result
                self.bad.update({self.dataset.where(i): reason for i, reason in failures})
                yield Batch(
                    torch.from_numpy(images),
                    torch.from_numpy(self.dataset.labels[indices]),
                    torch.from_numpy(indices),
                    torch.tensor([i for i, _ in failures], dtype=torch.int64),
                )
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise EngramError(
                "a process that reads images was ended by the system, most likely for want of "
                "memory; use fewer workers or a smaller batch"
            ) from error


@dataclass(frozen=True)
class _Reader:
    """Turns a job into pixels, in a worker process.

    Results are numpy arrays, which travel through a pipe: tensors would need shared memory, which
    containers often have too little of, and running out of it kills the process.
    """

    dataset: Dataset
    preprocessing: Preprocessing
    augment: str
    flip: bool
    min_area: float
    transform: Transform | None
    seed: int

    def __getitem__(self, job: _Job) -> Any:
        epoch, samples = job
        views, good, failures = [], [], []
        try:
            for i in samples.tolist():
                try:
                    views.append(self._view(epoch, i))
                    good.append(i)
                except BadImage as error:
                    failures.append((i, str(error)))
            return self._stack(views), np.array(good, dtype=np.int64), failures
        except EngramError as error:  # raised in a worker, it would arrive as a traceback
            return str(error)

    def _view(self, epoch: int, i: int) -> npt.NDArray[Any]:
        source, name = self.dataset.read(i), self.dataset.where(i)
        if self.transform is None:
            rng = np.random.default_rng([self.seed, epoch, i])
            return training_view(
                source,
                self.preprocessing,
                rng,
                self.augment,
                flip=self.flip,
                min_area=self.min_area,
                name=name,
            )
        picture = read_image(source, name=name)
        with _seeded([self.seed, epoch, i]):
            return np.asarray(self.transform(picture))

    def _stack(self, views: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        if not views:
            return np.zeros((0, *self.preprocessing.size, 3), dtype=np.uint8)
        kinds = sorted({f"{view.dtype} {view.shape}" for view in views})
        view = views[0]
        channels = view.shape[0 if view.dtype.kind == "f" else -1] if view.ndim == 3 else 0
        if len(kinds) > 1 or channels != 3 or view.dtype not in (np.uint8, np.float32):
            raise EngramError(
                "a transform must give float32 (3, height, width) or uint8 (height, width, 3), "
                f"the same for every picture; got {' and '.join(kinds)}"
            )
        return np.stack(views)


@contextmanager
def _seeded(seed: list[int]) -> Iterator[None]:
    """Python's, numpy's and torch's own random numbers from this seed, and then as before."""
    number = int(np.random.SeedSequence(seed).generate_state(1)[0])
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 (transforms use it)
    with torch.random.fork_rng(devices=[]):
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002
        torch.manual_seed(number)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002
