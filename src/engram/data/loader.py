"""Batches of a dataset, read in worker processes.

What a `Loader` yields depends on its seed, the epoch and the samples alone, never on the workers.
"""

import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import DataLoader

from engram.data.datasets import Dataset, Integers
from engram.errors import LOST_WORKER, EngramError, is_lost_worker
from engram.images.decode import BadImage, read_image
from engram.images.masks import mask_view
from engram.images.preprocessing import Preprocessing
from engram.images.views import AUGMENTATIONS, training_view

#: A user's own view: an RGB picture in, a float tensor (3, H, W) or a uint8 array (H, W, 3) out.
Transform: TypeAlias = Callable[[Image.Image], "torch.Tensor | npt.NDArray[Any]"]


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
        for what, number, least in (
            ("batch", batch_size, 1), ("workers", workers, 0), ("seed", seed, 0), ("rank", rank, 0),
            ("world", world, rank + 1),
        ):  # fmt: skip
            if number < least:
                raise EngramError(f"{what} is {number}; it must be at least {least}")
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
                self.bad.update({self.dataset.sample_name(i): reason for i, reason in failures})
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
        source, name = self.dataset.read(i), self.dataset.sample_name(i)
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
