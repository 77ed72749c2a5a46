"""Answers about a batch of images: decode, forward, answer. On one machine and on a cluster."""

from __future__ import annotations

import base64
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from engram.errors import EngramError
from engram.images.preprocessing import normalise
from engram.inference.bulk.bulk_settings import BulkSettings
from engram.inference.bulk.decoders import DecodedItem, Decoders
from engram.inference.bulk.items import Item
from engram.inference.engine import (
    MakeEngine,
    TorchEngine,
    on_cpu,
    torch_engine,
)
from engram.inference.predict import answers_about, shown_familiarity
from engram.model import MemoryViT
from engram.tasks.kind import ColumnType
from engram.util.files import write_atomically
from engram.util.tensors import to_device

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
    """The tasks that answer about every image, and the columns of their answers."""

    model: MemoryViT
    names: Sequence[str]
    settings: BulkSettings
    masks: bool = False  # whether answers of segmentation keep their masks
    make_engine: MakeEngine = torch_engine

    @property
    def masked(self) -> dict[str, str]:
        """The columns of masks and heat maps, each with its task."""
        kinds = {name: self.model.task(name).kind for name in self.names}
        return {f"{column(n)}.{kind.picture}": n for n, kind in kinds.items() if kind.picture}

    @property
    def columns(self) -> dict[str, ColumnType]:
        """The columns of the table, in its order, each with its type.

        Raises:
            EngramError: Two tasks have columns of the same name.
        """
        answers, numbers, vectors = [], [], []
        for name in self.names:
            task = self.model.task(name)
            for part, type_ in task.kind.table_columns(task.spec.classes).items():
                if (full := column(name, part)) not in self.masked or self.masks:
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


def column(name: str, part: str = "") -> str:
    """The column of a task's answers, or of a part of them, as its kind calls it."""
    name = f"{name}_" if name in ("image", "error") else name  # every table has these
    own = part in ("familiarity", "logits", "embedding")  # names of numbers that are taken
    return f"{name}.{part}{'_' if own else ''}" if part else name


#: Answers batches, each once, in any order.
Answering: TypeAlias = Callable[
    [Questions, Iterator[ItemBatch]], Generator[tuple[ItemBatch, list[Row]], None, None]
]


def answered_here(
    questions: Questions, batches: Iterator[ItemBatch]
) -> Generator[tuple[ItemBatch, list[Row]], None, None]:
    """Answer batches in this process, in their order; other processes decode ahead.

    Batches come back without their images, whose bytes nobody needs any more.
    """
    answerer = Answerer(questions)
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
            yield batch, answerer.rows([first, *others])
    finally:
        decoders.close()


class Answerer:
    """The model, on its device, and the rows that it makes of decoded images."""

    def __init__(self, questions: Questions) -> None:
        settings = questions.settings
        self.questions, self.masked = questions, questions.masked
        self.preprocessing = questions.model.preprocessing
        self.engine = engine = questions.make_engine(questions.model, settings)
        # A graph has no vectors.
        self.model = engine if isinstance(engine, TorchEngine) else TorchEngine(questions.model)

    def rows(self, batch: Sequence[DecodedItem]) -> list[Row]:
        """The rows about one batch. An image that cannot be read has an error.

        Masks are PNG, as `predict` gives them; `keep_masks` makes files of them.
        """
        rows: list[Row] = [{"image": one.name, "error": one.error or None} for one in batch]
        good = [i for i, one in enumerate(batch) if one.view is not None]
        if not good:
            return rows
        names, settings = self.questions.names, self.questions.settings
        views = torch.from_numpy(np.stack([batch[i].view for i in good]))  # type: ignore[misc]
        pixels = normalise(to_device(views, self.model.device), self.preprocessing)
        outputs, familiarity = map(on_cpu, self.engine.with_familiarity(pixels, names))
        vectors = on_cpu(self.model.embed(pixels)) if settings.embed else {}
        for place, i in enumerate(good):
            row = rows[i]
            own = {name: output[place] for name, output in outputs.items()}
            answers, problem = answers_about(self.questions.model, own, settings.top_k)
            for name, answer in answers.items():
                cells = self.questions.model.task(name).kind.table_row(answer)
                row |= {column(name, part): cell for part, cell in cells.items()}
            for unwanted in () if self.questions.masks else self.masked.keys() & row.keys():
                del row[unwanted]
            for name, values in familiarity.items():
                row[f"{column(name)}.familiarity"] = shown_familiarity(values[place])
            if problem:
                row["error"] = f"{row['image']}: {problem}"
            for name in names if settings.logits else ():
                row[f"{column(name)}.logits"] = own[name].flatten().half().numpy()
            for name, vector in vectors.items():
                row[f"{name}.embedding"] = vector[place].numpy()
        return rows


def keep_masks(rows: Sequence[Row], number: int, masked: Mapping[str, str], folder: Path) -> None:
    """Write masks as files into a folder, and put their paths in their place.

    `number` is that of the first row among all, `masked` are the columns and their tasks.
    """
    for i, row in enumerate(rows, number):
        for mask, name in masked.items():
            if mask in row:
                stem = Path(row["image"]).stem.encode()[:_STEM].decode(errors="ignore")
                path = folder / f"{i:09}-{stem}.{name}.png"
                write_atomically(path, base64.b64decode(row[mask].partition(",")[2]))
                row[mask] = str(path)
