"""Teach a task from a handful of images, in a second and without validation: `engram teach`.

The backbone runs once over the images, and a linear head is solved from sums over their features
(`engram.tasks.feature_sums`). A task that keeps the sums can learn more images and classes later,
forget some of its images, and be merged with another one, exactly as if the images had been there
from the start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from engram.data.datasets import Splits, load
from engram.errors import EngramError, flag
from engram.images.inputs import each_image, is_one_image
from engram.inference.embed import embed_batches
from engram.inference.engine import TorchEngine
from engram.methods import Base, Head
from engram.model import MemoryViT
from engram.store.engram import Engram
from engram.store.format import check_free
from engram.tasks.class_statistics import ClassStatistics
from engram.tasks.feature_sums import FeatureSums
from engram.tasks.spec import TaskSpec
from engram.tasks.task import Task
from engram.train.loop.validation import leave_one_out_estimate
from engram.train.runs.result import Result
from engram.util.progress import Progress, silent
from engram.util.text import summarise_names

#: Images by the name of their class, or data as `engram.data.load` takes it.
TaughtImages: TypeAlias = Mapping[str, Any] | str | os.PathLike[str] | Splits


def teach(
    model: MemoryViT,
    name: str,
    images: TaughtImages,
    *,
    statistics: str = "on",
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Result:
    """Teach a task from a few images of each class, and attach it to the model.

    The task is a linear head on the backbone's pooled token. If the model has a task of this name
    that was taught before, it learns these images too, of old classes and of new ones; the result
    is the same as if it had learned all of them at once.

    Args:
        model: The model.
        name: The task: a new one, or one that was taught before and kept its statistics.
        images: The images of each class, by its name: paths, images of Pillow, arrays or tensors,
            as `predict` takes them. Or data as `fit` takes it, of which the training split is
            learned.
        statistics: "on" keeps the sums that the head was solved from, so that the task can learn
            more, forget and be merged, and what its classes are like for `familiarity`, if it was
            given ten images and most classes have four. Both say more about the images than the
            head does. "off" drops them.
        out: The engram to write.
        overwrite: Replace an existing engram.
        progress: Called as progress(what, done, total, note) while work goes on.

    Returns:
        The result, as of `fit`. `metrics["val"]` is the accuracy with each of these images left
        out once, of the classes that have another; there is none if every class has one image.

    Raises:
        EngramError: There are fewer than two classes, a class has no image that can be read, a task
            of this name cannot learn more, or the file exists.

    Examples:
        >>> rose, tulip = "photos/test/rose/0.png", "photos/test/tulip/0.png"
        >>> result = engram.teach(model, "buds", {"rose": [rose], "tulip": [tulip]})
        >>> engram.predict(model, rose, tasks=["buds"], top_k=1)["tasks"]["buds"][0]["class"]
        'rose'
        >>> result = engram.teach(model, "buds", {"daisy": [torch.rand(3, 32, 32)]})
        >>> model.task("buds").spec.classes
        ('rose', 'tulip', 'daisy')
    """
    began = time.perf_counter()
    if statistics not in ("on", "off"):
        raise EngramError(f"{flag('statistics')} is {statistics!r}; choose on or off.")
    if out is not None:
        check_free(Path(out), overwrite)
    old = _taught(model, name, "learn more") if name in model.tasks else None
    splits = _read(images)
    known = () if old is None else old.spec.classes
    classes = known + tuple(one for one in splits.classes if one not in known)
    spec = TaskSpec.create(name, classes, Head())
    if old is None:
        model.check(spec)
    features, labels, unreadable = _features(model, splits, classes, progress)
    sums = FeatureSums.from_features(features, labels, len(classes))
    if old is not None and old.sums is not None:
        sums = old.sums.among(range(len(known)), len(classes)) + sums
    before = None if old is None else old.statistics
    engram = solve_task(model, spec, sums, (features, labels), statistics == "on", before)
    return _attach(model, engram, unreadable, began, out)


def forget(
    model: MemoryViT,
    name: str,
    images: TaughtImages,
    *,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Result:
    """Let a task that was taught forget some of its images, as if it had never seen them.

    A class whose images are all forgotten is gone.

    Args:
        model: The model.
        name: The task, which was taught and kept its statistics.
        images: The images to forget by the class that they were learned as, as `teach` takes them.
        out: The engram to write.
        overwrite: Replace an existing engram.
        progress: Called as progress(what, done, total, note) while work goes on.

    Returns:
        The result, without metrics: no image is left to measure with.

    Raises:
        EngramError: The task has no statistics, it has not learned these images, fewer than two
            classes would be left, or the file exists.

    Examples:
        >>> a, b, c = torch.rand(3, 3, 32, 32)
        >>> result = engram.teach(model, "buds", {"rose": [a, b], "tulip": [c]})
        >>> result = engram.forget(model, "buds", {"rose": [b]})
    """
    began = time.perf_counter()
    if out is not None:
        check_free(Path(out), overwrite)
    old = _taught(model, name, "forget")
    splits, classes = _read(images), old.spec.classes
    unknown = [one for one in splits.classes if one not in classes]
    if unknown:
        raise EngramError(
            f"{name!r} has no class {summarise_names(unknown)}, so there is nothing to forget of "
            f"it; it has {summarise_names(classes)}."
        )
    features, labels, unreadable = _features(model, splits, classes, progress)
    assert old.sums is not None
    sums = old.sums - FeatureSums.from_features(features, labels, len(classes))
    if not sums.possible:
        raise EngramError(
            f"{name!r} has not learned all of these images as what they are called here, so they "
            "cannot be forgotten; give images that it learned, under the same class, with the same "
            "preprocessing."
        )
    left = [i for i, count in enumerate(sums.images.tolist()) if count]
    if len(left) < 2:
        raise EngramError(
            f"{name!r} would be left with {len(left)} of its {len(classes)} classes, and a task "
            "needs two; detach it instead, or teach it another class first."
        )
    spec = replace(old.spec, classes=tuple(classes[i] for i in left))
    engram = solve_task(model, spec, sums.only(left), old=old.statistics)
    return _attach(model, engram, unreadable, began, out)


def solve_task(
    model: MemoryViT,
    spec: TaskSpec,
    sums: FeatureSums,
    left_out: tuple[Tensor, Tensor] | None = None,
    keep: bool = True,
    old: ClassStatistics | None = None,
) -> Engram:
    """The engram of a taught task, for the backbone of this model, to which nothing is attached.

    `left_out` are features (b, d) and labels (b) of some of its images, to measure with. Without
    `keep`, the engram has neither sums nor class statistics; `old` are those of before.
    """
    if len(spec.classes) < 2:
        raise EngramError(
            f"Task {spec.name!r}: it has images of one class, {spec.classes[0]!r}, and needs at "
            "least 2 classes; give images of another."
        )
    scratch = MemoryViT(model.backbone)
    task, head = scratch.add(spec), sums.solve()
    with torch.no_grad():
        task.head.weight.copy_(head.weight)
        task.head.bias.copy_(head.bias)
    if keep:
        known = _class_statistics(sums, left_out, old)
        task.sums, task.statistics = sums, known and known.to(model.backbone.device)
    metrics: dict[str, Any] = {}
    if left_out is not None:
        measured, labels = sums.leave_one_out(*left_out)
        if len(labels):
            found = task.kind.metrics((measured.float(), labels), {})
            metrics["val"] = leave_one_out_estimate(found, int(sums.images.sum()))
    record = {"solved_from": "sums", "train_images": int(sums.images.sum())}
    return scratch.engram(spec.name, metrics=metrics, recipe=record)


def _class_statistics(
    sums: FeatureSums, left_out: tuple[Tensor, Tensor] | None, old: ClassStatistics | None
) -> ClassStatistics | None:
    """Class statistics, or None where too few images were given to know what is usual."""
    found, images = sums.class_statistics(), float(sums.images.sum())
    known = left_out is not None and found.adjust(sums.left_out_likeness(*left_out))
    if old is not None and found.enough(int(images)):  # as usual for old and new images
        share = float(old.counts.sum()) / images if known else 1.0
        found.quantiles.lerp_(old.quantiles.cpu(), share)
        return found
    return found if known else None


def _taught(model: MemoryViT, name: str, what: str) -> Task:
    """The task, which can learn more and forget; one that cannot is an EngramError."""
    task = model.task(name)
    if task.sums is None:
        raise EngramError(
            f"The task {name!r} has no sums of its training images, so it cannot {what} without "
            "the images that it learned from: only a task that was taught with "
            f"{flag('statistics', 'on')} keeps them. Teach a task of another name, with all images."
        )
    model.registry.check_removable(name)
    return task


def _read(images: TaughtImages) -> Splits:
    """The images as a dataset, whose classes have the order in which they were given."""
    if isinstance(images, Splits):
        splits = images
    elif isinstance(images, Mapping):
        items = [(image, str(one)) for one, group in images.items() for image in _group(one, group)]
        splits = load(items, classes=[str(one) for one in images])
    else:
        splits = load(images, one_class=True)
    if splits.kind != "classification":
        raise EngramError(
            f"{splits.name} was read for {splits.kind}, and only classification can be taught; "
            "train a task with fit."
        )
    return splits


def _group(name: str, images: Any) -> Sequence[Any]:
    if is_one_image(images):
        raise EngramError(f"The class {name!r} has one image and no list; give a list of images.")
    found = list(each_image(images))
    if not found:
        raise EngramError(f"The class {name!r} has no image; give one at least, or leave it out.")
    return found


def _features(
    model: MemoryViT, splits: Splits, classes: Sequence[str], progress: Progress
) -> tuple[Tensor, Tensor, dict[str, str]]:
    """Features of the training images, the numbers of their classes, and what cannot be read."""
    engine, dataset = TorchEngine(model), splits["train"]
    parts = list(
        embed_batches(
            engine, [dataset], [Base.name], workers=0,
            progress=lambda done, total: progress("reading images", done, total),
        )
    )  # fmt: skip
    unreadable = {path: reason for part in parts for path, reason in part.failed.items()}
    names = [label for part in parts for label in part.labels]
    missing = [one for one in splits.classes if one not in names]
    if missing:
        reason = next(iter(unreadable.values()), "there is none")
        raise EngramError(f"No image of the class {missing[0]!r} can be read: {reason}.")
    features = torch.cat([torch.from_numpy(part.vectors[Base.name]) for part in parts if names])
    if not bool(features.isfinite().all()):
        raise EngramError(
            "The backbone has features that are not finite for these images; choose another."
        )
    numbers = {one: number for number, one in enumerate(classes)}
    return features, torch.tensor([numbers[one] for one in names]), unreadable


def _attach(
    model: MemoryViT,
    engram: Engram,
    unreadable: Mapping[str, str],
    began: float,
    out: str | os.PathLike[str] | None,
) -> Result:
    """Put a taught task into the model, in the place of what it was before, and write it."""
    name = engram.spec.name
    if name in model.tasks:
        model.detach(name)
    model.attach(engram)
    path = None if out is None else model.save(name, Path(out))
    return Result.create(
        engram, path=path, metrics=engram.metrics, unreadable=unreadable,
        seconds=time.perf_counter() - began,
    )  # fmt: skip
