"""The feature cache: tokens of the backbone, stored once, read every epoch.

The backbone never depends on a task, so what a task reads of an image (the normed tokens of every
layer, and the pooled last one for heads) is the same in every epoch and for every task. A cache
is a folder for one backbone, preprocessing, kind of view and kind of row, shared by all tasks:

    meta.json              what it is for
    <writer>.data          rows of half-precision numbers, one row an image
    <writer>.index         a line for each row: the SHA-256 of the image, the CRC-32 of the row

Every process appends to files of its own, and a row's line is written after the row has reached
the disk. So a crash loses at most the last batch, and an image that two processes computed at once
is only stored twice. A row whose checksum is wrong is computed again. Trainings that start together
fill it one after the other, by a lock that only saves work: the next one finds what it needs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock
from torch import Tensor

from engram.data.datasets import Dataset
from engram.data.loader import Loader
from engram.errors import EngramError
from engram.images.decode import BadImage
from engram.images.preprocessing import Preprocessing, normalise
from engram.methods.forward import BackbonePass
from engram.methods.memory import BackboneView, KeysValues
from engram.methods.method import Cached
from engram.methods.readout import LayerStatistics, grid_count, grid_weights, statistics_per_layer
from engram.train.features.caches import INDEX_LINE, default_root
from engram.util.files import make_private_folder, private, write_atomically
from engram.util.processes import ProcessGroup
from engram.util.tensors import to_device
from engram.vit import ViT
from engram.vit.layers import merge_heads, split_heads

FORMAT = 2
_FORGOTTEN = "0" * 64  # in place of the image's hash: a row that was damaged


@dataclass(frozen=True)
class View:
    """Crop of an image: the evaluation view, or one fixed augmented view."""

    augment: str = "none"
    flip: bool = False
    min_area: float = 0.0
    seed: int = 0
    number: int = 0  # of the view
    of: str = ""  # the dataset's hash: augmentation depends on a sample's place in it


class _Row(NamedTuple):
    """Place of a stored row, and its checksum."""

    writer: str  # the stem of its two files
    number: int
    check: str  # CRC-32 in hex


def tokens_of(backbone: ViT, preprocessing: Preprocessing) -> int:
    """The tokens of an image."""
    rows, columns = (side // backbone.config.patch for side in preprocessing.size)
    return backbone.config.prefix + rows * columns


#: What a row holds of an image, always with the pooled token behind it: the normed tokens of every
#: layer; these and the final ones; the final ones alone; the keys and values of every layer, which
#: are twice as much and need not be made of the tokens in every step; or all layer statistics
#: (methods/readout.py), which are a small part of it.
Keeps = Literal["layers", "all", "final", "keys", "statistics"]


def row_bytes(backbone: ViT, preprocessing: Preprocessing, keeps: Keeps = "layers") -> int:
    """The disk that one image takes."""
    n, config = tokens_of(backbone, preprocessing), backbone.config
    statistics = (config.depth + 1) * statistics_per_layer(config.class_token)
    tokens = {
        "layers": config.depth * n,
        "all": (config.depth + 1) * n,
        "keys": config.depth * 2 * n,
        "final": n,
        "statistics": statistics + grid_count(config.depth) + config.pooler,
    }
    return (tokens[keeps] + 1) * config.width * 2


class Cache:
    """The stored rows for one backbone, preprocessing, view and kind of row."""

    def __init__(
        self,
        backbone: ViT,
        preprocessing: Preprocessing,
        view: View | None = None,
        keeps: Keeps = "layers",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        view, config = view or View(), backbone.config
        self.backbone, self.preprocessing, self.view = backbone, preprocessing, view
        self.keeps, self.dtype = keeps, dtype
        self.tokens = tokens_of(backbone, preprocessing)
        self.row_bytes = row_bytes(backbone, preprocessing, keeps)
        self.shape = (self.row_bytes // (2 * config.width), config.width)
        meta = {
            "format": FORMAT,
            "backbone": backbone.source,
            "fingerprint": backbone.fingerprint,
            "heads": config.heads,  # this and the next: the same tensors can be read in many ways
            "activation": config.activation,
            "antialias": config.antialias,
            "preprocessing": preprocessing.to_dict(),
            "view": vars(view),
            "row_bytes": self.row_bytes,
        }
        if keeps != "layers":
            meta["keeps"] = keeps
        if dtype != torch.float32:
            meta["precision"] = str(dtype).removeprefix("torch.")
        if backbone.stored != "fp32":
            meta["dtype"] = backbone.stored
        identity = {k: v for k, v in meta.items() if k != "backbone"}
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
        self.folder = default_root() / key
        try:
            make_private_folder(self.folder)
        except OSError as error:
            raise EngramError(
                f"The cache folder {self.folder} cannot be made ({error.strerror}); set "
                "ENGRAM_CACHE to a folder that can be written, or turn the cache off."
            ) from None
        if not (self.folder / "meta.json").exists():
            text = json.dumps(meta, indent=1)
            write_atomically(self.folder / "meta.json", text.encode(), owner_only=True)
        self.touch()
        self._maps: dict[str, mmap.mmap] = {}
        self._where: dict[str, _Row] = {}
        self.refresh()

    def touch(self) -> None:
        """Note that the cache is in use: those that are not are removed first."""
        with contextlib.suppress(OSError):  # a cache of others that may only be read
            os.utime(self.folder / "meta.json")

    # Reading

    def refresh(self) -> None:
        """See what other processes have written."""
        for index in sorted(self.folder.glob("*.index")):
            lines = index.read_bytes()
            data = index.with_suffix(".data")
            stored = data.stat().st_size // self.row_bytes if data.exists() else 0
            for row in range(min(len(lines) // INDEX_LINE, stored)):
                content, _, check = (
                    lines[row * INDEX_LINE : (row + 1) * INDEX_LINE - 1].decode("ascii", "replace")
                ).partition(" ")
                if content != _FORGOTTEN:
                    self._where.setdefault(content, _Row(index.stem, row, check))

    def __contains__(self, content: str) -> bool:
        return content in self._where

    def read(self, contents: Sequence[str], only_pooled: bool = False) -> Tensor:
        """Rows (b, tokens, D) in half precision.

        `only_pooled` leaves out what the layers feed to tasks: (b, 1, D), the pooled token, and the
        final ones before it if they are kept. The mapped pages are let go again.
        """
        tokens = 1 + self._final if only_pooled else self.shape[0]
        batch = np.empty((len(contents), tokens, self.shape[1]), dtype=np.float16)
        for i, content in enumerate(contents):
            batch[i] = self._row(content)[-tokens:]
        self._release()
        return torch.from_numpy(batch)

    def features(self, rows: Tensor) -> Cached:
        """The rows of a batch as what the cache keeps of the backbone, in fp32."""
        n, pooled = self.tokens, rows[:, -1].float()
        if self.keeps == "statistics":
            return Cached(pooled, statistics=rows[:, :-1].flatten(1).float())
        end = rows.shape[1] - 1 - self._final
        parts = [rows[:, i : i + n].float() for i in range(0, end, n)]
        layers = keys_values(parts, self.backbone) if self.keeps == "keys" else parts
        final = rows[:, end:-1].float() if self._final else None
        return Cached(pooled, layers, final)

    @property
    def _final(self) -> int:
        """The final tokens that are kept."""
        return self.tokens if self.keeps in ("all", "final") else 0

    def class_tokens(self, contents: Sequence[str]) -> Tensor:
        """The class token of every layer (b, features), or the pooled token if that is all.

        Only these parts of the rows are read.
        """
        config, part = self.backbone.config, slice(-1, None)
        if self.keeps == "statistics":
            first, size = int(config.pooler), statistics_per_layer(config.class_token)
            part = slice(first + config.depth * size, first, -size)  # the last layer is first
        elif config.class_token and self.keeps != "final":
            part = slice(0, self.shape[0] - 1 - self._final, self.tokens)
        found = [self._row(content)[part].flatten() for content in contents]
        self._release()
        return torch.from_numpy(np.stack(found) if found else np.empty((0, 1), np.float16))

    def _release(self) -> None:
        """Let the pages that were read go again."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def _row(self, content: str) -> npt.NDArray[np.float16]:
        """A stored row (tokens, D), mapped: only what is used of it is read."""
        stored = self._where[content]
        writer, end = stored.writer, (stored.number + 1) * self.row_bytes
        if writer not in self._maps or len(self._maps[writer]) < end:
            with open(self.folder / f"{writer}.data", "rb") as file:
                self._maps[writer] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        start, numbers = end - self.row_bytes, self.row_bytes // 2
        row = np.frombuffer(self._maps[writer], np.float16, numbers, start)
        return row.reshape(self.shape)

    # Damage

    def damaged(self, contents: Iterable[str]) -> list[str]:
        """Hashes of images whose stored row does not have its checksum."""
        known = [content for content in dict.fromkeys(contents) if content in self._where]
        damaged = [c for c in known if _checksum(c, self._row(c).data) != self._where[c].check]
        self._release()
        return damaged

    def forget(self, contents: Iterable[str]) -> None:
        """Drop these rows, here and for every later process, so that they are computed again."""
        for content in contents:
            row = self._where.pop(content)
            with (
                contextlib.suppress(OSError),
                open(self.folder / f"{row.writer}.index", "r+b") as index,
            ):
                index.seek(row.number * INDEX_LINE)
                index.write(_FORGOTTEN.encode())

    # Writing

    def fill(
        self,
        dataset: Dataset,
        contents: Sequence[str],
        *,
        batch: int = 32,
        workers: int = 0,
        processes: ProcessGroup | None = None,
        progress: Callable[[int], object] = lambda images: None,
    ) -> dict[str, str]:
        """Store what is missing of a dataset; `contents` are its samples' hashes, "" for bad ones.

        Gives the pictures that cannot be read, by name. What was stored before a crash or an
        interruption is not computed again, and a process waits for another one that fills the
        cache. Processes that work together each take a share, which the contents alone decide, so
        what others write meanwhile leaves no picture out.
        """
        processes, loader = processes or ProcessGroup(), self.loader(dataset, workers, batch)
        if self._missing(contents, processes):
            with contextlib.ExitStack() as turn:
                if processes.world == 1:
                    with contextlib.suppress(OSError):  # a disk without locks: it costs work alone
                        turn.enter_context(FileLock(self.folder / "lock", mode=0o600))
                    self.refresh()
                self._write(loader, contents, self._missing(contents, processes), progress)
        processes.wait()
        found = processes.gather([loader.bad])
        bad = {name: why for shared in found for name, why in shared.items()}
        self.refresh()
        for i, content in enumerate(contents):  # of pictures with the same bytes one was tried
            if content not in self:
                name = dataset.sample_name(i)
                bad.setdefault(name, f"{name}: the file cannot be read")
        return bad

    def _missing(self, contents: Sequence[str], processes: ProcessGroup) -> list[int]:
        """The samples that this process is to store."""
        first: dict[str, int] = {}
        for i, content in enumerate(contents):
            if content and content not in self._where:
                first.setdefault(content, i)
        rank, world = processes.rank, processes.world
        return [i for content, i in first.items() if int(content[:8], 16) % world == rank]

    def _write(
        self,
        loader: Loader,
        contents: Sequence[str],
        samples: Sequence[int],
        progress: Callable[[int], object],
    ) -> None:
        """Compute the rows of these samples, and append them to files of this process."""
        if not samples:
            return
        writer = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        try:
            with (
                open(self.folder / f"{writer}.data", "ab", opener=private) as data,
                open(self.folder / f"{writer}.index", "ab", opener=private) as index,
            ):
                for found in loader.epoch(self.view.number, samples=samples):
                    if len(found.indices):
                        rows = self.compute(found.images).numpy()
                        data.write(rows.data)
                        data.flush()
                        os.fsync(data.fileno())
                        for i, row in zip(found.indices.tolist(), rows, strict=True):
                            line = f"{contents[i]} {_checksum(contents[i], row.data)}\n"
                            index.write(line.encode())
                        index.flush()
                    progress(len(found.indices) + len(found.failed))
        except OSError as error:
            raise EngramError(
                f"The cache in {self.folder} cannot be written ({error.strerror}); free some "
                "space (`engram cache clear`), set ENGRAM_CACHE to another disk, or turn the "
                "cache off. What it holds stays usable."
            ) from None

    def loader(
        self, dataset: Dataset, workers: int = 0, batch: int = 32, only: str = "images"
    ) -> Loader:
        """Reads a dataset's pictures, or `only` their masks, as this cache's view shows them."""
        view = self.view
        return Loader(
            dataset, self.preprocessing, batch,
            mode="train" if view.augment != "none" else "eval", augment=view.augment,
            flip=view.flip, min_area=view.min_area, seed=view.seed, workers=workers, only=only,
        )  # fmt: skip

    @torch.inference_mode()
    def compute(self, images: Tensor) -> Tensor:
        """Run the backbone on images (b, H, W, 3) as loaded: the rows that `read` returns.

        In half precision (`dtype`) it takes a third to a half less time on CPUs that have it.
        """
        pixels = normalise(to_device(images, self.backbone.device), self.preprocessing)
        rotation = self.backbone.rotation(pixels.shape[-2:], self.tokens)
        half = torch.autocast(pixels.device.type, self.dtype, self.dtype != torch.float32)
        with half, self.backbone.autocast():
            embedded = self.backbone.embed(pixels)
            tokens = self.keeps != "keys"
            backbone = BackbonePass(self.backbone, embedded, self.tokens, tokens, rotation=rotation)
            layers = [part for view in backbone for part in _parts(view)]
            final = self.backbone.norm(backbone.tokens)
        kept = [*layers, final] if self.keeps == "all" else layers
        if self.keeps == "final":
            kept = [final]
        if self.keeps == "statistics":
            grid = grid_weights(self.backbone, self.preprocessing.size, final.device)
            statistics = LayerStatistics.from_layers([*layers, final], self.backbone, grid).all()
            kept = [statistics.view(len(final), -1, final.shape[-1])]
        return torch.cat([*kept, self.backbone.pool(final).unsqueeze(1)], dim=1).half().cpu()


def _parts(view: BackboneView) -> list[Tensor]:
    """Stored tensors of a layer, (b, n, D) each: its normed tokens, or its keys and its values."""
    return [view] if isinstance(view, Tensor) else [merge_heads(view.k), merge_heads(view.v)]


def keys_values(parts: Sequence[Tensor], backbone: ViT) -> list[KeysValues]:
    """The keys and values of every layer, from what a cache kept: first keys, then values."""
    heads = backbone.config.heads
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [KeysValues(split_heads(k, heads), split_heads(v, heads)) for k, v in pairs]


def _checksum(content: str, row: memoryview) -> str:
    """The CRC-32 of an image's hash and its row, in hex."""
    return f"{zlib.crc32(row, zlib.crc32(content.encode())):08x}"


def contents_of(
    dataset: Dataset, count: Callable[[int], object] = lambda images: None
) -> list[str]:
    """The SHA-256 of every sample's content, "" where it cannot be read."""

    def one(i: int) -> str:
        try:
            return dataset.sample_hash(i)
        except BadImage:
            return ""

    found = []
    with ThreadPoolExecutor(4) as pool:
        for content in pool.map(one, range(len(dataset))):
            found.append(content)
            if len(found) % 32 == 0:
                count(32)
    count(len(found) % 32)
    return found


def prefetched(make: Iterator[Any]) -> Iterator[Any]:
    """Make items in a thread, up to two before they are wanted."""
    with ThreadPoolExecutor(1) as pool:
        done = object()
        waiting = [pool.submit(next, make, done) for _ in range(2)]
        while (item := waiting.pop(0).result()) is not done:
            waiting.append(pool.submit(next, make, done))
            yield item
