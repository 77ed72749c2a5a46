"""Batches of a dataset, read in worker processes.

The batches depend on the seed, the epoch and the samples only, not on the number of workers.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import DataLoader

from engram.data.datasets import Dataset
from engram.data.folds import Integers
from engram.errors import LOST_WORKER, EngramError, flag, is_lost_worker
from engram.images.decode import BadImage, read_image
from engram.images.masks import mask_view
from engram.images.preprocessing import Preprocessing
from engram.images.views import AUGMENTATIONS, Augmentation, training_view
from engram.util.worker_processes import begin_worker

#: A user's own view: an RGB image in, a float tensor (3, H, W) or a uint8 array (H, W, 3) out.
Transform: TypeAlias = Callable[[Image.Image], "torch.Tensor | npt.NDArray[Any]"]


def shuffled(count: int, seed: int, epoch: int) -> Integers:
    """The order of the samples in an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def balanced(labels: Integers, seed: int, epoch: int) -> Integers:
    """Draw as many samples as there are, every class equally often, in random order.

    The samples of a class are all taken before one is repeated. Where the classes do not divide
    the number, chance decides which get one more.
    """
    random = np.random.default_rng([seed, epoch])
    classes = random.permutation(np.unique(labels))
    taken = []
    for place, label in enumerate(classes):
        count = (len(labels) + len(classes) - 1 - place) // len(classes)
        own = np.flatnonzero(labels == label)
        rounds = [random.permutation(own) for _ in range(-(-count // len(own)))]
        taken.append(np.concatenate(rounds)[:count])
    return random.permutation(np.concatenate(taken))


def _occurrences(order: Integers) -> Integers:
    """Number of times that each sample came before in this order."""
    by_sample = np.argsort(order, kind="stable")
    found = order[by_sample]
    first = np.flatnonzero(np.diff(found, prepend=-1))  # of each sample, in sorted order
    lengths = np.diff(np.append(first, len(order)))
    occurrences = np.empty(len(order), dtype=np.int64)
    occurrences[by_sample] = np.arange(len(order)) - np.repeat(first, lengths)
    return occurrences


class LabelledBatch(NamedTuple):
    """Images as uint8 (B, H, W, 3), or as a user's transform returned them, with their labels.

    The labels of segmentation are masks, uint8 (B, H, W): classes, and 255 for ignored pixels.
    """

    images: torch.Tensor
    labels: torch.Tensor
    indices: torch.Tensor  # the numbers of the samples
    failed: torch.Tensor  # samples whose image could not be read, which are not in the others


#: An epoch, the samples of one batch, and how often each of them came before in the epoch.
_Job: TypeAlias = tuple[int, Integers, Integers]


class Loader:
    """Batches of a dataset, the same for the same settings whatever the number of workers.

    The order and the augmentation of a sample depend on the seed, the epoch and the sample only.
    `bad` maps the names of the images that could not be read so far to the reason; the caller
    decides what to do about them.

    Args:
        dataset: The samples.
        preprocessing: The size of the views, and how they are resized.
        batch_size: Samples in a batch of all `world` processes.
        mode: "train" shuffles and augments, "eval" does neither.
        augment: "inception", "pad-crop" or "none"; see `images.views.training_view`.
        flip: Whether augmentation mirrors half of the views.
        min_area: The smallest part of an image that "inception" crops.
        transform: A function that replaces the views; see `Transform`.
        seed: Random seed for the order and the augmentation.
        drop_last: Whether to leave out a last batch that is not full.
        workers: Processes that read; with 0 this process reads.
        rank: The number of this process among `world` processes.
        world: Processes that share each batch; each gets every world-th sample of it.
        start_method: How worker processes are started: "fork", "spawn" or "forkserver".
        only: "images" reads no masks, "masks" reads no images.

    Examples:
        >>> splits = engram.data.load("photos")
        >>> loader = engram.data.Loader(splits["train"], model.preprocessing, 4, mode="train")
        >>> for batch in loader.epoch(0):
        ...     pixels = engram.images.normalise(batch.images, model.preprocessing)
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
        drop_last: bool = False,
        workers: int = 0,
        rank: int = 0,
        world: int = 1,
        start_method: str | None = None,
        only: str = "",
    ) -> None:
        for name, choice, choices in (
            ("mode", mode, ("train", "eval")),
            ("augment", augment, AUGMENTATIONS),
            ("only", only, ("", "images", "masks")),
        ):
            if choice not in choices:
                known = ", ".join(filter(None, choices))
                raise EngramError(f"{flag(name)} is {choice!r}; it can be {known}.")
        least = {"batch": (batch_size, 1), "workers": (workers, 0), "seed": (seed, 0)}
        for name, (value, low) in (least | {"rank": (rank, 0), "world": (world, rank + 1)}).items():
            if value < low:
                raise EngramError(f"{flag(name)} is {value}; it must be at least {low}.")
        if transform is not None and dataset.masks is not None:
            raise EngramError(
                "A transform changes images but not their masks, so segmentation cannot use one."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.bad: dict[str, str] = {}
        self._seed = seed
        self._shuffle = mode == "train"
        self._drop_last = drop_last
        self._rank, self._world = rank, world
        self._jobs: list[_Job] = []  # of the current epoch; the DataLoader iterates over them
        augmentation = Augmentation(augment if mode == "train" else "none", flip, min_area)
        reader = _Reader(dataset, preprocessing, augmentation, transform, seed, only)
        self._batches: DataLoader[Any] = DataLoader(
            reader,  # type: ignore[arg-type]  # a mapping from jobs to batches is enough
            batch_size=None,
            sampler=self._jobs,
            num_workers=workers,
            collate_fn=_unchanged,
            persistent_workers=workers > 0,
            multiprocessing_context=start_method if workers > 0 else None,
            generator=torch.Generator(),  # its own: the global one belongs to training
            worker_init_fn=partial(_start_worker, os.getpid()),
        )

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[LabelledBatch]:
        return self.epoch(0)

    def epoch(
        self, epoch: int = 0, *, skip: int = 0, samples: Sequence[int] | Integers | None = None
    ) -> Iterator[LabelledBatch]:
        """The batches of one epoch from batch `skip` on; the images before it are not read.

        With `samples`, only these samples, in this order.
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
        occurrences = _occurrences(order)

        def shard(values: Integers, start: int) -> Integers:
            return values[start : start + self.batch_size][self._rank :: self._world]

        return self._read(
            [(epoch, shard(order, start), shard(occurrences, start)) for start in starts[skip:]]
        )

    def _read(self, jobs: list[_Job]) -> Iterator[LabelledBatch]:
        self._jobs[:] = jobs
        try:
            for result in self._batches:
                if isinstance(result, str):
                    raise EngramError(result)
                images, masks, indices, failures = result
                labels = self.dataset.labels[indices] if masks is None else masks
                self.bad.update({self.dataset.sample_name(i): reason for i, reason in failures})
                yield LabelledBatch(
                    torch.from_numpy(images),
                    torch.from_numpy(labels),
                    torch.from_numpy(indices),
                    torch.tensor([i for i, _ in failures], dtype=torch.int64),
                )
        except RuntimeError as error:
            if not is_lost_worker(error):
                raise
            raise EngramError(LOST_WORKER) from error


# In worker processes


def _unchanged(result: Any) -> Any:
    return result


def _start_worker(parent: int, worker: int) -> None:
    """Let only the main process react to Ctrl-C and to the first SIGTERM.

    A terminal, torchrun and cluster schedulers signal all processes at once. The second SIGTERM
    ends a worker: the main process sends it when it exits without waiting for the worker.
    """

    def after_first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    begin_worker(parent)
    signal.signal(signal.SIGTERM, after_first)


@dataclass(frozen=True)
class _Reader:
    """Turns a job into pixels, in a worker process.

    Results are numpy arrays, which are sent through a pipe. Tensors would need shared memory, of
    which containers often have too little, and running out of it kills the process.
    """

    dataset: Dataset
    preprocessing: Preprocessing
    augmentation: Augmentation
    transform: Transform | None
    seed: int
    only: str

    def __getitem__(self, job: _Job) -> Any:
        epoch, samples, occurrences = job
        views, masks, good, failures = [], [], [], []
        with_masks = self.dataset.masks is not None and self.only != "images"
        try:
            for i, before in zip(samples.tolist(), occurrences.tolist(), strict=True):
                # An image that is repeated within an epoch has another view each time.
                seed = [self.seed, epoch, i, *([before] if before else [])]
                try:
                    view = [self._view(seed, i)] if self.only != "masks" else []
                    mask = [self._mask(seed, i)] if with_masks else []
                except BadImage as error:
                    failures.append((i, str(error)))
                    continue
                good.append(i)
                views += view
                masks += mask
            stacked = None
            if with_masks:
                empty = np.zeros((0, *self.preprocessing.size), np.uint8)
                stacked = np.stack(masks) if masks else empty
            return self._stack(views), stacked, np.array(good, dtype=np.int64), failures
        except EngramError as error:  # raised in a worker, it would arrive as a traceback
            return str(error)

    def _view(self, seed: list[int], i: int) -> npt.NDArray[Any]:
        source, name = self.dataset.read(i), self.dataset.sample_name(i)
        if self.transform is None:
            rng = np.random.default_rng(seed)
            return training_view(source, self.preprocessing, rng, self.augmentation, name)
        image = read_image(source, name=name)
        with _seeded(seed):
            return np.asarray(self.transform(image))

    def _mask(self, seed: list[int], i: int) -> npt.NDArray[np.uint8]:
        """The view of the mask that `_view` is of the image."""
        rng = np.random.default_rng(seed)
        return mask_view(self.dataset.mask(i), self.preprocessing, rng, self.augmentation)

    def _stack(self, views: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        if not views:
            return np.zeros((0, *self.preprocessing.size, 3), dtype=np.uint8)
        kinds = sorted({f"{view.dtype} {view.shape}" for view in views})
        view = views[0]
        channels = view.shape[0 if view.dtype.kind == "f" else -1] if view.ndim == 3 else 0
        if len(kinds) > 1 or channels != 3 or view.dtype not in (np.uint8, np.float32):
            raise EngramError(
                "A transform must return float32 (3, height, width) or uint8 (height, width, 3), "
                f"the same for every image; got {' and '.join(kinds)}."
            )
        return np.stack(views)


@contextmanager
def _seeded(seed: list[int]) -> Iterator[None]:
    """Seed the global generators of Python, numpy and torch, and restore them afterwards."""
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
