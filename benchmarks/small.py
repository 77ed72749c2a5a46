"""What `fit` promises with few images, and what is true: nine datasets, 2 to 50 images a class.

    OMP_NUM_THREADS=1 python -m benchmarks.small [--backbone FOLDER --only pets,waste] [--draws 5]
    OMP_NUM_THREADS=1 python -m benchmarks.small --sizes 0 [--backbone FOLDER] [--draws 3]

For every dataset, number of images a class and draw of them, `auto` runs with its defaults, and all
that it tried is measured on the test images, which decide nothing. The size 0 is all images of a
dataset, and a draw is then a seed. A finished run is a line of benchmarks/results/small.jsonl; the
same command continues, and several may run beside each other on parts of the datasets (--only).
`--table` only writes benchmarks/results/small.md, and backbones.md with its figure for all images,
from the records. The ViT's pass over each dataset is cached in build/small. It needs what
benchmarks.paper needs, and takes hours of one core.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.metrics import roc_auc_score
from torch import Tensor

import engram
from benchmarks.paper.runs import datasets
from benchmarks.paths import ASSETS, BACKBONE, BUILD, RESULTS, ROOT
from benchmarks.report import markdown_table, write_report
from engram.data.datasets import Dataset, Splits
from engram.tasks.metrics import classification_metrics
from engram.tasks.task_settings import TaskSettings
from engram.train.features.feeds import Feed, FeedPlan, open_feed
from engram.train.loop.validation import with_held_out
from engram.train.runs.result import Tried
from engram.train.runs.run import Run
from engram.train.search.auto import RATES, Portfolio, shorter_recipe
from engram.train.search.variants import SweepRunner
from engram.util.processes import ProcessGroup

SETS = (
    *("waste", "textures", "xray", "bloodcells", "leaves", "pets", "flowers"),
    *("fashion", "cifar10"),
)
SIZES = (2, 5, 10, 20, 50)  # images a class
RECORDS = RESULTS / "small.jsonl"
FIGURE = ROOT / "docs" / "images" / "results-backbones.svg"
STRANGERS = 40  # images of every other dataset
TESTED = {"leaves": 229, "pets": 740, "flowers": 781}  # test images, where they are not 600
#: Backbones by the name of their file or folder.
TITLES = {
    "timm.safetensors": "ViT-Ti/16",
    "dinov2_small": "DINOv2-small",
    "clip_vit_base_patch16": "ViT-B/16 of CLIP, restored from int8",
}
RECIPE = engram.Recipe(workers=0)


def load(name: str) -> Splits:
    """All training images of a dataset, and its test images."""
    if name in ("fashion", "cifar10"):
        found = datasets.splits(name, 224, 1_000)
        return replace(found, val=None, test=found["test"].subset(range(600)))
    return replace(engram.data.load(ASSETS / "data" / name), val=None)


def drawn(train: Dataset, each: int, draw: int) -> Dataset | None:
    """So many images of every class, 0 for all, or None where most classes have fewer."""
    if each == 0:
        return train
    groups = [np.flatnonzero(train.labels == c) for c in range(len(train.classes))]
    if np.median([len(group) for group in groups]) < each:
        return None
    random = np.random.default_rng([draw, each])
    chosen = np.concatenate([random.permutation(group)[:each] for group in groups])
    return train.subset(np.sort(chosen))


class Bench:
    """One backbone, and the cached features of all datasets."""

    def __init__(self, backbone: str, work: Path) -> None:
        os.environ["ENGRAM_CACHE"] = str(work / "cache")
        self.backbone, self.name = engram.load_backbone(backbone), Path(backbone).name
        self.splits = {name: load(name) for name in SETS}
        self.processes = ProcessGroup("cpu")

    def run(self, name: str, each: int, draw: int) -> dict[str, Any] | None:
        """One run of `auto`, and how good all that it tried is on the test images."""
        whole = self.splits[name]
        train = drawn(whole["train"], each, draw)
        if train is None:
            return None
        model = engram.MemoryViT(self.backbone)
        recipe = shorter_recipe(replace(RECIPE, seed=0 if each else draw), len(train))
        splits = with_held_out(replace(whole, train=train), recipe)
        run = Run(None, self.processes)
        runner = SweepRunner(model, name, splits, recipe, TaskSettings(), run)
        began = time.process_time()
        portfolio = Portfolio(runner)
        _, final, tried, training = portfolio.best()
        seconds = time.process_time() - began
        finished = [(one.final.task.spec.regime, one.final.name) for one in portfolio.finished]
        fold = next(one.trainers[0].name for one in portfolio.finished if one.final is final)
        names = [called for _, called in finished] + [fold]
        feed = self._feed(portfolio.model, names, whole["test"])
        logits, labels = self._answers(feed, names)
        metrics = {called: classification_metrics((logits[called], labels)) for called in names}
        val, test = final.metrics, metrics[final.name]
        raw = logits[final.name] * val.get("temperature", 1.0)
        own, others = self._familiarity(portfolio.model, final.name, name)
        return {
            "backbone": self.name,
            "dataset": name,
            "each": each,
            "draw": draw,
            "images": len(train),
            "regime": final.task.spec.regime,
            "printed": val["accuracy"],
            "interval": val["interval"],
            "held_out": val["held_out"],
            "test": test["accuracy"],
            "fold": metrics[fold]["accuracy"],
            "candidates": [[regime, metrics[called]["accuracy"]] for regime, called in finished],
            "tried": [[one.regime, one.lr, one.value, one.epochs] for one in tried],
            "at_end": _at_end(tried),
            "ece": test["ece"],
            "uncalibrated_ece": classification_metrics((raw, labels))["ece"],
            "temperature": val.get("temperature", 1.0),
            "unfamiliar": None if own is None else float((own < 0).double().mean()),
            "auroc": None if own is None else _auroc(own, others),
            "seconds": round(seconds, 1),
            "copies": training.copies,
        }

    def _feed(self, model: engram.MemoryViT, names: Sequence[str], images: Dataset) -> Feed:
        both = Splits(images.name, images.classes, train=images, val=images)
        specs = [model.task(name).spec for name in names]
        return open_feed(FeedPlan(model, specs, both, RECIPE.but(precision="fp32")), self.processes)

    def _answers(self, feed: Feed, names: Sequence[str]) -> tuple[dict[str, Tensor], Tensor]:
        found: dict[str, list[Tensor]] = {name: [] for name in names}
        labels = []
        with torch.no_grad():
            for share in feed.validation():
                labels.append(share.labels)
                for name, output in feed.outputs(share.inputs, list(found)).items():
                    found[name].append(output.float())
        return {name: torch.cat(parts) for name, parts in found.items()}, torch.cat(labels)

    def _familiarity(
        self, model: engram.MemoryViT, task: str, dataset: str
    ) -> tuple[Tensor | None, Tensor]:
        """Of its own test images, and of images of the other datasets."""
        statistics = model.task(task).statistics
        if statistics is None:
            return None, torch.zeros(0)

        def familiar(images: Dataset) -> Iterator[Tensor]:
            feed = self._feed(model, [task], images)
            with torch.no_grad():
                for share in feed.validation():
                    yield statistics.familiarity(feed.features(share.inputs, [task])[task]).cpu()

        others = [
            part
            for name, splits in self.splits.items()
            if name != dataset
            for part in familiar(splits["test"].subset(range(STRANGERS)))
        ]
        return torch.cat(list(familiar(self.splits[dataset]["test"]))), torch.cat(others)


def _at_end(tried: Sequence[Tried]) -> bool | None:
    """Whether the best rate of the scouts is the lowest or highest that there is."""
    trained = [one for one in tried if one.how == "trained" and not one.dropped]
    if not trained:
        return None
    rates = sorted(sum(RATES[trained[0].regime], ()))
    return trained[0].lr in (rates[0], rates[-1])


def _auroc(own: Tensor, others: Tensor) -> float:
    truth = [1] * len(own) + [0] * len(others)
    return float(roc_auc_score(truth, torch.cat([own, others]).numpy()))


# The table


def records() -> list[dict[str, Any]]:
    if not RECORDS.exists():
        return []
    return [json.loads(line) for line in RECORDS.read_text().splitlines()]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def covered(one: dict[str, Any]) -> float:
    low, high = one["interval"]
    return float(low <= one["test"] <= high)


def width(one: dict[str, Any]) -> float:
    low, high = one["interval"]
    return float(high - low)


def sampling(one: dict[str, Any]) -> float:
    """Mean size of printed − test if the images held out and those of the test were all the noise.

    Both are shares of independent images, and the mean of a normal variable's size is 0.8 of its
    deviation.
    """
    right = one["test"]
    count = 1 / one["images"] + 1 / TESTED.get(one["dataset"], 600)
    return math.sqrt(2 / math.pi * right * (1 - right) * count)


def regret(one: dict[str, Any]) -> float:
    return float(max(accuracy for _, accuracy in one["candidates"]) - one["test"])


#: Title, value of a run, and how values become one number.
ROWS: tuple[tuple[str, Callable[[dict[str, Any]], float | None], Callable[..., Any], str], ...] = (
    ("interval holds the test accuracy", covered, mean, "{:.0%}"),
    ("printed − test, points", lambda r: 100 * (r["printed"] - r["test"]), mean, "{:+.1f}"),
    ("its size", lambda r: 100 * abs(r["printed"] - r["test"]), mean, "{:.1f}"),
    ("its size if it were sampling alone", lambda r: 100 * sampling(r), mean, "{:.1f}"),
    ("held out − test, points", lambda r: 100 * (r["held_out"] - r["test"]), mean, "{:+.1f}"),
    (
        "width of the interval",
        lambda r: 100 * (r["interval"][1] - r["interval"][0]),
        mean,
        "{:.1f}",
    ),
    ("regret of the choice, points", lambda r: 100 * regret(r), mean, "{:.2f}"),
    ("trained at the end of its rates", lambda r: r.get("at_end"), mean, "{:.0%}"),
    ("gain of the refit, points", lambda r: 100 * (r["test"] - r["fold"]), mean, "{:+.1f}"),
    ("test ECE before", lambda r: r["uncalibrated_ece"], mean, "{:.3f}"),
    ("after − before", lambda r: r["ece"] - r["uncalibrated_ece"], mean, "{:+.3f}"),
    ("worst of it", lambda r: r["ece"] - r["uncalibrated_ece"], max, "{:+.3f}"),
    ("own test images called unfamiliar", lambda r: r["unfamiliar"], mean, "{:.1%}"),
    ("AUROC against other datasets", lambda r: r["auroc"], mean, "{:.3f}"),
    ("test accuracy", lambda r: 100 * r["test"], mean, "{:.1f}"),
    ("processor seconds from the cache", lambda r: r["seconds"], mean, "{:.0f}"),
)


def lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """A table for each backbone: a column for each number of images a class, and all together."""
    text: list[str] = []
    for backbone in sorted({one["backbone"] for one in found}):
        own = [one for one in found if one["backbone"] == backbone and one["each"]]
        if not own:
            continue
        by_size = defaultdict(list)
        for one in own:
            by_size[one["each"]].append(one)
        columns = [*(by_size[each] for each in sorted(by_size)), own]
        titles = [*(f"{each} a class" for each in sorted(by_size)), "all"]
        rows = [["runs", *(str(len(column)) for column in columns)]]
        for title, value, together, form in ROWS:
            cells = []
            for column in columns:
                values = [v for v in map(value, column) if v is not None]
                cells.append(form.format(together(values)) if values else "")
            rows.append([title, *cells])
        kept: dict[str, int] = defaultdict(int)
        for one in own:
            kept[one["regime"]] += 1
        chosen = ", ".join(f"{name} {count}" for name, count in sorted(kept.items()))
        sets = ", ".join(sorted({one["dataset"] for one in own}))
        draws = len({one["draw"] for one in own})
        text += ["", f"## {TITLES.get(backbone, backbone)}", ""]
        text += [f"Datasets: {sets}. Draws: {draws}. Kept: {chosen}.", ""]
        text += markdown_table(("", *titles), rows)
    return text


def whole_lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """A table for each backbone: test accuracy of `auto` and of all it tried, on all images."""
    text: list[str] = []
    for backbone in sorted({one["backbone"] for one in found if not one["each"]}):
        own = [one for one in found if one["backbone"] == backbone and not one["each"]]
        regimes = sorted({regime for one in own for regime, _ in one["candidates"]})
        rows = []
        for dataset in (name for name in SETS if any(one["dataset"] == name for one in own)):
            runs = [one for one in own if one["dataset"] == dataset]
            cells = [_spread([one["test"] for one in runs])]
            cells += [_spread([a for one in runs for r, a in one["candidates"] if r == regime])
                      for regime in regimes]  # fmt: skip
            kept = ", ".join(sorted({one["regime"] for one in runs}))
            numbers = (f"{100 * mean([regret(one) for one in runs]):.1f}",
                       f"{mean([one['seconds'] for one in runs]):.0f}")  # fmt: skip
            rows.append([dataset, str(runs[0]["images"]), *cells, kept, *numbers])
        everywhere = [[one["test"] for one in own]]
        everywhere += [[a for one in own for r, a in one["candidates"] if r == regime]
                       for regime in regimes]  # fmt: skip
        means = [f"{100 * mean(a):.1f}" if len(a) >= len(own) else "" for a in everywhere]
        regrets = f"{100 * mean([regret(one) for one in own]):.2f}"
        rows.append(["mean", "", *means, "", regrets, ""])
        titles = ("dataset", "images", "auto", *regimes, "kept", "regret", "CPU seconds")
        text += ["", f"## {TITLES.get(backbone, backbone)}", "", *markdown_table(titles, rows)]
    return text


def draw_backbones(found: Sequence[dict[str, Any]]) -> None:
    """Draw the test accuracy of `auto` on all images of every dataset, with every backbone."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    for backbone, title in TITLES.items():
        runs = [one for one in found if one["backbone"] == backbone and not one["each"]]
        names = [name for name in SETS if any(one["dataset"] == name for one in runs)]
        means = [100 * mean([r["test"] for r in runs if r["dataset"] == n]) for n in names]
        if names:
            axes.plot(means, [SETS.index(n) for n in names], "o", ms=8, label=title, alpha=0.85)
    axes.set(xlabel="test accuracy of auto, %", yticks=range(len(SETS)), yticklabels=SETS)
    axes.invert_yaxis()
    axes.grid(color="#e3e6ea", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    with mpl.rc_context({"svg.hashsalt": "engram"}):  # the same numbers, the same file
        figure.savefig(FIGURE, metadata={"Date": None})


def _spread(values: Sequence[float]) -> str:
    """Mean and standard deviation in per cent, with the number of runs where it is not three."""
    if not values:
        return ""
    text = f"{100 * mean(values):.1f}"
    if len(values) > 1:
        text += f" ± {100 * float(np.std(values, ddof=1)):.1f}"
    return text if len(values) == 3 else f"{text} ({len(values)})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.small", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--backbone", default=str(BACKBONE))
    parser.add_argument("--only", default=",".join(SETS), help="datasets, with commas")
    sizes = ",".join(map(str, SIZES))
    parser.add_argument("--sizes", default=sizes, help="images a class; 0: all there are")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--table", action="store_true", help="only write the table")
    given = parser.parse_args(arguments)
    if not given.table:
        bench = Bench(given.backbone, BUILD / "small")
        done = {(r["backbone"], r["dataset"], r["each"], r["draw"]) for r in records()}
        for draw in range(given.draws):
            for each in map(int, given.sizes.split(",")):
                for name in given.only.split(","):
                    if (bench.name, name, each, draw) in done:
                        continue
                    found = bench.run(name, each, draw)
                    if found is not None:
                        with RECORDS.open("a") as file:  # one write a line: others may append too
                            file.write(json.dumps(found) + "\n")
                        print(name, each, draw, f"{found['printed']:.3f} {found['test']:.3f}",
                              found["regime"], found["seconds"], flush=True)  # fmt: skip
    kept, command = records(), "Written by `python -m benchmarks.small`"
    write_report("small", "Few images", [f"{command}.", *lines(kept)])
    whole = [
        f"{command} with `--sizes 0`: `auto` with its defaults on all training images, test "
        "accuracy in per cent (± standard deviation over seeds; how many, where they are not "
        "three), and that of every candidate which `auto` trained to the end. `regret` is the best "
        "candidate on test minus the chosen one, in points; seconds are those of one core, from "
        "the cache. A long pass over training images was in bf16, as it is by default; test images "
        "were seen in fp32."
    ]
    if any(not one["each"] for one in kept):
        write_report("backbones", "Backbones", [*whole, *whole_lines(kept)])
        draw_backbones(kept)


if __name__ == "__main__":
    main()
