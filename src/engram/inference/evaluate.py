"""Evaluation: the metrics of a task on a split, its answers, and what two versions differ in."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from engram.data.datasets import Dataset, Splits, check_fits, load
from engram.data.loader import Loader, Transform
from engram.data.python_data import PythonData
from engram.errors import EngramError
from engram.images.preprocessing import normalise
from engram.inference.engine import Engine, TorchEngine
from engram.model import MemoryViT
from engram.tasks.kind import Kind
from engram.tasks.kinds import KINDS
from engram.util.cpus import DECODERS
from engram.util.processes import ProcessGroup
from engram.util.tensors import to_device

Data = str | os.PathLike[str] | Splits | Dataset | PythonData


def evaluate(
    model: MemoryViT,
    data: Data,
    task: str,
    *,
    split: str = "test",
    batch: int = 64,
    workers: int = DECODERS,
    transform: Transform | None = None,
    skip_bad: bool = False,
    device: str = "auto",
    precision: str = "fp32",
    processes: ProcessGroup | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> dict[str, Any]:
    """Measure one task on a split of labelled data.

    Under torchrun every process takes its share and all get the same result.

    Args:
        model: The model that the task is attached to.
        data: A path, a name or a dataset as `engram.data.load` takes it, or what that gave.
        task: The task's name.
        split: `train`, `val` or `test`.
        batch: Images in a batch.
        workers: Processes that decode images.
        transform: Prepares an image in place of the model's preprocessing.
        skip_bad: Leave out images that cannot be read. Without it, each counts as a wrong answer
            in classification; other kinds of task always leave them out.
        device: Where to compute: `auto`, `cpu`, `cuda`, `cuda:1`, `mps` or `xpu`.
        precision: `fp32`, or `bf16` or `fp16`, whose answers differ a little.
        processes: Those that share the work, and their device. By default those of torchrun.
        progress: Called with the number of batches done and of all.

    Returns:
        The metrics of the task's kind, the `loss`, and the `unreadable` images. Classification has
        `accuracy`, `balanced_accuracy`, `top5`, `macro_f1` and `ece`; multilabel `map`, `macro_f1`,
        `micro_f1` and `ece`; regression `mae`, `r2` and `rmse`; segmentation `miou` and
        `pixel_accuracy`.

    Raises:
        EngramError: The data cannot be read, or does not have the classes of the task.

    Examples:
        >>> scores = engram.evaluate(model, "photos", "flowers")
        >>> scores["images"]
        4
    """
    if not isinstance(data, (Splits, Dataset)):
        data = load(data, split=split, like=model.task(task).spec)
    processes = processes or ProcessGroup(device)
    answered = answers(
        model, data if isinstance(data, Dataset) else data[split], task,
        engine=TorchEngine(model, device=processes.device, precision=precision),
        batch=batch, workers=workers, transform=transform, processes=processes, progress=progress,
    )  # fmt: skip
    return answered.metrics(skip_bad)


@dataclass(frozen=True, eq=False)
class Answers:
    """The answers of a task for a split, as `Kind.keep` keeps them: row i is of `samples[i]`."""

    task: str
    dataset: Dataset
    logits: Tensor
    labels: Tensor
    samples: Tensor
    failed: Sequence[str]  # images that could not be read
    fitted: Mapping[str, Tensor] = field(default_factory=dict)  # of the task's head
    familiarity: Tensor | None = None  # of the images, where it was computed with the answers

    @property
    def kind(self) -> Kind:
        return KINDS[self.dataset.kind]

    def metrics(self, skip_bad: bool = False) -> dict[str, Any]:
        failed = 0 if skip_bad else len(self.failed)
        metrics = self.kind.metrics((self.logits, self.labels), self.fitted, failed)
        return {**metrics, "unreadable": list(self.failed)}

    def without_leaks(self, leaked: Sequence[int], skip_bad: bool = False) -> dict[str, Any]:
        """The number of leaked images (`leaked`), and metrics without them (`clean`)."""
        if not leaked:
            return {}
        rows = torch.isin(self.samples, torch.tensor(leaked), invert=True)
        others = replace(
            self, logits=self.logits[rows], labels=self.labels[rows], samples=self.samples[rows],
            familiarity=None,
        )  # fmt: skip
        clean = others.metrics(skip_bad)
        del clean["unreadable"]
        return {"leaked": len(leaked), "clean": clean}


def answers(
    model: MemoryViT,
    dataset: Dataset,
    task: str,
    *,
    engine: Engine | None = None,
    batch: int = 64,
    workers: int = DECODERS,
    transform: Transform | None = None,
    processes: ProcessGroup | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Answers:
    """The answers of a task for every image of a split; without `processes`, in this one alone."""
    kind, preprocessing = model.task(task).kind, model.preprocessing
    check_fits(model.task(task).spec, dataset)
    device = model.backbone.device if processes is None else processes.device
    engine = engine or TorchEngine(model, device=device)
    rank, world = (processes.rank, processes.world) if processes else (0, 1)
    loader = Loader(
        dataset, preprocessing, batch,
        transform=transform, workers=workers, rank=rank, world=world,
    )  # fmt: skip
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    failed: list[str] = []  # an image in two rows of a table is two answers
    done = 0
    progress(done, len(dataset))
    for part in loader:
        if len(part.labels):
            outputs = engine.run(normalise(to_device(part.images, device), preprocessing), [task])
            found.append((*kind.keep(outputs[task], part.labels), part.indices))
        failed += [dataset.sample_name(i) for i in part.failed.tolist()]
        done += (len(part.indices) + len(part.failed)) * world
        progress(min(done, len(dataset)), len(dataset))
    if processes is not None:
        found, failed = processes.gather(found), processes.gather(failed)
    if not found:
        nothing = torch.zeros(0, dtype=torch.long)
        found.append((torch.zeros(0, len(dataset.classes)), nothing, nothing))
    logits, labels, samples = (torch.cat(parts) for parts in zip(*found, strict=True))
    fitted = {name: value.cpu() for name, value in model.task(task).head.fitted.items()}
    return Answers(task, dataset, logits, labels, samples, sorted(failed), fitted)


# Two versions of a task


@dataclass(frozen=True)
class Change:
    """An image that the two versions answer differently."""

    image: str
    label: Any  # a class, or the classes of a multilabel task
    before: Any
    after: Any


@dataclass(frozen=True)
class VersionComparison:
    """The score of every class before and after, and images whose classes changed, if any."""

    classes: dict[str, tuple[float, float]]
    changes: list[Change]

    @property
    def mended(self) -> int:
        """Images that were wrong and are right."""
        return sum(change.after == change.label for change in self.changes)

    @property
    def broken(self) -> int:
        """Images that were right and are wrong."""
        return sum(change.before == change.label for change in self.changes)


def compare(before: Answers, after: Answers) -> VersionComparison:
    """Compare the answers of two versions of a task for the same split.

    Raises:
        EngramError: The versions are different kinds of task, or read different images.
    """
    if before.dataset.kind != after.dataset.kind:
        raise EngramError(
            f"{after.task!r} is a {after.dataset.kind} task, and the version to compare it with a "
            f"{before.dataset.kind} task; compare versions of one task."
        )
    if before.samples.tolist() != after.samples.tolist():
        raise EngramError("An image could be read only once of two times; run the command again.")
    kind = after.kind
    scores = [kind.class_scores(one.logits, one.labels).tolist() for one in (before, after)]
    classes = {
        name: (was, now)
        for name, was, now in zip(after.dataset.classes, *scores, strict=True)
        if not (math.isnan(was) or math.isnan(now))
    }
    changes = []
    for i, sample in enumerate(
        after.samples.tolist() if kind.ranked and not kind.per_pixel else ()
    ):
        label = after.labels[i]
        right = label.nonzero()[:, 0].tolist() if label.ndim else [int(label)]
        old, new = (kind.labels(one.logits[i], one.fitted)[0] for one in (before, after))
        if old != new:
            found = (sorted(after.dataset.classes[j] for j in one) for one in (right, old, new))
            shown = (names if label.ndim else names[0] for names in found)
            changes.append(Change(after.dataset.sample_name(sample), *shown))
    return VersionComparison(classes, changes)
