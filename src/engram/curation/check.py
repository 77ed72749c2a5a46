"""`engram check`: what is wrong with a dataset, from one pass of the backbone over its images.

    labels      labels that look wrong, each with the class that heads suggest which did not learn
                from the image, and the nearest images of that class (`suspected_labels`)
    duplicates  images of one picture, and frames of one scene (`data/near_duplicates.py`)
    leaks       images of val and test whose picture or scene is in train, too
    outliers    images that are far from all others
    confused    classes that cannot be told apart
    unreadable, tiny

The data is not changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engram.curation.overlay import COMPARED, overlays, small_grey
from engram.data.datasets import Dataset, Splits
from engram.data.folds import Integers
from engram.data.near_duplicates import (
    SIMILAR,
    Pair,
    directions,
    groups_of,
    nearest_rows,
    similar_pairs,
)
from engram.data.overview import Sample
from engram.data.source import SPLITS
from engram.errors import EngramError
from engram.images.decode import BadImage, image_size, read_image
from engram.inference.evaluate import Answers
from engram.methods import Head
from engram.model import MemoryViT
from engram.tasks.task_settings import TaskSettings
from engram.train.features.cache import Cache, contents_of
from engram.train.features.caches import room
from engram.train.features.feeds import FeedPlan
from engram.train.heads.columns import Columns
from engram.train.heads.solve import Images, Rows, Solver
from engram.train.recipe import Recipe
from engram.train.search.auto import trained_regimes
from engram.util.processes import ProcessGroup
from engram.util.progress import Progress, counter, silent
from engram.util.text import storage

_BATCH = 256  # rows that are read at once
_FOLDS = 5
_WITNESSES = 3  # images that speak for a suggested label
#: Cosine of features from which two pictures are laid over each other, and the correlation then
#: from which they are the same. Before one background, different things can look alike when small.
_COPIES = ((0.75, 0.97), (0.65, 0.99))
_IDENTICAL = 0.999  # of images with so few pixels that different ones look alike
_NEIGHBOURS = 5  # the distance to this one says whether an image is an outlier
OUTLIER = 2.25  # deviations of distances beyond which it is one
_TINY = 0.25  # of the side that the backbone sees
_CONFUSED = 0.25  # of the images of two classes that were taken for the other one


@dataclass(frozen=True)
class Finding:
    """An image that looks suspicious, and the images that speak for it."""

    sample: Sample
    others: Sequence[Sample]  # the nearest ones (of the suggested class), or that show the same
    #: Of a label, how many times likelier the suggested class is; of images that show the same, the
    #: lowest cosine that connects them; of an outlier, deviations from the median distance.
    score: float
    kind: str = ""  # of images that show the same: copies (one picture) or frames (one scene)
    suggested: str = ""  # the class


@dataclass(frozen=True)
class Check:
    """All that was found, the most suspicious first."""

    splits: Splits
    images: int  # that can be read
    labels: Sequence[Finding]
    duplicates: Sequence[Finding]
    leaks: Sequence[Finding]  # images of val and test that show what one of train (or val) shows
    outliers: Sequence[Finding]  # images that are far from all others
    confused: Sequence[tuple[str, str, float]]  # classes, and the share taken for the other one
    unreadable: Sequence[str]  # "PATH: reason"
    tiny: Sequence[tuple[Sample, tuple[int, int]]]  # with width and height
    unchecked: str = ""  # why labels were not checked

    @property
    def mostly_tiny(self) -> bool:
        """Whether small images are what the data is made of, and no finding of each."""
        return 2 * len(self.tiny) > self.images


def check(model: MemoryViT, splits: Splits, recipe: Recipe, progress: Progress = silent) -> Check:
    """Look at all images of a dataset with the backbone of a model, whatever its tasks are.

    The recipe says how large the cache may get, and how many processes decode images.
    """
    found = image_features(model, splits, recipe, progress)
    progress("comparing images", 0, 0)
    copies, frames = near_duplicates(found, progress)
    groups = groups_of(len(found.samples), [*copies, *frames])
    answers = None
    unchecked = _why_unchecked(splits, found)
    if not unchecked:
        progress("checking labels", 0, 0)
        answers = held_out_logits(model, splits, found, groups, recipe)
    return Check(
        splits=splits,
        images=len(found.samples),
        labels=[] if answers is None else list(_labels(found, *answers)),
        duplicates=_duplicate_groups(found.samples, copies, frames),
        leaks=_leaks(found.samples, copies, frames),
        outliers=_outliers(found),
        confused=[] if answers is None else _confused(found, *answers),
        unreadable=sorted(found.unreadable.values()),
        tiny=_tiny(found.samples, model),
        unchecked=unchecked,
    )


# Features of all images, from the cache that `fit` uses


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """Features of the images that can be read; rows are in the order of `samples`."""

    samples: Sequence[Sample]
    pooled: Tensor  # (images, width)
    class_tokens: Tensor  # (images, features): of all layers, in half precision
    unreadable: dict[str, str]  # the reason by name

    def rows(self, split: str) -> list[int]:
        return [row for row, (dataset, _) in enumerate(self.samples) if dataset.split == split]


def image_features(
    model: MemoryViT, splits: Splits, recipe: Recipe, progress: Progress = silent
) -> ImageFeatures:
    """Run the backbone on what is not cached yet, and read the features of all splits.

    Training and validation images are cached as `fit` caches them, so that it finds them there.
    Test images, which it does not cache, take less room.
    """
    samples: list[Sample] = []
    parts: list[tuple[Tensor, Tensor]] = []
    unreadable: dict[str, str] = {}
    for dataset in splits.datasets.values():
        count = counter(progress, "reading images", len(dataset))
        contents = contents_of(dataset, count)
        cache = _cache_for(model, splits, recipe, dataset)
        missing = len({c for c in contents if c and c not in cache})
        count = counter(progress, "caching", missing, storage(missing * cache.row_bytes))
        cache.forget(cache.damaged(contents))
        unreadable |= cache.fill(dataset, contents, workers=recipe.workers, progress=count)
        good = [i for i, content in enumerate(contents) if content in cache]
        samples += [(dataset, i) for i in good]
        for start in range(0, len(good), _BATCH):
            batch = [contents[i] for i in good[start : start + _BATCH]]
            pooled = cache.read(batch, only_pooled=True)[:, -1].float()
            parts.append((pooled, cache.class_tokens(batch)))
    if not parts:
        reason = next(iter(unreadable.values()), "there are no images")
        raise EngramError(f"No image of {splits.name} can be read: {reason}.")
    pooled, class_tokens = (torch.cat(rows) for rows in zip(*parts, strict=True))
    return ImageFeatures(samples, pooled, class_tokens, unreadable)


def _cache_for(model: MemoryViT, splits: Splits, recipe: Recipe, dataset: Dataset) -> Cache:
    """The cache of `fit`, or where it does not keep such images or has no room, a smaller one."""
    if splits.train is not None and len(splits.classes) > 1:
        settings, regimes = TaskSettings(), trained_regimes(model, splits, ())
        methods = [settings.method(regime, lenient=True) for regime in regimes]
        specs = [splits.task_spec("check", method) for method in methods]
        nothing = splits.train.subset([], "val")
        plan = FeedPlan(model, specs, replace(splits, val=splits.val or nothing), recipe)
        fits = plan.too_large() is None and plan.bytes <= 0.8 * room()
        smaller = plan.keeps == "all" and model.backbone.config.class_token  # has the same tokens
        if fits and not (dataset.split == "test" and smaller):
            return plan.cache()
    return Cache(model.backbone, model.preprocessing, keeps="statistics")


# Near-duplicates


def near_duplicates(found: ImageFeatures, progress: Progress) -> tuple[list[Pair], list[Pair]]:
    """Pairs of images that show the same picture, and pairs that only show the same scene."""
    pairs = similar_pairs(directions(found.class_tokens), _COPIES[-1][0])
    rows = sorted({row for pair in pairs for row in pair[:2]})
    count = counter(progress, "comparing images", len(rows))
    greys, few_pixels = {}, set()
    for row in rows:
        dataset, i = found.samples[row]
        with suppress(BadImage):  # it was readable a moment ago
            image = read_image(dataset.read(i))
            greys[row] = small_grey(image)
            if min(image.size) < COMPARED:
                few_pixels.add(row)
        count(1)
    pairs = [pair for pair in pairs if pair.first in greys and pair.second in greys]
    copies, frames = [], []
    for pair, same in zip(pairs, overlays(greys, [pair[:2] for pair in pairs]), strict=True):
        alike = any(pair.cosine >= cosine and same >= least for cosine, least in _COPIES)
        if alike and (same >= _IDENTICAL or not few_pixels & {pair.first, pair.second}):
            copies.append(pair)
        elif pair.cosine >= SIMILAR:
            frames.append(pair)
    return copies, frames


def _duplicate_groups(
    samples: Sequence[Sample], copies: Sequence[Pair], frames: Sequence[Pair]
) -> list[Finding]:
    """Groups of copies, then groups of frames, with their copies; the most similar first."""
    found = list[Finding]()
    for kind, pairs in (("copies", copies), ("frames", frames)):
        groups = groups_of(len(samples), pairs if kind == "copies" else [*copies, *frames])
        cosines: dict[int, float] = {}
        for pair in pairs:
            group = int(groups[pair.first])
            cosines[group] = min(cosines.get(group, 1.0), pair.cosine)
        for group, cosine in sorted(cosines.items(), key=lambda one: -one[1]):
            first, *others = (samples[int(row)] for row in np.flatnonzero(groups == group))
            found.append(Finding(first, others, cosine, kind))
    return found


def _leaks(
    samples: Sequence[Sample], copies: Sequence[Pair], frames: Sequence[Pair]
) -> list[Finding]:
    """Every image of val and test that shows what an image of an earlier split shows."""
    order = list(SPLITS)
    best: dict[int, Finding] = {}
    for kind, pairs in (("copies", copies), ("frames", frames)):
        for first, second, cosine in sorted(pairs, key=lambda pair: -pair.cosine):
            of = [order.index(samples[row][0].split) for row in (first, second)]
            if of[0] != of[1]:
                late, early = (first, second) if of[0] > of[1] else (second, first)
                best.setdefault(late, Finding(samples[late], [samples[early]], cosine, kind))
    return list(best.values())


# Labels
#
# Images are ranked by the odds of the likeliest class against the label. On four datasets with
# changed labels that is as good as the probability of the label and better than the margin, and
# what a limit of the odds lists is right more often than what the thresholds of confident learning
# list (Northcutt, Jiang and Chuang, JAIR 2021): benchmarks/results/check.md.

#: Odds of another class against the label from which it is listed, and from which it is counted
#: where nobody asked. With clean labels, 1 to 2 % and 0.2 to 0.5 % of the images have such odds.
SUSPECTED, WRONG = 30.0, 100.0
_WORTH_SAYING = 0.01  # of the labels


class Suspect(NamedTuple):
    """An image whose label looks wrong."""

    row: int
    suggested: int  # class
    odds: float  # how many times likelier it is than the label


def label_odds(logits: Tensor, labels: Tensor) -> Tensor:
    """Odds (images) of the likeliest class against the label: 1 and more."""
    logits = logits.double()
    return (logits.amax(1) - logits.gather(1, labels[:, None])[:, 0]).exp()


def suspected_labels(logits: Tensor, labels: Tensor, least: float = SUSPECTED) -> list[Suspect]:
    """Images whose label looks wrong by odds of at least so much, the most suspicious first.

    The logits are calibrated (images, classes), from heads that did not learn from the image.
    """
    odds, suggested = label_odds(logits, labels), logits.argmax(1)
    rows = (odds >= least).nonzero()[:, 0]
    rows = rows[odds[rows].argsort(descending=True, stable=True)]
    return [Suspect(i, int(suggested[i]), float(odds[i])) for i in rows.tolist()]


def wrong_labels(answers: Answers | None) -> int:
    """Number of labels of held-out images that look wrong, if it is worth saying."""
    if answers is None or answers.dataset.kind != "classification" or not len(answers.labels):
        return 0
    found = len(suspected_labels(answers.logits, answers.labels, WRONG))
    return found if found >= _WORTH_SAYING * len(answers.labels) else 0


def _why_unchecked(splits: Splits, found: ImageFeatures) -> str:
    """Why labels cannot be checked; nothing if they can."""
    if splits.kind != "classification":
        return f"not checked in {splits.kind}"
    labels = _labels_of([found.samples[row] for row in found.rows("train")])
    if (labels.bincount() > 1).sum() < 2:
        return "not checked: fewer than two classes have two training images"
    return ""


def held_out_logits(
    model: MemoryViT, splits: Splits, found: ImageFeatures, groups: Integers, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """Calibrated logits for images that the head did not learn from, and their rows.

    Training images are answered by the head of their fold, and near-duplicates are in one fold.
    Others are answered by the head for all training images.
    """
    train, rows = splits["train"], torch.tensor(found.rows("train"))
    numbers = torch.tensor([found.samples[row][1] for row in rows.tolist()])
    folded = replace(splits, val=None, test=None).with_folds(_FOLDS, seed=recipe.data_seed)
    assert folded.folds is not None
    together = len(groups) + np.arange(len(train))  # what cannot be read is in no group
    together[numbers] = groups[rows]
    folded.folds.keep_together(train, together)
    alone = MemoryViT(model.backbone)
    task = alone.add(splits.task_spec("check", Head()))
    labels = torch.from_numpy(train.labels)[numbers]
    known = Rows(found.pooled[rows].half(), labels, numbers)
    images = Images(Columns(found.pooled.shape[1]), [known])
    solution = Solver(task, images, folded, recipe, ProcessGroup()).best((None,))
    held_out, weight, bias = solution.answers, solution.weight[-1].cpu(), solution.bias[-1].cpu()
    others = torch.tensor(found.rows("val") + found.rows("test"), dtype=torch.long)
    outputs = torch.cat([held_out.outputs, found.pooled[others] @ weight.mT + bias])
    temperature = task.kind.temperature(held_out.outputs, held_out.labels)
    answered = rows[torch.searchsorted(numbers, held_out.samples)]
    return outputs / temperature, torch.cat([answered, others])


def _labels_of(samples: Sequence[Sample]) -> Tensor:
    return torch.tensor([int(dataset.labels[i]) for dataset, i in samples], dtype=torch.long)


def _labels(found: ImageFeatures, logits: Tensor, rows: Tensor) -> Iterator[Finding]:
    """Labels that look wrong, each with the nearest images of the class that is suggested."""
    labels, unit = _labels_of(found.samples), directions(found.pooled)
    for place, suggested, odds in suspected_labels(logits, labels[rows]):
        row = int(rows[place])
        of_class = (labels == suggested).nonzero()[:, 0]
        nearest = (unit[of_class] @ unit[row]).topk(min(_WITNESSES, len(of_class))).indices
        witnesses = [found.samples[i] for i in of_class[nearest].tolist()]
        classes = found.samples[row][0].classes
        yield Finding(found.samples[row], witnesses, odds, suggested=classes[suggested])


def _confused(found: ImageFeatures, logits: Tensor, rows: Tensor) -> list[tuple[str, str, float]]:
    """Pairs of classes that are often taken for each other, the worst first."""
    labels, answers = _labels_of(found.samples)[rows], logits.argmax(1)
    names = found.samples[0][0].classes
    counts = torch.zeros(len(names), len(names)).index_put_(
        (labels, answers), torch.ones(len(labels)), accumulate=True
    )
    images = counts.sum(1)
    shares = (counts + counts.mT) / (images[:, None] + images).clamp(min=1)
    pairs = (shares.triu(1) >= _CONFUSED).nonzero().tolist()
    pairs.sort(key=lambda pair: -float(shares[pair[0], pair[1]]))
    return [(names[a], names[b], float(shares[a, b])) for a, b in pairs]


# Images


def _outliers(found: ImageFeatures) -> list[Finding]:
    """Images whose neighbours are much farther away than is usual, the farthest first."""
    if len(found.samples) <= 2 * _NEIGHBOURS:
        return []
    deviations, nearest = distances_to_neighbours(found.pooled)
    far = (deviations > OUTLIER).nonzero()[:, 0]
    far = far[deviations[far].argsort(descending=True, stable=True)]
    return [
        Finding(found.samples[i], [found.samples[int(nearest[i])]], float(deviations[i]))
        for i in far.tolist()
    ]


def distances_to_neighbours(pooled: Tensor) -> tuple[Tensor, Tensor]:
    """Distances of images to a near neighbour, in deviations from the median, and the nearest rows.

    The deviation is that of the larger half, as if it was normal: cosine distances are bounded, so
    where images differ much, most are nearly as far away as images can be.
    """
    cosines, nearest = nearest_rows(directions(pooled), _NEIGHBOURS)
    distances = 1 - cosines[:, -1].double()
    middle, high = distances.quantile(0.5), distances.quantile(0.84)
    return (distances - middle) / (high - middle).clamp(min=1e-6), nearest[:, 0]


def _tiny(samples: Iterable[Sample], model: MemoryViT) -> list[tuple[Sample, tuple[int, int]]]:
    """Images with much fewer pixels than the backbone sees, the smallest first."""
    least, found = _TINY * min(model.preprocessing.size), []
    for dataset, i in samples:
        with suppress(BadImage):
            size = image_size(dataset.read(i), name=dataset.sample_name(i))
            if min(size) < least:
                found.append(((dataset, i), size))
    return sorted(found, key=lambda one: one[1][0] * one[1][1])
