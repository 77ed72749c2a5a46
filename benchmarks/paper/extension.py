"""Extension against concatenation, for a second task that is related to the first.

    python benchmarks/paper/extension.py

The first task names groups (cat or dog; kinds of clothes), the second the classes within them, from
all of the training images and from a fifth of them. Extended, it also reads the class token and the
cells of the first (the stars of Table 1); concatenated, it does not. Both see the same images, and
the rate of each is chosen on validation. From the cache, about a minute for each set, share and
seed. Expect, concatenated and extended, 63.5 ± 1.0 and 61.0 ± 2.7 on pets, from a fifth of
the images 37.6 ± 0.4 and 37.2 ± 1.6; on fashion 80.2 ± 0.2 and 80.3 ± 1.1, from a fifth 72.2 ± 0.5
and 74.9 ± 1.3.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import sets
import torch
from cached import BATCH, EPOCHS, MASKED, silent
from runs import RECORDS, SEEDS, read, write
from show import mean_and_spread

from engram.data.datasets import Dataset, Splits
from engram.model import MemoryViT
from engram.tasks.metrics import classification_metrics
from engram.train.feeds import choose
from engram.train.learner import Learner
from engram.train.recipe import Recipe
from engram.train.training import train
from engram.util.processes import Team

PIXELS, IMAGES, FIRST_RATE = 112, 1_000, 1e-3
CATS = ("abyssinian", "bengal", "birman", "bombay", "british", "egyptian", "maine", "persian",
        "ragdoll", "russian", "siamese", "sphynx")  # fmt: skip
CLOTHES = {
    "tops": ("t-shirt", "pullover", "coat", "shirt"),
    "long": ("trouser", "dress"),
    "shoes": ("sandal", "sneaker", "boot"),
    "bag": ("bag",),
}


def group_of(data: str, label: str) -> str:
    if data == "pets":
        return "cat" if label.lower().startswith(CATS) else "dog"
    return next(group for group, members in CLOTHES.items() if label in members)


def grouped(data: str, splits: Splits) -> Splits:
    """The same pictures, labelled by group."""
    groups = [group_of(data, label) for label in splits.classes]
    names = tuple(sorted(set(groups)))
    number = np.array([names.index(group) for group in groups])

    def relabel(dataset: Dataset) -> Dataset:
        return replace(dataset, classes=names, labels=number[dataset.labels])

    parts = {split: relabel(splits[split]) for split in ("train", "val", "test")}
    return replace(splits, classes=names, **parts)


@dataclass(frozen=True)
class Extension:
    data: str
    share: float  # of the training images, for the second task
    seed: int

    @property
    def name(self) -> str:
        return f"extension {self.data} {self.share:g} seed {self.seed}"

    @property
    def path(self) -> Path:
        return RECORDS / "extension" / f"{self.data}-{self.share:g}-seed{self.seed}.json"

    def missing(self) -> list[str]:
        return [] if self.path.exists() else [self.name]

    def ready(self) -> bool:
        return True

    def work(self, say: Callable[[str], object]) -> None:
        began, team = time.perf_counter(), Team()
        splits = sets.splits(self.data, PIXELS, IMAGES)
        recipe = Recipe(
            epochs=EPOCHS, batch=BATCH, data_seed=self.seed, evaluations=1, workers=0,
            lr=FIRST_RATE,
        )  # fmt: skip
        model = MemoryViT(sets.trunk(PIXELS))
        groups = grouped(self.data, splits)
        model.add_task("first", groups.classes, 5, seed=self.seed)
        first = Learner(model, "first", recipe)
        train(model, [first], groups, recipe, team=team, progress=silent)
        some = splits["train"]
        some = some.subset(np.arange(round(self.share * len(some))))
        steps = EPOCHS * -(-len(splits["train"]) // BATCH)
        few = recipe.but(steps=max(60, round(self.share * steps)))
        learners: dict[tuple[str, float], Learner] = {}
        for how in ("concatenated", "extended"):
            for lr in MASKED:
                name = f"{how}-{lr:g}"
                reads = ["first"] if how == "extended" else []
                model.add_task(name, splits.classes, 5, extends=reads, seed=self.seed)
                learners[how, lr] = Learner(model, name, few, lr)
        second = replace(splits, train=some)
        train(model, list(learners.values()), second, few, team=team, progress=silent)
        record: dict[str, Any] = {
            "set": self.data,
            "share": self.share,
            "seed": self.seed,
            "train_images": len(some),
            "first": {"groups": list(groups.classes), "val": first.metrics["accuracy"]},
        }
        for how in ("concatenated", "extended"):
            tried = {lr: learners[how, lr].metrics for lr in MASKED}
            best = max(MASKED, key=lambda lr: (tried[lr]["accuracy"], -tried[lr]["loss"]))
            record[how] = {
                "lr": best,
                "val": tried[best]["accuracy"],
                "test": tested(model, f"{how}-{best:g}", splits, few, team),
            }
            say(f"{how} lr {best:g} test {record[how]['test']:.4f}")
        record["seconds"] = round(time.perf_counter() - began, 1)
        write(self.path, record)


def tested(model: MemoryViT, name: str, splits: Splits, recipe: Recipe, team: Team) -> float:
    shown = replace(splits, train=splits["test"], val=splits["test"])
    feed = choose(model.eval(), [name], shown, recipe, team)
    with torch.no_grad():
        said = [(feed.logits(item.inputs, [name])[name], item.labels) for item in feed.validation()]
    return float(classification_metrics(said)["accuracy"])


def jobs() -> list[Extension]:
    return [
        Extension(data, share, seed)
        for seed in SEEDS
        for data in ("pets", "fashion")
        for share in (1.0, 0.2)
    ]


def table() -> list[str]:
    lines = [
        "| second task | images | concatenated | extended | seeds |",
        "|---|---|---|---|---|",
    ]
    found: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for job in jobs():
        if record := read(job.path):
            found.setdefault((job.data, job.share), []).append(record)
    what = {"pets": "37 breeds, after cat or dog", "fashion": "10 classes, after 4 groups"}
    for (data, _), records in found.items():
        cells = [
            mean_and_spread([r[how]["test"] for r in records])
            for how in ("concatenated", "extended")
        ]
        images = f"{records[0]['train_images']:,}"
        lines.append(f"| {data}: {what[data]} | {images} | {' | '.join(cells)} | {len(records)} |")
    return lines


if __name__ == "__main__":
    from run import script

    script(jobs(), table)
