"""Calibration, and telling unfamiliar images, on four datasets and digits, with a real ViT-Ti/16.

    python -m benchmarks.unfamiliar --work FOLDER [--pieces N]

A task with a linear head is fitted on each of pets, flowers, fashion and CIFAR-10 (subsets of
benchmarks.paper, 224 pixels), with everything else at its default. Then all tasks answer the
validation and test images of all datasets, and of scikit-learn's digits, in one pass. That gives

- the calibration error of every task on its own images, with the temperature and without it;
- for every task, how well it tells its own images from those of the others: the area under the ROC
  curve (scikit-learn's), of the energy of the logits (Liu et al., 2020) and of the distance to the
  class means, which is the `familiarity` of answers. Near: tasks that learned only half of the
  classes of pets and flowers, against images of the other half.

Which of the two to use was chosen on the validation images; the test images were looked at once.
Finished pieces stay in the folder, and the same command continues; --pieces ends it after so many.
It takes about ten minutes on one idle core, writes benchmarks/results/unfamiliar.md, and needs what
benchmarks.paper needs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

import engram
from benchmarks.paper.runs import datasets
from benchmarks.report import markdown_table, write_report
from engram.data.datasets import Dataset, Splits
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.tasks.metrics import classification_metrics

OTHER = "digits"
HALVES = {"pets": 20, "flowers": 51}  # classes of the task that does not know the others
RECIPE = engram.Recipe(workers=0)
Answered = dict[str, Tensor]


def half(name: str) -> str:
    return f"{name}-half"


def splits_of(name: str) -> Splits:
    if name == OTHER:
        return engram.data.load("digits").with_validation(0.1, 0)
    return datasets.splits(name, 224, 1_000)


def some_classes(splits: Splits, classes: range) -> Splits:
    """The images of some classes, which are numbered anew."""
    names = tuple(splits.classes[i] for i in classes)

    def some(split: str) -> Dataset:
        found = splits[split].subset(np.flatnonzero(np.isin(splits[split].labels, list(classes))))
        return replace(found, classes=names, labels=found.labels - classes.start)

    return replace(splits, classes=names, train=some("train"), val=some("val"), test=some("test"))


class Work:
    """A folder with what is done."""

    def __init__(self, folder: Path, pieces: int) -> None:
        self.folder, self.left = folder, pieces
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["ENGRAM_CACHE"] = str(folder / "cache")

    def piece(self, path: Path) -> bool:
        """Whether this piece is to be done now."""
        if path.exists():
            return False
        if not self.left:
            sys.exit(f"{path.name} is next; the same command continues.")
        self.left -= 1
        print(path.name, file=sys.stderr, flush=True)
        return True

    def engrams(self) -> list[Path]:
        tasks = [(name, splits_of(name)) for name in datasets.SETS]
        tasks += [
            (half(name), some_classes(splits_of(name), range(known)))
            for name, known in HALVES.items()
        ]
        return [self._fitted(name, splits) for name, splits in tasks]

    def _fitted(self, name: str, splits: Splits) -> Path:
        path = self.folder / f"{name}.safetensors"
        if self.piece(path):
            model = engram.MemoryViT(datasets.backbone(224))
            model.add_task(name, splits.classes, regime="head", seed=0)
            engram.fit(model, name, splits, RECIPE, out=path, resume=True)
        return path

    def answers(self, engrams: Sequence[Path]) -> dict[tuple[str, str], Answered]:
        """By dataset and split, outputs and familiarity of all tasks, and the labels."""
        found = {}
        for name in (*datasets.SETS, OTHER):
            for split in ("val", "test"):
                path = self.folder / f"{name}-{split}.pt"
                if self.piece(path):
                    model = engram.MemoryViT(datasets.backbone(224)).eval()
                    for one in engrams:
                        model.attach(one)
                    torch.save(answer(model, splits_of(name)[split]), path)
                found[name, split] = torch.load(path)
        return found


def answer(model: engram.MemoryViT, dataset: Dataset) -> Answered:
    parts: dict[str, list[Tensor]] = {}
    for start in range(0, len(dataset), 32):
        rows = range(start, min(start + 32, len(dataset)))
        views = [torch.from_numpy(evaluation_view(dataset.read(i), model.preprocessing))
                 for i in rows]  # fmt: skip
        pixels = normalise(torch.stack(views), model.preprocessing)
        with torch.inference_mode():
            outputs, familiarity = model.with_familiarity(pixels, list(model.tasks))
        for name in model.tasks:
            parts.setdefault(f"{name} logits", []).append(outputs[name])
            parts.setdefault(f"{name} familiarity", []).append(familiarity[name])
    joined = {name: torch.cat(tensors) for name, tensors in parts.items()}
    return {**joined, "labels": torch.from_numpy(dataset.labels)}


def measures(task: str, answered: Answered) -> dict[str, Tensor]:
    """What may tell familiar images: higher is more familiar."""
    return {
        "energy": answered[f"{task} logits"].logsumexp(1),
        "distance": answered[f"{task} familiarity"],
    }


def auroc(known: Tensor, strange: Tensor) -> float:
    truth = [1] * len(known) + [0] * len(strange)
    return float(roc_auc_score(truth, torch.cat([known, strange]).numpy()))


def calibration_rows(found: dict[tuple[str, str], Answered], folder: Path) -> Iterator[list[str]]:
    for name in datasets.SETS:
        temperature = engram.inspect(folder / f"{name}.safetensors").metrics["val"]["temperature"]
        cells = []
        for split in ("val", "test"):
            answered = found[name, split]
            logits, labels = answered[f"{name} logits"], answered["labels"]
            now = classification_metrics((logits, labels))
            before = classification_metrics((logits * temperature, labels))
            cells += [f"{before['ece']:.4f}", f"{now['ece']:.4f}"]
        yield [name, f"{now['accuracy']:.1%}", f"{temperature:.3f}", *cells]


def familiar_rows(found: dict[tuple[str, str], Answered], split: str) -> Iterator[list[str]]:
    """A row for each task and measure; each column is a dataset that the task does not know."""
    every = (*datasets.SETS, OTHER)
    for task in datasets.SETS:
        own = measures(task, found[task, split])
        for name, known in own.items():
            values = {
                other: auroc(known, measures(task, found[other, split])[name])
                for other in every
                if other != task
            }
            near = ""
            if task in HALVES:
                answered = found[task, split]
                inside = answered["labels"] < HALVES[task]
                whole = measures(half(task), answered)[name]
                near = f"{auroc(whole[inside], whole[~inside]):.4f}"
            cells = [f"{values[other]:.4f}" if other in values else "" for other in every]
            mean = sum(values.values()) / len(values)
            yield [task, name, *cells, f"{mean:.4f}", near]


def flagged_rows(found: dict[tuple[str, str], Answered]) -> Iterator[list[str]]:
    """How many test images have a familiarity below 0."""
    for task in datasets.SETS:
        shares = [
            f"{float((found[name, 'test'][f'{task} familiarity'] < 0).float().mean()):.1%}"
            for name in (*datasets.SETS, OTHER)
        ]
        yield [task, *shares]


def page(found: dict[tuple[str, str], Answered], folder: Path) -> list[str]:
    others = (*datasets.SETS, OTHER)
    lines = ["Tasks with a linear head, at 224 pixels, one seed."]
    columns = ("task", "test accuracy", "temperature", "val ECE before", "val ECE after",
               "test ECE before", "test ECE after")  # fmt: skip
    lines += ["", "## Calibration error", ""]
    lines += markdown_table(columns, calibration_rows(found, folder))
    for split in ("val", "test"):
        lines += ["", f"## Area under the ROC curve, {split} images", ""]
        head = ("task", "measure", *others, "mean", "other half of the classes")
        lines += markdown_table(head, familiar_rows(found, split))
    lines += ["", "## Share of test images with a familiarity below 0", ""]
    lines += markdown_table(("task", *others), flagged_rows(found))
    sizes = []
    for name in datasets.SETS:
        kept = engram.inspect(folder / f"{name}.safetensors").tensors.items()
        size = sum(t.numel() * t.itemsize for n, t in kept if n.startswith("statistics."))
        sizes.append(f"{name} {size:,}")
    return [*lines, "", f"Bytes of statistics in the files: {', '.join(sizes)}."]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.unfamiliar", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for finished pieces")
    parser.add_argument("--pieces", type=int, default=1_000, help="end after so many pieces")
    given = parser.parse_args()
    work = Work(given.work, given.pieces)
    found = work.answers(work.engrams())
    title = "Calibration and unfamiliar images (ViT-Ti/16, linear heads)"
    write_report("unfamiliar", title, page(found, work.folder))


if __name__ == "__main__":
    main()
