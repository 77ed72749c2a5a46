"""Data for training and evaluation: what was found (`load`), and batches of it (`Loader`).

A `Dataset` lists samples and decodes none of them. A `Loader` reads them in worker processes;
what it yields depends on its seed, the epoch and the samples alone, never on the workers.
"""

import hashlib
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import DataLoader

from engram import sources
from engram.errors import LOST_WORKER, EngramError, is_lost_worker
from engram.images import (
    AUGMENTATIONS,
    BadImage,
    Legend,
    Preprocessing,
    image_size,
    mask_view,
    read_image,
    read_mask,
    training_view,
)
from engram.kinds import IGNORED, KINDS
from engram.labels import LABELS
from engram.regimes import TaskSpec
from engram.sources import PRESETS, SPLITS, Columns, Picture, Rows, Source

Integers: TypeAlias = npt.NDArray[np.int64]
#: A user's own view: an RGB picture in, a float tensor (3, H, W) or a uint8 array (H, W, 3) out.
Transform: TypeAlias = Callable[[Image.Image], "torch.Tensor | npt.NDArray[Any]"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples of one split: pictures that are read one at a time, and a label for each.

    `labels[i]` is the class of sample i, a number below `len(classes)`; for multilabel a row of
    0 and 1, for regression a row of numbers, one a class. For segmentation it is empty: there
    `mask` has the classes of the pixels.
    """

    name: str
    split: str
    classes: tuple[str, ...]
    labels: npt.NDArray[Any]
    rows: Rows
    order: Integers  # sample -> row
    kind: str = "classification"
    masks: Rows | None = None
    legend: Legend | None = None  # of the masks

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, i: int) -> Picture:
        """The picture of sample i, not yet decoded: `images.read_image` takes it."""
        return self.rows.read(int(self.order[i]))

    def where(self, i: int) -> str:
        """What to call sample i: its path, or its row."""
        return self.rows.where(int(self.order[i]))

    def mask(self, i: int) -> Image.Image:
        """The mask of sample i: class + 1 a pixel, 0 for ignored. A bad one is a BadImage."""
        assert self.masks is not None
        assert self.legend is not None
        row = int(self.order[i])
        size = image_size(self.read(i), name=self.where(i))
        return self.legend.read(self.masks.read(row), size, self.masks.where(row))

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
    kind: str = "classification"
    legend: Legend | None = None  # of segmentation: what the values in masks mean

    def __getitem__(self, split: str) -> Dataset:
        """The split by name; an EngramError if there is none."""
        dataset = getattr(self, split) if split in SPLITS else None
        if not isinstance(dataset, Dataset):
            have = ", ".join(name for name in SPLITS if getattr(self, name) is not None)
            raise EngramError(f"{self.name} has no {split} split; it has {have}")
        return dataset

    @property
    def task(self) -> dict[str, Any]:
        """What a task for this data is: arguments of `MemoryViT.add_task`."""
        terms: dict[str, Any] = {"classes": self.classes, "kind": self.kind}
        if self.legend is not None:
            terms |= {"values": self.legend.values, "ignore": self.legend.ignore}
        return terms

    def with_validation(self, share: float = 0.1, seed: int = 0) -> "Splits":
        """These splits, with a validation split taken from the training data if there is none."""
        if self.val is not None:
            return self
        train, val = split_validation(self["train"], share, seed)
        return replace(self, train=train, val=val)


def split_validation(train: Dataset, share: float = 0.1, seed: int = 0) -> tuple[Dataset, Dataset]:
    """(train, val): a stratified share of the training data, the same for the same seed.

    Every class keeps at least one training image; where a picture has no one class, pictures are
    drawn from all of them. The choice depends on the samples' names, not
    on their order. If no sample can be spared, an EngramError.
    """
    if not 0 < share < 1:
        raise EngramError(f"the validation share must lie between 0 and 1, not {share}")
    by_name = np.array(sorted(range(len(train)), key=train.where), dtype=np.int64)
    strata = train.labels if train.labels.ndim == 1 else np.zeros(len(train), dtype=np.int64)
    by_class = by_name[np.argsort(strata[by_name], kind="stable")]
    sizes = np.bincount(strata, minlength=len(train.classes))
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
    kind: str = "classification",
    classes: Sequence[str] | None = None,
    like: TaskSpec | None = None,
    image: str | None = None,
    label: str | Sequence[str] | None = None,
    split_column: str | None = None,
    splits: Mapping[str, str] | None = None,
    values: Sequence[int] | None = None,
    ignore: int = IGNORED,
) -> Splits:
    """The dataset that `spec` names, as train / val / test; what is wrong with it is a sentence.

    `spec` is a folder of class folders, a .csv/.tsv/.jsonl/.parquet table, an .npz file,
    "hf:owner/name[:config]" or "hf:" and a local path, "digits", or a preset ("cifar100", or
    "cifar100:PATH" for a copy on disk). For segmentation it is a folder with images/ and masks/,
    "PICTURES::MASKS" for two folders of the same shape, a table, an .npz file or a Hub dataset.

    With `split`, only that split is kept, and a source without splits becomes it as a whole.
    `classes` fixes the names and their order. `like`, a task's spec, fixes all that data must have
    to fit a task already learned. `image`, `label` (one or several; of a mask too) and
    `split_column` name columns; `splits` maps train/val/test to the names that the source uses.
    `values` are what the classes are in masks, if not all that occur, and `ignore` is the value
    of pixels that count nowhere.
    """
    if like is not None:
        kind, classes, ignore = like.kind, like.classes, like.ignore
        values = like.values or None
    if kind not in KINDS:
        raise EngramError(f"There is no kind of task {kind!r}; choose one of {', '.join(KINDS)}.")
    for name in (*(splits or ()), *([split] if split else ())):
        if name not in SPLITS:
            raise EngramError(f"unknown split {name!r}; it can be train, val or test")
    text = os.fspath(spec)
    given = (label,) if isinstance(label, str) else tuple(label or ())
    wanted = Columns(image, given, split_column, splits or {}, kind, classes or ())
    found = _find(text, wanted)
    legend = None
    if wanted.masks:
        legend = Legend(tuple(values or _values(text, found, ignore)), ignore)
        found.classes = [str(value) for value in legend.values]
        if classes is not None and len(classes) != len(legend.values):
            raise EngramError(
                f"{text}: {len(classes)} names for {len(legend.values)} classes (the values "
                f"{', '.join(found.classes[:8])} in its masks); name each, or give their values"
            )
    train = found.splits.get("train")
    labels = train.labels if train else [x for s in found.splits.values() for x in s.labels]
    names = list(classes or LABELS[kind].classes(text, found.columns, labels, found.classes))
    if split is not None:
        if found.unsplit:
            found.splits = {split: found.splits["train"]}
        if split not in found.splits:
            have = ", ".join(found.splits)
            raise EngramError(f"{text} has no {split} split; it has {have}")
        found.splits = {split: found.splits[split]}
    return _numbered(text, found, names, kind, legend)


def _find(text: str, names: Columns) -> Source:
    kind, _, rest = text.partition(":")
    path = Path(text)
    if names.masks and "::" in text:
        pictures, _, masks = text.partition("::")
        if not Path(pictures).is_dir():
            raise EngramError(f"{pictures} is not a folder; give PICTURES::MASKS, two folders")
        return sources.mask_folders(Path(pictures), Path(masks))
    if kind == "hf" and rest:
        return sources.hub(rest, names)
    if (text == "digits" or text in PRESETS) and path.exists():
        raise EngramError(
            f"{text} is a dataset's name and a path here; write ./{text} for the path"
        )
    if text == "digits":
        return sources.digits(names)
    if kind in PRESETS:
        return sources.preset(kind, rest, names)
    if not path.exists():
        raise EngramError(
            f"{text} does not exist; data can be a folder, a table, an .npz file, "
            f"hf:owner/name, digits, or one of {', '.join(PRESETS)}"
        )
    if path.is_dir():
        return sources.mask_folders(path, None) if names.masks else sources.folder(path, names)
    if path.suffix.lower() in sources.TABLES:
        return sources.table(path, names)
    if path.suffix.lower() == ".npz":
        return sources.arrays(path, names)
    raise EngramError(
        f"{text} is not data of a known kind: give a folder of class folders, "
        f"a table ({', '.join(sources.TABLES)}) or an .npz file"
    )


def _values(name: str, source: Source, ignore: int) -> list[int]:
    """The values that the training masks hold, sorted, but the ignored one: every mask is read."""
    found = source.splits.get("train") or next(iter(source.splits.values()))
    masks = found.masks
    assert masks is not None

    def of(row: int) -> npt.NDArray[np.bool_]:
        try:
            mask = read_mask(masks.read(row), name=masks.where(row))
        except BadImage:  # will be told when it is to be learned from
            return np.zeros(2**16, dtype=bool)
        return np.bincount(mask.ravel().clip(0, 2**16 - 1), minlength=2**16) > 0

    seen = np.zeros(2**16, dtype=bool)
    with ThreadPoolExecutor(4) as pool:
        for one in pool.map(of, range(len(masks))):
            seen |= one
    seen[ignore] = False
    values = [int(value) for value in np.flatnonzero(seen)]
    if not values:
        raise EngramError(f"{name}: the masks hold nothing but {ignore}, which is ignored")
    if len(values) > IGNORED:
        raise EngramError(
            f"{name}: the masks hold {len(values)} values, and {IGNORED} classes are the most; "
            "are they masks, with a class for every pixel?"
        )
    return values


def _numbered(
    name: str, source: Source, classes: Sequence[str], kind: str, legend: Legend | None
) -> Splits:
    """Number the labels by class; a label that is no class is an EngramError."""
    if len(set(classes)) != len(classes):
        raise EngramError(f"{name}: the list of classes names one of them twice")
    datasets = {}
    for split, found in source.splits.items():
        where = f"{name}: the {split} split"
        if not found.labels:
            raise EngramError(f"{where} is empty")
        labels = LABELS[kind].numbered(where, found.labels, classes)
        order = np.arange(len(labels))
        datasets[split] = Dataset(
            name, split, tuple(classes), labels, found.rows, order, kind, found.masks, legend
        )
    return Splits(
        name,
        tuple(classes),
        **datasets,
        augment=source.augment,
        flip=source.flip,
        ignored=source.ignored,
        kind=kind,
        legend=legend,
    )


# -------------------------------------------------------------------------------- batches


def _as_it_is(result: Any) -> Any:
    return result


def _leave_signals(worker: int) -> None:
    """Ctrl-C and SIGTERM may reach every process, but when to stop is for the main one to say.

    A terminal, torchrun and schedulers of clusters end whole groups. The second SIGTERM ends a
    worker: it comes from a main process that leaves without it.
    """

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, first)


def shuffled(count: int, seed: int, epoch: int) -> Integers:
    """The order of an epoch's samples."""
    return np.random.default_rng([seed, epoch]).permutation(count)


class Batch(NamedTuple):
    """Pictures as uint8 (B, H, W, 3), or as a user's transform made them, with their samples.

    `failed` are the samples of this batch whose picture could not be read: they are absent from
    the other fields. Training goes on without them; evaluation counts them. The labels of
    segmentation are masks (B, H, W), uint8: classes, and 255 where a pixel is ignored.
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
    otherwise. `transform` replaces the views. `only` leaves out the pictures ("masks") or the
    masks ("images"), for what needs one of them. `bad` lists the pictures that could not be read so
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
        only: str = "",
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
        if transform is not None and dataset.masks is not None:
            raise EngramError("a transform of your own changes pictures but not their masks")
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
                only,
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
                images, masks, indices, failures = result
                labels = self.dataset.labels[indices] if masks is None else masks
                self.bad.update({self.dataset.where(i): reason for i, reason in failures})
                yield Batch(
                    torch.from_numpy(images),
                    torch.from_numpy(labels),
                    torch.from_numpy(indices),
                    torch.tensor([i for i, _ in failures], dtype=torch.int64),
                )
        except RuntimeError as error:
            if not is_lost_worker(error):
                raise
            raise EngramError(LOST_WORKER) from error


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
    only: str = ""

    def __getitem__(self, job: _Job) -> Any:
        epoch, samples = job
        views, masks, good, failures = [], [], [], []
        masked = self.dataset.masks is not None and self.only != "images"
        try:
            for i in samples.tolist():
                try:
                    view = self._view(epoch, i) if self.only != "masks" else None
                    mask = self._mask(epoch, i) if masked else None
                    good.append(i)
                except BadImage as error:
                    failures.append((i, str(error)))
                    continue
                views += [view] if view is not None else []
                masks += [mask] if mask is not None else []
            stacked = self._stack_masks(masks) if masked else None
            return self._stack(views), stacked, np.array(good, dtype=np.int64), failures
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

    def _mask(self, epoch: int, i: int) -> npt.NDArray[np.uint8]:
        """The same part of the mask as `_view` shows of the picture."""
        return mask_view(
            self.dataset.mask(i),
            self.preprocessing,
            np.random.default_rng([self.seed, epoch, i]),
            self.augment,
            flip=self.flip,
            min_area=self.min_area,
        )

    def _stack_masks(self, masks: list[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
        return np.stack(masks) if masks else np.zeros((0, *self.preprocessing.size), np.uint8)

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
