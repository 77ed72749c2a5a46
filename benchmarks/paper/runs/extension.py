"""Extension compared with concatenation, for a second task that is related to the first.

The first task has groups as classes (cat or dog; kinds of clothes), the second the classes within
them, trained on all of the training images or on a fifth of them. If the second task extends the
first, it also reads its class token and its cells (the stars of Table 1); if they are only
concatenated, it does not. Both see the same images, and the learning rate of each is chosen on
validation. From the cache, about a minute for each dataset, share and seed. Expect, concatenated
and extended, 63.5 ± 1.0 and 61.0 ± 2.7 on pets, with a fifth of the images 37.6 ± 0.4 and
37.2 ± 1.6; on fashion 80.2 ± 0.2 and 80.3 ± 1.1, with a fifth 72.2 ± 0.5 and 74.9 ± 1.3.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.paper.formatting import mean_and_spread
from benchmarks.paper.records import EXTENSION, Record
from benchmarks.paper.runs import datasets
from benchmarks.paper.runs.from_cache import BATCH, EPOCHS, MASKED_RATES, score_test_images
from benchmarks.paper.runs.settings import SEEDS
from benchmarks.report import markdown_table
from engram.data.datasets import Dataset, Splits
from engram.model import MemoryViT
from engram.train.loop.task_trainer import TaskTrainer
from engram.train.loop.training import Training
from engram.train.recipe import Recipe
from engram.train.runs.run import Run
from engram.util.processes import ProcessGroup

PIXELS, IMAGES, FIRST_RATE = 112, 1_000, 1e-3
WAYS = ("concatenated", "extended")
CATS = ("abyssinian", "bengal", "birman", "bombay", "british", "egyptian", "maine", "persian",
        "ragdoll", "russian", "siamese", "sphynx")  # fmt: skip
CLOTHES = {
    "tops": ("t-shirt", "pullover", "coat", "shirt"),
    "long": ("trouser", "dress"),
    "shoes": ("sandal", "sneaker", "boot"),
    "bag": ("bag",),
}


def group_of(dataset: str, label: str) -> str:
    if dataset == "pets":
        return "cat" if label.lower().startswith(CATS) else "dog"
    return next(group for group, members in CLOTHES.items() if label in members)


def grouped(dataset: str, splits: Splits) -> Splits:
    """The same images, labelled by group."""
    groups = [group_of(dataset, label) for label in splits.classes]
    names = tuple(sorted(set(groups)))
    number = np.array([names.index(group) for group in groups])

    def relabel(data: Dataset) -> Dataset:
        return replace(data, classes=names, labels=number[data.labels])

    train, val, test = (relabel(splits[split]) for split in ("train", "val", "test"))
    return replace(splits, classes=names, train=train, val=val, test=test)


@dataclass(frozen=True)
class Extension:
    """A second task on one dataset, both ways."""

    data: str
    share: float  # of the training images, for the second task
    seed: int

    @property
    def name(self) -> str:
        return f"extension {self.data} {self.share:g} seed {self.seed}"

    @property
    def record_name(self) -> str:
        return f"{self.data}-{self.share:g}-seed{self.seed}"

    def missing(self) -> bool:
        return self.record_name not in EXTENSION

    def ready(self) -> bool:
        return True

    def work(self, say: Callable[[str], object]) -> None:
        began, processes = time.perf_counter(), ProcessGroup()
        splits = datasets.splits(self.data, PIXELS, IMAGES)
        recipe = Recipe(
            epochs=EPOCHS, batch=BATCH, data_seed=self.seed, evaluations=1, workers=0,
            lr=FIRST_RATE, patience=0, ema=0.0,
        )  # fmt: skip
        model = MemoryViT(datasets.backbone(PIXELS))
        groups = grouped(self.data, splits)
        first = self._train_first(model, groups, recipe, processes)
        steps = EPOCHS * -(-len(splits["train"]) // BATCH)
        recipe = recipe.but(steps=max(60, round(self.share * steps)))
        train_images = splits["train"]
        train_images = train_images.subset(np.arange(round(self.share * len(train_images))))
        splits = replace(splits, train=train_images)
        trainers = self._train_second(model, splits, recipe, processes)
        record: Record = {
            "set": self.data,
            "share": self.share,
            "seed": self.seed,
            "train_images": len(train_images),
            "first": {"groups": list(groups.classes), "val": first.metrics["accuracy"]},
        }
        for way in WAYS:
            best = max((trainers[way, lr] for lr in MASKED_RATES), key=_score)
            tested = score_test_images(model, [best.name], splits, recipe, processes)[best.name]
            record[way] = {
                "lr": best.lr,
                "val": best.metrics["accuracy"],
                "test": float(tested["accuracy"]),
            }
            say(f"{way} lr {best.lr:g} test {record[way]['test']:.4f}")
        record["seconds"] = round(time.perf_counter() - began, 1)
        EXTENSION.append(self.record_name, record)

    def _train_first(
        self, model: MemoryViT, groups: Splits, recipe: Recipe, processes: ProcessGroup
    ) -> TaskTrainer:
        model.add_task("first", groups.classes, 5, seed=self.seed)
        trainer = TaskTrainer(model, "first", recipe)
        Training(model, [trainer], groups, recipe, Run(None, processes)).whole()
        return trainer

    def _train_second(
        self, model: MemoryViT, splits: Splits, recipe: Recipe, processes: ProcessGroup
    ) -> dict[tuple[str, float], TaskTrainer]:
        """The second task both ways at every learning rate, in one pass."""
        trainers = {}
        for way in WAYS:
            for lr in MASKED_RATES:
                name = f"{way}-{lr:g}"
                extends = ["first"] if way == "extended" else []
                model.add_task(name, splits.classes, 5, extends=extends, seed=self.seed)
                trainers[way, lr] = TaskTrainer(model, name, recipe.but(lr=lr))
        Training(model, list(trainers.values()), splits, recipe, Run(None, processes)).whole()
        return trainers


def _score(trainer: TaskTrainer) -> tuple[float, float]:
    return trainer.metrics["accuracy"], -trainer.metrics["loss"]


def jobs() -> list[Extension]:
    return [
        Extension(data, share, seed)
        for seed in SEEDS
        for data in ("pets", "fashion")
        for share in (1.0, 0.2)
    ]


def table() -> list[str]:
    found: dict[tuple[str, float], list[Record]] = {}
    for job in jobs():
        if record := EXTENSION.get(job.record_name):
            found.setdefault((job.data, job.share), []).append(record)
    what = {"pets": "37 breeds, after cat or dog", "fashion": "10 classes, after 4 groups"}
    rows = []
    for (data, _), records in found.items():
        cells = [mean_and_spread([record[way]["test"] for record in records]) for way in WAYS]
        images = f"{records[0]['train_images']:,}"
        rows.append([f"{data}: {what[data]}", images, *cells, str(len(records))])
    return markdown_table(("second task", "images", *WAYS, "seeds"), rows)
