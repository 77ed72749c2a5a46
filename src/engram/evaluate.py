"""How good a task is on a split, and what it says about pictures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.data import Dataset, Loader, Splits, Transform, load
from engram.errors import EngramError
from engram.images import BadImage, Preprocessing, evaluation_view, normalise
from engram.model import MemoryViT
from engram.team import Team

Data = str | os.PathLike[str] | Splits | Dataset


def evaluate(
    model: MemoryViT,
    data: Data,
    task: str,
    *,
    split: str = "test",
    batch: int = 64,
    workers: int = 2,
    transform: Transform | None = None,
    skip_bad: bool = False,
    team: Team | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> dict[str, Any]:
    """Accuracy and its companions of one task on a split.

    A picture that cannot be read counts as a wrong answer, unless `skip_bad`; both are told in
    `unreadable`. Under torchrun every process takes its share and all get the same answer.
    """
    said = answers(
        model, data, task,
        split=split, batch=batch, workers=workers, transform=transform, team=team or Team(),
        progress=progress,
    )  # fmt: skip
    return said.metrics(skip_bad)


@dataclass(frozen=True, eq=False)
class Answers:
    """What a task said about a split: row i of `logits` is about sample `samples[i]`."""

    task: str
    dataset: Dataset
    logits: Tensor
    labels: Tensor
    samples: Tensor
    failed: Sequence[str]  # pictures that could not be read

    def metrics(self, skip_bad: bool = False) -> dict[str, Any]:
        pairs = [(self.logits, self.labels)] if len(self.labels) else []
        metrics = classification_metrics(pairs, 0 if skip_bad else len(self.failed))
        return {**metrics, "unreadable": list(self.failed)}


def answers(
    model: MemoryViT,
    data: Data,
    task: str,
    *,
    split: str = "test",
    batch: int = 64,
    workers: int = 2,
    transform: Transform | None = None,
    team: Team | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Answers:
    """What a task says about every picture of a split; without a team, in this process alone."""
    dataset = _dataset(data, model.task(task).spec.classes, split)
    device = model.trunk.position.device if team is None else team.device
    model.to(device).eval()
    preprocessing = preprocessing_of(model)
    loader = Loader(
        dataset,
        preprocessing,
        batch,
        transform=transform,
        workers=workers,
        rank=team.rank if team else 0,
        world=team.world if team else 1,
    )
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.inference_mode():
        for done, part in enumerate(loader, start=1):
            if len(part.labels):
                pixels = normalise(part.images.to(device), preprocessing)
                logits = model(pixels, tasks=[task])[task]
                found.append((logits.float().cpu(), part.labels, part.indices))
            progress(done, len(loader))
    failed = sorted(loader.bad)
    if team is not None:
        found, failed = team.gather(found), team.gather(failed)
    if not found:
        nothing = torch.zeros(0, dtype=torch.long)
        found.append((torch.zeros(0, len(dataset.classes)), nothing, nothing))
    logits, labels, samples = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Answers(task, dataset, logits, labels, samples, failed)


def preprocessing_of(model: MemoryViT) -> Preprocessing:
    """How pictures become pixels: the trunk's way, or plain ones of its size if it has none."""
    height, width = model.trunk.config.image_size
    return model.trunk.preprocessing or Preprocessing(size=(height, width), resize=None)


def _dataset(data: Data, classes: Sequence[str], split: str) -> Dataset:
    if isinstance(data, (str, os.PathLike)):
        return load(data, split=split, classes=classes)[split]
    dataset = data if isinstance(data, Dataset) else data[split]
    if dataset.classes != tuple(classes):
        raise EngramError(
            f"The task has the classes {_few(classes)}, but {dataset.name} has "
            f"{_few(dataset.classes)}; load the data with classes=model.task(…).spec.classes."
        )
    return dataset


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f", … ({len(names)} in all)" if len(names) > 4 else "")


def classification_metrics(
    answers: Iterable[tuple[Tensor, Tensor]], unreadable: int = 0
) -> dict[str, Any]:
    """Metrics from (logits, labels) pairs; every unreadable picture is one more wrong answer.

    accuracy; top5 (from six classes on); macro_f1, the mean over classes that occur as label or
    answer; ece, the expected calibration error over 15 bins of equal width; loss.
    """
    pairs = list(answers)
    images = sum(len(labels) for _, labels in pairs) + unreadable
    if not pairs:
        return {"accuracy": 0.0, "images": images}
    logits, labels = torch.cat([p[0] for p in pairs]), torch.cat([p[1] for p in pairs])
    classes = logits.shape[1]
    probability, answer = logits.softmax(1).max(1)
    right = answer == labels
    metrics: dict[str, Any] = {
        "accuracy": right.sum().item() / images,
        "images": images,
        "loss": F.cross_entropy(logits, labels).item(),
    }
    if classes > 5:
        best = logits.topk(5, dim=1).indices
        metrics["top5"] = (best == labels[:, None]).any(1).sum().item() / images
    hits = torch.bincount(labels[right], minlength=classes)
    told = torch.bincount(answer, minlength=classes)
    true = torch.bincount(labels, minlength=classes)
    seen = (told + true) > 0
    metrics["macro_f1"] = (2 * hits[seen] / (told + true)[seen]).mean().item()
    bins = (probability * 15).long().clamp(max=14)
    gap = torch.zeros(15).index_add(0, bins, right.float() - probability)
    metrics["ece"] = (gap.abs().sum() / len(labels)).item()
    return metrics


def predict(
    model: MemoryViT,
    images: Sequence[str | os.PathLike[str]],
    *,
    tasks: Sequence[str] | None = None,
    top_k: int = 5,
    batch: int = 32,
    exact: bool = False,
    team: Team | None = None,
) -> list[dict[str, Any]]:
    """For each picture, {"image", "tasks": {name: [{"class", "probability"}, …]}} of every task.

    A picture that cannot be read has "error", a sentence, instead of "tasks". Under torchrun every
    process takes its share and all get the same answer.
    """
    if top_k < 1:
        raise EngramError(f"top_k is {top_k}; ask for at least 1 class.")
    team = team or Team()
    preprocessing = preprocessing_of(model)
    device = team.device
    model.to(device).eval()
    results: list[dict[str, Any]] = []
    share = images[team.rank :: team.world]
    for start in range(0, len(share), batch):
        views, good = [], []
        for image in share[start : start + batch]:
            results.append({"image": os.fspath(image)})
            try:
                views.append(torch.from_numpy(evaluation_view(image, preprocessing)))
                good.append(results[-1])
            except BadImage as error:
                results[-1]["error"] = str(error)
        if not views:
            continue
        pixels = normalise(torch.stack(views).to(device), preprocessing)
        with torch.inference_mode():
            logits = model(pixels, tasks, exact=exact)
        for i, result in enumerate(good):
            result["tasks"] = {
                name: _top(values[i], _names(model, name, values.shape[1]), top_k)
                for name, values in logits.items()
            }
    shares = team.gather([results])
    return [shares[i % team.world][i // team.world] for i in range(len(images))]


def _names(model: MemoryViT, name: str, classes: int) -> Sequence[str]:
    if name != "base":
        return model.task(name).spec.classes
    return model.trunk.labels or tuple(str(i) for i in range(classes))


def _top(logits: Tensor, names: Sequence[str], top_k: int) -> list[dict[str, Any]]:
    best = logits.float().softmax(-1).topk(min(top_k, len(names)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [{"class": names[i], "probability": round(p, 6)} for i, p in pairs]
