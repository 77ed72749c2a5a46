"""From sources of images to a table of answers, part by part; what is written is not done again."""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engram.errors import EngramError, Interrupted
from engram.images.preprocessing import normalise
from engram.inference.bulk.decoders import DecodedItem, Decoders
from engram.inference.bulk.settings import BulkSettings
from engram.inference.bulk.sources import Item, count_of, items_of
from engram.inference.bulk.tables import Table, part_name, table_for
from engram.inference.engine import TorchEngine, on_cpu
from engram.inference.predict import answered_names, answers_about, kind_of, shown_score
from engram.model import MemoryViT
from engram.util.devices import to_device
from engram.util.files import replaced, write_atomically
from engram.util.processes import Team, stoppable
from engram.util.progress import Progress, silent
from engram.util.text import counted

_STATE = "_job.json"  # readers of a folder of parquet skip such names
_RESERVED = ("image", "error")  # columns of every table


@dataclass(frozen=True)
class BulkResult:
    """What was written, and how much of it was there before."""

    path: Path
    images: int
    errors: int
    resumed: int  # images whose answers were there already
    seconds: float

    @property
    def rate(self) -> float:
        """Images a second, of those that were computed now."""
        return (self.images - self.resumed) / max(self.seconds, 1e-9)


def predict_to(
    model: MemoryViT,
    sources: Sequence[str],
    out: Path,
    settings: BulkSettings | None = None,
    *,
    tasks: Sequence[str] | None = None,
    masks: Path | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> BulkResult:
    """Answer tasks for all images of some sources, and write the answers as a table.

    Answers are written in parts, beside `out` until it is complete. If the work is interrupted, in
    whatever way, the same call continues after the last part.

    Args:
        model: The model.
        sources: Folders, tables, archives, lists of paths or images; see `sources.py`.
        out: A file (`.parquet`, `.jsonl` or `.csv`), or a folder that keeps the parts as parquet.
        settings: What is written and how.
        tasks: The tasks to answer; by default all.
        masks: A folder for the masks of segmentation; without it only the areas are written.
        overwrite: Replace what is there instead of continuing it.
        progress: Told how many images are done.

    Raises:
        EngramError: A source cannot be read, or what is there belongs to another job.
        Interrupted: The work was stopped by Ctrl-C or SIGTERM. The parts before are written.
    """
    settings = settings or BulkSettings()
    work = _Work(model, settings, answered_names(model, tasks), masks)
    table = table_for(out.suffix or ".parquet", work.kinds, work.vectors, work.scores)
    parts = _Parts(out, table, work.identity(sources), overwrite)
    began = time.perf_counter()
    total = count_of(sources, settings.image_column)
    items = items_of(sources, settings.image_column)
    done = resumed = _skip_written(parts, items, total, progress)
    errors = 0
    with stoppable() as stop:

        def answered(images: int) -> None:
            """After every batch: so many images have answers, though the last are not written."""
            rate = (images - resumed) / (time.perf_counter() - began)
            note = "" if total else f"{images:,} images, {rate:,.1f}/s"
            progress("answering", images, total, note)
            if stop.asked:
                raise Interrupted(
                    f"Stopped; the answers about {counted(done, 'image')} are kept. Run the same "
                    "command again to continue."
                )

        for rows in work.parts(items, done, answered):
            parts.write(rows)
            done += len(rows)
            errors += sum(row.get("error") is not None for row in rows)
    if not done:
        raise EngramError(f"There are no images in {', '.join(sources)}.")
    parts.finish()
    return BulkResult(out, done, errors, resumed, time.perf_counter() - began)


def _skip_written(parts: _Parts, items: Iterator[Item], total: int, progress: Progress) -> int:
    """Take the images that have answers already, which have to be the first; gives their number."""
    done = 0
    for path in parts.existing():
        images = parts.table.images(path)
        if images != [item.name for item in islice(items, len(images))]:
            raise EngramError(
                f"The images are not those of {path}, which was written before: some were added, "
                "removed or renamed. Start anew with --overwrite."
            )
        done += len(images)
        progress("answering", done, total, "there already")
    return done


class _Parts:
    """The parts on disk, and what they belong to."""

    def __init__(self, out: Path, table: Table, identity: dict[str, Any], overwrite: bool) -> None:
        self.out, self.table = out, table
        self.folder = out if not out.suffix else out.with_name(f"{out.name}.parts")
        state = self.folder / _STATE
        if overwrite and state.exists():
            shutil.rmtree(self.folder)  # the parts of an earlier job, and nothing else
        elif out.suffix and out.exists() and not overwrite:
            raise EngramError(f"{out} exists; replace it with --overwrite, or choose another name.")
        elif state.exists():
            self._check_same(json.loads(state.read_bytes()), identity)
        elif self.folder.is_dir() and any(self.folder.iterdir()):
            raise EngramError(f"The folder {self.folder} is not empty; choose another one.")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngramError(
                f"The folder {self.folder} cannot be made ({error.strerror}); choose another."
            ) from None
        write_atomically(state, json.dumps(identity, indent=1).encode())

    def _check_same(self, before: dict[str, Any], identity: dict[str, Any]) -> None:
        now = json.loads(json.dumps(identity))
        different = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if different:
            raise EngramError(
                f"{self.folder} has answers of another job ({', '.join(different)} differ); "
                "continue with the same command, or start anew with --overwrite."
            )

    def existing(self) -> Iterator[Path]:
        """The parts that are there; they were written in order."""
        for number in count():
            path = self.folder / part_name(number, self.table.suffix)
            if not path.exists():
                self._next = number
                return
            yield path

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        self.table.write(self.folder / part_name(self._next, self.table.suffix), rows)
        self._next += 1

    def finish(self) -> None:
        """Join the parts if one file is wanted. A crash before the end leaves the parts."""
        if self.folder == self.out:
            return
        with replaced(self.out) as file:
            self.table.join(list(self.existing()), file)
        shutil.rmtree(self.folder)


class _Work:
    """What is computed for every image."""

    def __init__(
        self, model: MemoryViT, settings: BulkSettings, names: Sequence[str], masks: Path | None
    ) -> None:
        device = Team(settings.device).device
        self.engine = TorchEngine(model, device=device, precision=settings.precision)
        self.model, self.settings = model, settings
        self.names, self.masks = names, masks
        self.kinds = {_column(name): kind_of(model, name).name for name in names}
        self.vectors = {f"{_column(name)}.logits": True for name in names if settings.logits}
        tasks = [name for name in names if name != "base"]
        self.scores = [
            f"{_column(name)}.score" for name in tasks if model.task(name).statistics is not None
        ]
        if settings.embed:
            self.vectors |= {f"{name}.embedding": False for name in model.embedding_names(None)}
        if masks is not None:
            masks.mkdir(parents=True, exist_ok=True)

    def identity(self, sources: Sequence[str]) -> dict[str, Any]:
        """What has to be the same for parts to belong together."""
        contents = {n: self.model.engram(n).content for n in self.names if n != "base"}
        settings = self.settings
        cast = {} if settings.precision == "fp32" else {"precision": settings.precision}
        if self.model.trunk.stored != "fp32":
            cast["trunk_dtype"] = self.model.trunk.stored
        return {
            **cast,
            "trunk": self.model.trunk.fingerprint,
            "tasks": {name: contents.get(name, "") for name in self.names},
            "sources": list(sources),
            "top_k": settings.top_k,
            "logits": settings.logits,
            "embed": settings.embed,
            "rows": settings.rows,
            "masks": None if self.masks is None else str(self.masks),
        }

    def parts(
        self, items: Iterable[Item], first: int, answered: Callable[[int], None]
    ) -> Iterator[list[dict[str, Any]]]:
        """The rows of one part after another; `first` is the number of the first image.

        `answered` is called after every batch with the number of the next image.
        """
        decoders = Decoders(self.model.preprocessing, self.settings.decoders)
        try:
            decoded, number = decoders.decoded(items), first
            while part := self._part(islice(decoded, self.settings.rows), number, answered):
                yield part
                number += len(part)
        finally:
            decoders.close()

    def _part(
        self, decoded: Iterator[DecodedItem], number: int, answered: Callable[[int], None]
    ) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        while batch := list(islice(decoded, self.settings.batch)):
            rows += self._rows(batch, number + len(rows))
            answered(number + len(rows))
        return rows

    def _rows(self, batch: Sequence[DecodedItem], number: int) -> list[dict[str, Any]]:
        """The rows about one batch, whose first image has this number.

        An image that cannot be read has an error.
        """
        rows: list[dict[str, Any]] = [
            {"image": one.name, "error": one.error or None} for one in batch
        ]
        good = [i for i, one in enumerate(batch) if one.view is not None]
        if not good:
            return rows
        views = torch.from_numpy(np.stack([batch[i].view for i in good]))  # type: ignore[misc]
        pixels = normalise(to_device(views, self.engine.device), self.model.preprocessing)
        outputs, scores = map(on_cpu, self.engine.scored(pixels, self.names))
        vectors = on_cpu(self.engine.embed(pixels)) if self.settings.embed else {}
        for place, i in enumerate(good):
            row = rows[i]
            own = {name: output[place] for name, output in outputs.items()}
            answers, problem = answers_about(self.model, own, self.settings.top_k)
            for name, answer in answers.items():
                row[_column(name)] = self._answer(row["image"], name, answer, number + i)
            for name, score in scores.items():
                row[f"{_column(name)}.score"] = shown_score(score[place])
            if problem:
                row["error"] = f"{row['image']}: {problem}"
            for name in self.names if self.settings.logits else ():
                row[f"{_column(name)}.logits"] = own[name].flatten().half().numpy()
            for name, vector in vectors.items():
                row[f"{name}.embedding"] = vector[place].numpy()
        return rows

    def _answer(self, image: str, name: str, answer: Any, number: int) -> Any:
        """An answer as its row has it: a mask is a file of its own, or left out."""
        if not kind_of(self.model, name).per_pixel:
            return answer
        mask = None
        if self.masks is not None:
            path = self.masks / f"{number:09}-{Path(image).stem}.{name}.png"
            write_atomically(path, base64.b64decode(answer["mask"].partition(",")[2]))
            mask = str(path)
        return {**answer, "mask": mask}


def _column(name: str) -> str:
    return f"{name}_" if name in _RESERVED else name
