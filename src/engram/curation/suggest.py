"""`engram suggest`: which images of a pool to label next.

One pass over the pool keeps a vector of the backbone and the task's uncertainty for every image.
Then images are chosen one after the other, as `choose` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from engram.data.near_duplicates import SIMILAR, directions
from engram.errors import EngramError
from engram.images.preprocessing import normalise
from engram.inference.bulk.addresses import Allowed
from engram.inference.bulk.bulk_settings import PoolSettings
from engram.inference.bulk.decoders import Decoders, Item
from engram.inference.bulk.sources import count_items, read_items
from engram.inference.engine import TorchEngine, on_cpu
from engram.inference.predict import answers_about, shown_familiarity
from engram.model import MemoryViT
from engram.util.processes import ProcessGroup
from engram.util.progress import Progress, silent
from engram.util.tensors import to_device

_UNSURE = 10  # times as many of the most unsure images are clustered as are chosen
_TYPICAL = 5_000  # images that are clustered where none is more unsure than another
_ITERATIONS = 10  # of k-means
_ROWS = 256


@dataclass(frozen=True)
class Suggestion:
    """An image of a pool, and what a task says about it now."""

    number: int  # among all images of the sources
    item: Item  # without bytes
    uncertainty: float | None = None
    answer: str = ""
    familiarity: float | None = None
    copies: int = 0  # near-copies of it in the pool, which are left out


@dataclass(eq=False)
class Pool:
    """The images of some sources."""

    images: list[Suggestion] = field(default_factory=list)  # that can be read
    vectors: list[Tensor] = field(default_factory=list)  # of these, in batches (b, width)
    failed: dict[str, str] = field(default_factory=dict)  # the others: name and reason


@dataclass(frozen=True)
class Suggestions:
    """Images to label, the first ones first, and the pool that they are from."""

    chosen: Sequence[Suggestion]
    images: int  # of the pool that can be read
    known: int  # of these, near-copies of labelled images
    failed: dict[str, str]
    task: str | None
    note: str = ""


def task_to_ask(model: MemoryViT) -> str | None:
    """The task of a model, or the one that extends all others; None if it has none."""
    extended = {parent for task in model.tasks.values() for parent in task.spec.extends}
    names = [name for name in model.tasks if name not in extended]
    if len(names) > 1:
        raise EngramError(
            f"--task has the tasks {', '.join(names)}, and images are chosen for one; give the "
            "file of one engram."
        )
    return names[0] if names else None


def suggest(
    model: MemoryViT,
    sources: Sequence[str],
    count: int,
    settings: PoolSettings,
    labelled: Sequence[str] = (),
    progress: Progress = silent,
) -> Suggestions:
    """Choose at most so many images of a pool that are worth a label to the task of a model.

    Pool and `labelled` images, whose near-copies are left out, are sources as `predict_to` reads
    them. A model without a task is its backbone.
    """
    task = task_to_ask(model)
    known = read_pool(model, None, labelled, settings, progress) if labelled else Pool()
    pool = read_pool(model, task, sources, settings, progress)
    vectors = torch.cat(pool.vectors)
    unsure = [one.uncertainty for one in pool.images if one.uncertainty is not None]
    uncertainty = torch.tensor(unsure) if unsure else None
    rows, near = choose(vectors, uncertainty, count, torch.cat([vectors[:0], *known.vectors]))
    if not rows:
        raise EngramError(
            f"There is nothing to label: all images of {', '.join(sources)} are labelled already, "
            "or near-copies of such."
        )
    chosen, note = [replace(pool.images[i], copies=copies) for i, copies in rows], ""
    if not unsure:
        why = "no task was asked"
        if task is not None:
            why = f"{model.task(task).kind.name} does not tell how unsure an answer is"
        note = f"{why}: images were chosen that stand for many others"
    return Suggestions(chosen, len(pool.images), near, pool.failed, task, note)


def read_pool(
    model: MemoryViT,
    task: str | None,
    sources: Sequence[str],
    settings: PoolSettings,
    progress: Progress,
) -> Pool:
    """One pass over the images of some sources, with the answers of a task if there is one.

    Raises:
        EngramError: There are no images, or none can be read.
    """
    device = ProcessGroup(settings.device).device
    engine = TorchEngine(model, device=device, precision=settings.precision)
    pool, items = Pool(), list[Item]()

    def remembered() -> Iterator[Item]:
        for item in _read(sources, settings):
            items.append(item if item.data is None else Item(item.place, b""))
            yield item

    total, done = count_items(sources, settings.image_column), 0
    with closing(Decoders(model.preprocessing, settings.decoders)) as decoders:
        decoded = decoders.decoded(remembered())
        while batch := list(islice(decoded, settings.batch)):
            pool.failed |= {one.name: one.error for one in batch if one.view is None}
            good = {i: one.view for i, one in enumerate(batch, done) if one.view is not None}
            if good:
                views = torch.from_numpy(np.stack(list(good.values())))
                pixels = normalise(to_device(views, engine.device), model.preprocessing)
                answers, vectors = _answers(engine, pixels, task)
                pool.vectors.append(vectors)
                pool.images += [
                    Suggestion(i, items[i], *answer)
                    for i, answer in zip(good, answers, strict=True)
                ]
            done += len(batch)
            progress("reading the images", done, total, "" if total else f"{done:,} images")
    if not pool.images:
        reason = next(iter(pool.failed.values()), "")
        where = ", ".join(sources)
        raise EngramError(
            f"No image can be read: {reason}." if reason else f"There are no images in {where}."
        )
    return pool


def _read(sources: Sequence[str], settings: PoolSettings) -> Iterator[Item]:
    return read_items(sources, settings.image_column, Allowed.parse(settings.allow_url))


def _answers(
    engine: TorchEngine, pixels: Tensor, name: str | None
) -> tuple[list[tuple[float | None, str, float | None]], Tensor]:
    """Uncertainty, answer and familiarity of each image, and vectors of all (b, width)."""
    outputs, familiarity, vectors = engine.with_base(pixels, [] if name is None else [name])
    vectors = vectors.float().cpu()
    if name is None:
        return [(None, "", None)] * len(pixels), vectors
    model, task, output = engine.model, engine.model.task(name), on_cpu(outputs)[name]
    known, found = on_cpu(familiarity).get(name), list[tuple[float | None, str, float | None]]()
    unsure = task.kind.uncertainty(output, task.head.fitted)
    for i in range(len(output)):
        answers, problem = answers_about(model, {name: output[i]}, 1)
        found.append((
            None if unsure is None else float(unsure[i].nan_to_num(1.0)),
            problem or task.kind.words(answers[name]),
            None if known is None else shown_familiarity(known[i]),
        ))  # fmt: skip
    return found, vectors


def images_again(
    suggestions: Suggestions, sources: Sequence[str], settings: PoolSettings
) -> Iterator[tuple[Suggestion, bytes]]:
    """The chosen images, encoded, in any order: what is inside of files is read again."""
    inside = {}
    for one in suggestions.chosen:
        if one.item.data is None:
            yield one, one.item.read()
        else:
            inside[one.number] = one
    for number, item in enumerate(_read(sources, settings)) if inside else ():
        if number in inside:
            yield inside.pop(number), item.read()
        if not inside:
            return


# The choice


def choose(
    vectors: Tensor, uncertainty: Tensor | None, count: int, labelled: Tensor
) -> tuple[list[tuple[int, int]], int]:
    """Choose rows of the vectors (images, width): unsure, different, and typical of many.

    Returns the rows, each with the number of its near-copies, and how many rows are near-copies of
    labelled images.

    The most unsure images, near-copies once, are clustered by k-means, in which an image counts as
    much as it is unsure, and of each cluster the image in its middle is chosen (Zhdanov, 2019). The
    clusters with most uncertainty come first. Without uncertainty all images count alike.
    """
    sizes = [len(vectors), len(labelled)]
    x, known = torch.split(directions(torch.cat([vectors, labelled])), sizes)
    free = torch.ones(len(x), dtype=torch.bool)
    for part in torch.split(known, _ROWS) if len(known) else ():
        free &= (x @ part.mT).amax(1) <= SIMILAR
    near = int((~free).sum())
    copies = _without_copies(x, free, uncertainty, _UNSURE * count)
    rows = torch.tensor(list(copies), dtype=torch.long)
    if len(rows) > count:
        weight = torch.ones(len(rows)) if uncertainty is None else uncertainty[rows]
        rows = rows[_middles(x[rows], weight.clamp(min=1e-6), count)]
    return [(row, copies[row]) for row in rows.tolist()], near


def _without_copies(
    x: Tensor, free: Tensor, uncertainty: Tensor | None, most: int
) -> dict[int, int]:
    """Rows of which none is a near-copy of another, the most unsure first, and their copies."""
    if uncertainty is None:
        most = max(most, _TYPICAL)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    else:
        order = uncertainty.argsort(descending=True, stable=True)
    found: dict[int, int] = {}
    for i in order.tolist():
        if free[i]:
            same = free & (x @ x[i] > SIMILAR)
            same[i] = True
            free &= ~same
            found[i] = int(same.sum()) - 1
            if len(found) == most:
                break
    return found


def _middles(x: Tensor, weight: Tensor, count: int) -> Tensor:
    """Rows in the middle of so many clusters of weighted rows, the heaviest cluster first."""
    centres = x[_spread(x, weight, count)]
    for _ in range(_ITERATIONS):
        nearest = torch.cdist(x, centres).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, x * weight[:, None])
        total = torch.zeros(count).index_add_(0, nearest, weight)
        centres = torch.where(total[:, None] > 0, sums / total.clamp(min=1e-12)[:, None], centres)
    distance = torch.cdist(x, centres)
    chosen: list[int] = []
    for cluster in total.argsort(descending=True, stable=True).tolist():
        distance[chosen, cluster] = torch.inf
        chosen.append(int(distance[:, cluster].argmin()))
    return torch.tensor(chosen)


def _spread(x: Tensor, weight: Tensor, count: int) -> list[int]:
    """Rows to start from (greedy k-means++): drawn by weight times the squared distance to others.

    Of some draws, the one is taken that leaves the rows nearest to what is taken.
    """
    generator, draws = torch.Generator().manual_seed(0), 2 + int(math.log(count))
    distance, rows = torch.full((len(x),), 4.0), list[int]()  # of unit vectors, at most
    for _ in range(count):
        chance = (weight * distance).clamp(min=1e-12)  # the copies of what is taken, at last
        drawn = torch.multinomial(chance, draws, replacement=True, generator=generator)
        left = torch.minimum(distance[:, None], torch.cdist(x, x[drawn]).square())
        best = int((weight[:, None] * left).sum(0).argmin())
        rows.append(int(drawn[best]))
        distance = left[:, best]
    return rows
