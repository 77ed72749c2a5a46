"""Whether averages of several trainings (model soups) are better than the best of them.

    OMP_NUM_THREADS=1 python -m benchmarks.soups          train and measure what is missing
    python -m benchmarks.soups --table                    only print the table

From the cached tokens of a real ViT-Ti/16 at 224 pixels, on pets and flowers: `masked` at three
rates and two seeds, `side` at three rates with one seed and at one rate with another, 10 epochs
each; pets in two orders of the images. Averages are of other rates, other orders or other seeds.
A finished pass is kept in build/soups, a measured set is a line of results/soups.jsonl. It takes
half an hour of one core.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from benchmarks.paper.records import Record, Records
from benchmarks.paper.runs import datasets
from benchmarks.paper.runs.from_cache import score_test_images
from benchmarks.paths import BUILD, RESULTS, require_backbone
from benchmarks.report import markdown_table
from engram.methods import METHODS
from engram.model import MemoryViT
from engram.train.features.feeds import FeedPlan
from engram.train.loop.task_trainer import TaskTrainer
from engram.train.loop.training import Training
from engram.train.recipe import Recipe
from engram.train.runs.run import Run
from engram.util.processes import ProcessGroup

RECORDS = Records(RESULTS / "soups.jsonl")
RATES = {"masked": (5e-4, 1e-3, 2e-3), "side": (1.5e-3, 3e-3, 6e-3)}
ORDERS = {"pets": (0, 1), "flowers": (0,)}
EPOCHS = 10
Trained = tuple[int, int, int]  # order, seed, number of the rate
Weights = dict[str, Tensor]


def trained(name: str, regime: str, order: int) -> dict[Trained, Weights]:
    """All rates and seeds in one pass, from `build/soups` if they are there."""
    kept = BUILD / "soups" / f"{name}-{regime}-{order}.pt"
    if not kept.exists():
        splits, model = datasets.splits(name, 224, 4_000), MemoryViT(datasets.backbone(224))
        recipe = Recipe(epochs=EPOCHS, data_seed=order, evaluations=5, workers=0)
        trainers = {}
        for seed in (0, 1):
            for i, lr in enumerate(RATES[regime]):
                if regime == "side" and seed and i != 1:
                    continue
                model.add(splits.task_spec(f"{seed}.{i}", METHODS[regime]()), seed=seed)
                trainers[order, seed, i] = TaskTrainer(model, f"{seed}.{i}", recipe.but(lr=lr))
        tried = list(trainers.values())
        Training(model, tried, splits, recipe, Run(None, ProcessGroup())).whole()
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save({run: one.task.tensors() for run, one in trainers.items()}, kept)
    found: dict[Trained, Weights] = torch.load(kept, weights_only=True)
    return found


def soups(runs: Sequence[Trained]) -> Iterator[tuple[str, list[Trained]]]:
    """Every run alone, and the groups of those that differ in one thing."""
    for run in runs:
        yield f"one {run}", [run]
    for kind, others in (("rates", (0, 1)), ("orders", (1, 2)), ("seeds", (0, 2))):
        groups: dict[tuple[int, ...], list[Trained]] = {}
        for run in runs:
            groups.setdefault(tuple(run[i] for i in others), []).append(run)
        yield from ((f"{kind} {key}", group) for key, group in groups.items() if len(group) > 1)


def measure(name: str, regime: str) -> Record:
    """Accuracy and loss on validation and test images, of every run and every average."""
    runs = {r: w for order in ORDERS[name] for r, w in trained(name, regime, order).items()}
    splits, model = datasets.splits(name, 224, 4_000), MemoryViT(datasets.backbone(224))
    groups, names = dict(soups(list(runs))), {}
    for i, (label, group) in enumerate(groups.items()):
        names[label] = f"t{i}"
        task = model.add(splits.task_spec(f"t{i}", METHODS[regime]()), seed=0)
        for tensor, own in task.tensors().items():
            own.copy_(torch.stack([runs[run][tensor] for run in group]).mean(0))
    found: dict[str, dict[str, list[float]]] = {label: {} for label in names}
    for split in ("val", "test"):
        shown = replace(splits, test=splits[split])
        scores = score_test_images(
            model, list(names.values()), shown, Recipe(workers=0), ProcessGroup()
        )
        for label, called in names.items():
            accuracy, loss = (float(scores[called][key]) for key in ("accuracy", "loss"))
            found[label][split] = [round(100 * accuracy, 2), round(loss, 4)]
    members = {label: [f"one {run}" for run in group] for label, group in groups.items()}
    return {"set": name, "regime": regime, "scores": found, "members": members}


def table() -> list[str]:
    """How averages compare with the mean and with the best of their members, on test images."""
    rows = []
    for record in RECORDS.all():
        scores, members = record["scores"], record["members"]
        for kind in ("rates", "orders", "seeds"):
            groups = [label for label in members if label.startswith(kind)]
            if not groups:
                continue
            over_mean, over_best, loss = [], [], []
            for label in groups:
                alone = [scores[one] for one in members[label]]
                own = scores[label]["test"]
                best = max(alone, key=lambda one: (one["val"][0], -one["val"][1]))
                over_mean.append(own[0] - statistics.fmean(one["test"][0] for one in alone))
                over_best.append(own[0] - best["test"][0])
                loss.append(own[1] - min(one["test"][1] for one in alone))
            rows.append([
                f"{record['set']}, {record['regime']}", kind, str(len(groups)),
                *(f"{statistics.fmean(gains):+.1f}" for gains in (over_mean, over_best)),
                f"{statistics.fmean(loss):+.2f}",
            ])  # fmt: skip
    columns = (
        "trainings", "differ in", "averages", "against the mean of the members",
        "against the best on validation", "loss, against the lowest",
    )  # fmt: skip
    return markdown_table(columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soups", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--only", default="", help="such as 'pets side'")
    given = parser.parse_args()
    if not given.table:
        require_backbone()
        with mock.patch.object(FeedPlan, "keeps", "all"):  # one cache for both regimes
            for label in (f"{name} {regime}" for name in ORDERS for regime in RATES):
                if given.only in label and label not in RECORDS:
                    name, regime = label.split()
                    RECORDS.append(label, measure(name, regime))
    print("\n".join(table()))


if __name__ == "__main__":
    main()
