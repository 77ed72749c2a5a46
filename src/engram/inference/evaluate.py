"""How good a task is on a split, and what it says about pictures."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engram.data.datasets import Dataset, Splits, load
from engram.data.loader import Loader, Transform
from engram.errors import EngramError
from engram.images.decode import BadImage
from engram.images.preprocessing import Preprocessing, normalise
from engram.images.views import evaluation_view
from engram.model import MemoryViT
from engram.tasks.kinds import KINDS, Kind
from engram.tasks.metrics import classification_metrics as classification_metrics
from engram.tasks.spec import TaskSpec
from engram.util.processes import Team

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
    """How good one task is on a split: the metrics of its kind.

    They are accuracy, top5, macro_f1 and ece; of multilabel map, macro_f1 and micro_f1; of
    regression mae, r2 and rmse; of segmentation miou and pixel_accuracy; and the loss of each. A
    picture that cannot be read counts as a wrong answer in classification, unless `skip_bad`, and
    is left out in the others; `unreadable` names it. Under torchrun every process takes its share
    and all get the same answer.
    """
    said = answers(
        model, data, task,
        split=split, batch=batch, workers=workers, transform=transform, team=team or Team(),
        progress=progress,
    )  # fmt: skip
    return said.metrics(skip_bad)


@dataclass(frozen=True, eq=False)
class Answers:
    """What a task said about a split: row i of `logits` is about sample `samples[i]`.

    `logits` and `labels` are what the kind keeps of outputs and labels (`Kind.keep`).
    """

    task: str
    dataset: Dataset
    logits: Tensor
    labels: Tensor
    samples: Tensor
    failed: Sequence[str]  # pictures that could not be read
    settled: Mapping[str, Tensor] = field(default_factory=dict)  # of the task's head

    @property
    def kind(self) -> Kind:
        return KINDS[self.dataset.kind]

    def metrics(self, skip_bad: bool = False) -> dict[str, Any]:
        pairs = [(self.logits, self.labels)] if len(self.labels) else []
        metrics = self.kind.metrics(pairs, self.settled, 0 if skip_bad else len(self.failed))
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
    kind = model.task(task).kind
    dataset = _dataset(data, model.task(task).spec, split)
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
    failed: list[str] = []  # a picture in two rows of a table is two answers
    with torch.inference_mode():
        for done, part in enumerate(loader, start=1):
            if len(part.labels):
                pixels = normalise(part.images.to(device), preprocessing)
                outputs = model(pixels, tasks=[task])[task]
                found.append((*kind.keep(outputs, part.labels), part.indices))
            failed += [dataset.where(i) for i in part.failed.tolist()]
            progress(done, len(loader))
    if team is not None:
        found, failed = team.gather(found), team.gather(failed)
    if not found:
        nothing = torch.zeros(0, dtype=torch.long)
        found.append((torch.zeros(0, len(dataset.classes)), nothing, nothing))
    logits, labels, samples = (torch.cat(parts) for parts in zip(*found, strict=True))
    settled = {name: value.cpu() for name, value in model.task(task).head.settled.items()}
    return Answers(task, dataset, logits, labels, samples, sorted(failed), settled)


def preprocessing_of(model: MemoryViT) -> Preprocessing:
    """How pictures become pixels: the trunk's way, or plain ones of its size if it has none."""
    height, width = model.trunk.config.image_size
    return model.trunk.preprocessing or Preprocessing(size=(height, width), resize=None)


def _dataset(data: Data, spec: TaskSpec, split: str) -> Dataset:
    if isinstance(data, (str, os.PathLike)):
        return load(data, split=split, like=spec)[split]
    dataset = data if isinstance(data, Dataset) else data[split]
    for what, ours, theirs in (
        ("kind", [spec.kind], [dataset.kind]),
        (spec.does.nouns[1], spec.classes, dataset.classes),
        ("values", spec.values, dataset.legend.values if dataset.legend else ()),
    ):
        if tuple(ours) != tuple(theirs):
            raise EngramError(
                f"The task has the {what} {_few([*map(str, ours)])}, but {dataset.name} has "
                f"{_few([*map(str, theirs)])}; load the data with like=model.task(…).spec."
            )
    return dataset


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f", … ({len(names)} in all)" if len(names) > 4 else "")


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

    What is told in place of the list depends on the kind of task: see `kinds.py`. `base` is told
    of where the trunk has classes, not where its head gives an embedding. A picture that cannot be
    read has "error", a sentence, instead of "tasks". Under torchrun every process takes its share
    and all get the same answer.
    """
    if top_k < 1:
        raise EngramError(f"top_k is {top_k}; ask for at least 1 class.")
    head = model.trunk.config.head
    if head is not None and not head.classes:
        tasks = (list(model.tasks) or ["base"]) if tasks is None else tasks
        if "base" in list(tasks):
            raise EngramError(
                f"The trunk {model.trunk.source} has no classes, so there is no 'base' to tell of; "
                "ask for tasks. Its embedding is model(pixels)['base']."
            )
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
                name: _answer(model, name, values[i], top_k) for name, values in logits.items()
            }
    shares = team.gather([results])
    return [shares[i % team.world][i // team.world] for i in range(len(images))]


def _answer(model: MemoryViT, name: str, output: Tensor, top_k: int) -> Any:
    if name != "base":
        return model.task(name).answer(output, top_k)
    names = model.trunk.labels or tuple(str(i) for i in range(len(output)))
    return KINDS["classification"].answer(output, names, {}, top_k)
