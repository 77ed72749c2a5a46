"""Bulk prediction: from sources of images to a table of answers, part by part, each once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engram.errors import EngramError, Interrupted
from engram.inference.bulk.addresses import Allowed
from engram.inference.bulk.answering import Answering, Questions, answered_here
from engram.inference.bulk.parts import Parts
from engram.inference.bulk.sources import count_items, read_items
from engram.inference.bulk.table_formats import table_format
from engram.util.files import make_folder
from engram.util.processes import stoppable
from engram.util.progress import Progress, silent
from engram.util.text import counted

_MAY_CHANGE = ("image_column", "batch", "decoders", "device")  # settings that change no answer


@dataclass(frozen=True)
class BulkResult:
    """The table that was written, and how much of it was there before."""

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
    questions: Questions,
    sources: Sequence[str],
    out: Path,
    *,
    overwrite: bool = False,
    answering: Answering = answered_here,
    progress: Progress = silent,
) -> BulkResult:
    """Answer tasks for all images of some sources, and write the answers as a table.

    Answers are written in parts, beside `out` until it is complete. If the work is interrupted, in
    whatever way, the same call continues with the parts that are missing. A table that is in place
    is complete, and only `overwrite` replaces it.

    `out` is a file (`.parquet`, `.jsonl` or `.csv`), or a folder that keeps the parts as parquet.
    `answering` answers batches in this process, or on a cluster.

    Raises:
        EngramError: A source cannot be read, or what is there belongs to another job.
        Interrupted: The work was stopped by Ctrl-C or SIGTERM. The parts before are written.
    """
    settings = questions.settings
    table = table_format(out.suffix or ".parquet", questions.columns)
    identity = _identity(questions, sources)
    with Parts(out, table, identity, overwrite) as parts:
        if images := parts.finished():
            return BulkResult(out, images, errors=0, resumed=images, seconds=0.0)
        if questions.masks is not None:
            make_folder(questions.masks)
        began = time.perf_counter()
        total = count_items(sources, settings.image_column)
        answered = 0

        def found(images: int) -> None:
            progress("answering", answered + images, total, "there already")

        items = read_items(sources, settings.image_column, Allowed.parse(settings.allow_url))
        batches = parts.missing(items, settings.rows, settings.batch, found)
        try:
            with stoppable(at_once=True), closing(answering(questions, batches)) as stream:
                for batch, rows in stream:
                    questions.keep_masks(rows, batch.number)
                    answered += len(rows)
                    parts.add(batch, rows)
                    rate = answered / (time.perf_counter() - began)
                    note = "" if total else f"{parts.resumed + answered:,} images, {rate:,.1f}/s"
                    progress("answering", parts.resumed + answered, total, note)
                parts.add_last()
        except KeyboardInterrupt:  # wherever it was: a part is there completely or not at all
            kept = counted(parts.resumed + parts.done, "image")
            raise Interrupted(
                f"Stopped; the answers about {kept} are kept. Run the same command again to "
                "continue."
            ) from None
        images = parts.resumed + parts.done
        if not images and parts.problem is None:
            raise EngramError(f"There are no images in {', '.join(sources)}.")
        parts.finish()
        seconds = time.perf_counter() - began
        return BulkResult(out, images, parts.errors, parts.resumed, seconds)


def _identity(questions: Questions, sources: Sequence[str]) -> dict[str, Any]:
    """The facts that have to be the same for parts to belong together."""
    model, masks = questions.model, questions.masks
    contents = {name: model.engram(name).content for name in questions.names if name in model.tasks}
    settings = asdict(questions.settings)
    return {
        "backbone": model.backbone.fingerprint,
        "backbone_dtype": model.backbone.stored,
        "tasks": {name: contents.get(name, "") for name in questions.names},
        "sources": list(sources),
        "masks": None if masks is None else str(masks),
        **{name: value for name, value in settings.items() if name not in _MAY_CHANGE},
    }
