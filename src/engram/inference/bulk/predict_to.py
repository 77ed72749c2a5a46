"""Bulk prediction: from sources of images to a table of answers, part by part.

Parts that are written are not done again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram.errors import EngramError, Interrupted
from engram.inference.bulk.addresses import Allowed
from engram.inference.bulk.answering import Answering, Questions, answered_here, keep_masks
from engram.inference.bulk.bulk_settings import BulkSettings
from engram.inference.bulk.parts import Parts
from engram.inference.bulk.sources import count_items, read_items
from engram.inference.bulk.table_formats import table_format
from engram.inference.engine import MakeEngine, torch_engine
from engram.inference.predict import answered_names
from engram.model import MemoryViT
from engram.util.files import make_folder
from engram.util.processes import stoppable
from engram.util.progress import Progress, silent
from engram.util.text import counted


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
    model: MemoryViT,
    sources: Sequence[str],
    out: Path,
    settings: BulkSettings | None = None,
    *,
    tasks: Sequence[str] | None = None,
    masks: Path | None = None,
    overwrite: bool = False,
    answering: Answering = answered_here,
    make_engine: MakeEngine = torch_engine,
    progress: Progress = silent,
) -> BulkResult:
    """Answer tasks for all images of some sources, and write the answers as a table.

    Answers are written in parts, beside `out` until it is complete. If the work is interrupted, in
    whatever way, the same call continues with the parts that are missing. A table that is in place
    is complete, and only `overwrite` replaces it.

    `out` is a file (`.parquet`, `.jsonl` or `.csv`), or a folder that keeps the parts as parquet.
    `masks` is a folder for masks and heat maps; without it only areas and scores are written.
    `answering` answers batches in this process, or on a cluster.

    Raises:
        EngramError: A source cannot be read, or what is there belongs to another job.
        Interrupted: The work was stopped by Ctrl-C or SIGTERM. The parts before are written.
    """
    settings = settings or BulkSettings()
    names = answered_names(model, tasks)
    questions = Questions(model, names, settings, masks is not None, make_engine)
    suffix = out.suffix or ".parquet"
    table = table_format(suffix, questions.columns)
    identity = _identity(questions, sources, masks)
    with Parts(out, table, identity, overwrite) as parts:
        if images := parts.finished():
            return BulkResult(out, images, errors=0, resumed=images, seconds=0.0)
        if masks is not None:
            make_folder(masks)
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
                    if masks is not None:
                        keep_masks(rows, batch.number, questions.masked, masks)
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


def _identity(questions: Questions, sources: Sequence[str], masks: Path | None) -> dict[str, Any]:
    """The facts that have to be the same for parts to belong together."""
    model, settings = questions.model, questions.settings
    contents = {name: model.engram(name).content for name in questions.names if name in model.tasks}
    return {
        "backbone": model.backbone.fingerprint,
        "backbone_dtype": model.backbone.stored,
        "precision": settings.precision,
        "engine": settings.engine,
        "allow_url": settings.allow_url,
        "tasks": {name: contents.get(name, "") for name in questions.names},
        "sources": list(sources),
        "top_k": settings.top_k,
        "logits": settings.logits,
        "embed": settings.embed,
        "rows": settings.rows,
        "masks": None if masks is None else str(masks),
    }
