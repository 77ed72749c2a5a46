"""Answers about a batch of images: decode, forward, answer. On one machine and on a cluster."""

from __future__ import annotations

import base64
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import torch

from engram.errors import EngramError
from engram.inference.bulk.bulk_settings import BulkSettings
from engram.inference.bulk.decoders import DecodedItem, Decoders, Item
from engram.inference.engine import (
    Engine,
    MakeEngine,
    TorchEngine,
    on_cpu,
    stack_views,
    torch_engine,
)
from engram.inference.predict import results_about
from engram.model import MemoryViT
from engram.tasks.kind import ColumnType
from engram.util.files import write_atomically

Row: TypeAlias = dict[str, Any]
_STEM = 128  # bytes of an image's name in that of its mask: file systems have room for 255


@dataclass(frozen=True)
class ItemBatch:
    """Images that are answered together; all of them belong to one part of the table."""

    part: int
    number: int  # of its first image, among all
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Questions:
    """Tasks that answer about every image, here or where they are sent, and their columns."""

    model: MemoryViT
    names: Sequence[str]
    settings: BulkSettings
    masks: Path | None = None  # a folder for masks and heat maps; without it there are none
    make_engine: MakeEngine = torch_engine

    @cached_property
    def engines(self) -> tuple[Engine, TorchEngine]:
        """The engine of outputs, and the model of vectors, which an exported graph has not."""
        engine = self.make_engine(self.model, self.settings)
        return engine, engine if isinstance(engine, TorchEngine) else TorchEngine(self.model)

    @cached_property
    def masked(self) -> dict[str, str]:
        """The columns of masks and heat maps, each with its task."""
        kinds = {name: self.model.task(name).kind for name in self.names}
        return {f"{column(n)}.{kind.picture}": n for n, kind in kinds.items() if kind.picture}

    @property
    def columns(self) -> dict[str, ColumnType]:
        """The columns of the table, in its order, each with its type."""
        answers, numbers, vectors = [], [], []
        for name in self.names:
            task = self.model.task(name)
            for part, type_ in task.kind.table_columns(task.spec.classes).items():
                if (full := column(name, part)) not in self.masked or self.masks is not None:
                    answers.append((full, type_))
            if task.statistics is not None:
                numbers.append((f"{column(name)}.familiarity", "number"))
            if self.settings.logits:
                vectors.append((f"{column(name)}.logits", "halves"))
        if self.settings.embed:
            embedded = self.model.embedding_names(None)
            vectors += [(f"{name}.embedding", "floats") for name in embedded]
        listed = [("image", "text"), *answers, *numbers, *vectors, ("error", "text")]
        for name, times in Counter(name for name, _ in listed).items():
            if times > 1:
                raise EngramError(
                    f"Two tasks would have the column {name!r}; ask one after the other, with "
                    "--task."
                )
        return dict(listed)

    def rows(self, batch: Sequence[DecodedItem]) -> list[Row]:
        """The rows about one batch, with masks as `predict` gives them, in base64."""
        rows: list[Row] = [{"image": one.name, "error": one.error or None} for one in batch]
        views = {
            i: torch.from_numpy(one.view) for i, one in enumerate(batch) if one.view is not None
        }
        if not views:
            return rows
        model, settings, (engine, torch_engine) = self.model, self.settings, self.engines
        pixels = stack_views(list(views.values()), model.preprocessing, torch_engine.device)
        outputs = on_cpu(engine.run(pixels, self.names, familiarity=True))
        vectors = on_cpu(torch_engine.embed(pixels)) if settings.embed else {}
        good = [rows[i] for i in views]
        names = [row["image"] for row in good]
        found = results_about(model, names, outputs, settings.top_k)
        for i, (row, result) in enumerate(zip(good, found, strict=True)):
            row["error"] = result.get("error")
            for name, answer in result["tasks"].items():
                for part, cell in model.task(name).kind.table_row(answer).items():
                    if self.masks is not None or column(name, part) not in self.masked:
                        row[column(name, part)] = cell
            for name, value in result.get("familiarity", {}).items():
                row[f"{column(name)}.familiarity"] = value
            for name in self.names if settings.logits else ():
                row[f"{column(name)}.logits"] = outputs[name][i].flatten().half().numpy()
            for name, vector in vectors.items():
                row[f"{name}.embedding"] = vector[i].numpy()
        return rows

    def keep_masks(self, rows: Sequence[Row], number: int) -> None:
        """Make files of the masks of rows, of which the first has this number among all."""
        if self.masks is None:
            return
        for i, row in enumerate(rows, number):
            for mask in self.masked.keys() & row.keys():
                stem = Path(row["image"]).stem.encode()[:_STEM].decode(errors="ignore")
                path = self.masks / f"{i:09}-{stem}.{self.masked[mask]}.png"
                write_atomically(path, base64.b64decode(row[mask].partition(",")[2]))
                row[mask] = str(path)


def column(name: str, part: str = "") -> str:
    """The column of a task's answers, or of a part of them, as its kind calls it."""
    name = f"{name}_" if name in ("image", "error") else name  # every table has these
    own = part in ("familiarity", "logits", "embedding")  # names of numbers that are taken
    return f"{name}.{part}{'_' if own else ''}" if part else name


AnsweredBatches: TypeAlias = Generator[tuple[ItemBatch, list[Row]], None, None]
#: Answers batches, each once, in any order.
Answering: TypeAlias = Callable[[Questions, Iterator[ItemBatch]], AnsweredBatches]


def answered_here(questions: Questions, batches: Iterator[ItemBatch]) -> AnsweredBatches:
    """Answer batches in this process, in their order; other processes decode ahead.

    Batches come back without their images, whose bytes nobody needs any more.
    """
    decoders = Decoders(questions.model.preprocessing, questions.settings.decoders)
    waiting: deque[tuple[ItemBatch, int]] = deque()  # and the number of its images

    def items() -> Iterator[Item]:
        for batch in batches:
            waiting.append((replace(batch, items=()), len(batch.items)))
            yield from batch.items
            del batch  # before the next is read

    try:
        decoded = decoders.decoded(items())
        for first in decoded:
            batch, images = waiting.popleft()
            others = islice(decoded, images - 1)
            yield batch, questions.rows([first, *others])
    finally:
        decoders.close()
