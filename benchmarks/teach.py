"""A task from one, two or five images a class: `engram.teach` beside the nearest class mean.

    OMP_NUM_THREADS=1 python -m benchmarks.teach [--backbone FILE] [--draws 3] [--against-fit]

Both answer for all test images of three datasets, from the same features: the pooled token. Images
are drawn as in benchmarks.small, whose records say what `fit` had for some of these draws, with all
that it tries. Leave-one-out accuracy is what `teach` prints, and the interval beside it.
Familiarity is that of test images, and of test images of the other datasets.
The features are kept in build/teach, and computing them takes ten minutes of one core; the
rest takes seconds. Writes benchmarks/results/teach.md.

--against-fit also runs `fit` with its defaults on draws of two datasets, and measures both on
training images that were not drawn: that decides from how many images on `fit` trains. It takes ten
minutes more, and finished runs are kept in build/teach.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

import engram
from benchmarks.paths import BACKBONE, BUILD
from benchmarks.report import markdown_table, write_report
from benchmarks.small import drawn, load, records
from engram.data.datasets import Dataset, Splits
from engram.tasks.feature_sums import FeatureSums
from engram.tasks.metrics import classification_metrics
from engram.train.loop.validation import leave_one_out_estimate

#: Constants of `teach` were chosen on waste, textures, pets and blood cells: others are measured.
SETS = ("flowers", "leaves", "xray")
SIZES = (1, 2, 5)
#: Where `fit` and `teach` are compared on training images, and how many of these are answered.
COMPARED, COMPARED_SIZES, ANSWERED = ("waste", "leaves"), (2, 5), 150


@dataclass(frozen=True, eq=False)
class Features:
    """Of all images of a dataset."""

    train: Tensor
    test: Tensor
    labels: Tensor  # of the test images


def features(model: engram.MemoryViT, name: str, folder: Path) -> Features:
    """Computed once, then read."""
    path = folder / f"{name}.npz"
    if not path.exists():
        parts: dict[str, Any] = {}
        for split in ("train", "test"):
            dataset = load(name)[split]
            found = engram.embed(model, dataset, tasks=["base"], workers=0)
            assert not found.failed
            parts[split], parts[f"{split}_labels"] = found.vectors["base"], dataset.labels
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(path, **parts)
    with np.load(path) as kept:
        return Features(*(torch.from_numpy(kept[k]) for k in ("train", "test", "test_labels")))


def run(found: Features, train: Dataset, rows: list[int]) -> dict[str, float]:
    """One draw: what each method has right on the test images."""
    x, labels, classes = found.train[rows], torch.from_numpy(train.labels), len(train.classes)
    sums = FeatureSums.from_features(x, labels, classes)
    head, means = sums.solve(), (sums.sums / sums.images[:, None]).float()
    logits = (found.test.double() @ head.weight.mT + head.bias).float()
    nearest = torch.cdist(found.test, means).argmin(1)
    test = classification_metrics((logits, found.labels))
    result = {
        "teach": test["accuracy"],
        "nearest class mean": float((nearest == found.labels).double().mean()),
        "ece": test["ece"],
    }
    left_out, known = sums.leave_one_out(x, labels)
    if len(known):
        metrics = classification_metrics((left_out.float(), known))
        estimate = leave_one_out_estimate(metrics, len(x))
        low, high = estimate["interval"]
        result["printed − test"] = estimate["accuracy"] - test["accuracy"]
        result["interval holds it"] = float(low <= test["accuracy"] <= high)
    return result


def familiarity(found: Features, strangers: Tensor, train: Dataset, rows: list[int]) -> list[float]:
    """Shares of test images and of strangers below 0, and AUROC; nothing if it is absent."""
    x, labels = found.train[rows], torch.from_numpy(train.labels)
    sums = FeatureSums.from_features(x, labels, len(train.classes))
    statistics = sums.class_statistics()
    if not statistics.adjust(sums.left_out_likeness(x, labels)):
        return []
    own, others = (statistics.familiarity(x) for x in (found.test, strangers))
    truth = [1] * len(own) + [0] * len(others)
    auroc = roc_auc_score(truth, torch.cat([own, others]).numpy())
    return [float((own < 0).double().mean()), float((others < 0).double().mean()), float(auroc)]


def against_fit(model: engram.MemoryViT, name: str, each: int, draw: int) -> dict[str, float]:
    """Accuracy of `teach` and `fit` on training images that were not drawn."""
    whole = load(name)["train"]
    train = drawn(whole, each, draw)
    assert train is not None
    known = set(train.order.tolist())
    rest = [i for i, row in enumerate(whole.order.tolist()) if row not in known]
    rest = np.random.default_rng(draw).permutation(rest)[:ANSWERED].tolist()
    splits = Splits(name, whole.classes, train=train, test=whole.subset(sorted(rest), "test"))
    result = {}
    for what in ("teach", "fit"):
        began = time.process_time()
        if what == "teach":
            val = engram.teach(model, "t", splits).metrics["val"]
        else:
            val = engram.auto(model, "t", splits, engram.Recipe(workers=0)).metrics["val"]
        result[f"{what} seconds"] = time.process_time() - began
        metrics = engram.evaluate(model, splits, "t", workers=0)
        result |= {what: metrics["accuracy"], f"{what} ece": metrics["ece"]}
        result[f"{what} printed"] = val["accuracy"]
        model.detach("t")
    return result


def compared(model: engram.MemoryViT, draws: int, folder: Path) -> list[str]:
    """A table of `teach` and `fit`, of runs that are kept in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["ENGRAM_CACHE"] = str(folder / "cache")
    table = []
    for name, each in itertools.product(COMPARED, COMPARED_SIZES):
        runs = []
        for draw in range(draws):
            path = folder / f"against-fit-{name}-{each}-{draw}.json"
            if not path.exists():
                print(path.stem, file=sys.stderr, flush=True)
                path.write_text(json.dumps(against_fit(model, name, each, draw)))
            runs.append(json.loads(path.read_text()))
        row = [name, str(each)]
        for what in ("teach", "fit"):
            row += [_shown([one[key] for one in runs]) for key in (what, f"{what} ece")]
            row.append(_shown([one[f"{what} printed"] - one[what] for one in runs]))
            row.append(f"{statistics.fmean(one[f'{what} seconds'] for one in runs):.1f}")
        row.append(_shown([one["fit"] - one["teach"] for one in runs]))
        table.append(row)
    measured = ("", "ece", "printed − true", "seconds")
    columns = [f"{what} {one}".strip() for what in ("teach", "fit") for one in measured]
    return [
        "",
        "## `teach` or `fit`",
        "",
        f"{draws} draws; accuracy in % on at most {ANSWERED} training images that were not drawn; "
        "seconds of one core with the pass over the images.",
        "",
        *markdown_table(["dataset", "images a class", *columns, "fit − teach"], table),
    ]


def seconds(model: engram.MemoryViT) -> float:
    """Time of `engram.teach` with five photographs of each of two breeds: the best of three."""
    train = load("pets")["train"]
    images = {
        train.classes[c]: [train.read(int(i)) for i in np.flatnonzero(train.labels == c)[:5]]
        for c in (0, 1)
    }
    times = []
    for _ in range(3):
        began = time.perf_counter()
        engram.teach(model, "two", images)
        times.append(time.perf_counter() - began)
        model.detach("two")
    return min(times)


def fit_records(backbone: str) -> Mapping[tuple[str, int, int], float]:
    """What `fit` had on test, by dataset, images a class and draw."""
    return {
        (one["dataset"], one["each"], one["draw"]): one["test"]
        for one in records()
        if one["backbone"] == backbone
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backbone", default=str(BACKBONE))
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--against-fit", action="store_true")
    given = parser.parse_args()
    model = engram.MemoryViT(engram.load_backbone(given.backbone))
    fitted, title = fit_records(Path(given.backbone).name), Path(given.backbone).name
    rows: list[list[str]] = []
    means: dict[tuple[int, str], list[float]] = defaultdict(list)
    familiar: list[list[str]] = []
    folder = BUILD / "teach" / title
    everything = {name: features(model, name, folder) for name in SETS}
    for name, found in everything.items():
        whole = load(name)["train"]
        strangers = torch.cat([one.test for other, one in everything.items() if other != name])
        places = {int(row): i for i, row in enumerate(whole.order)}
        for each in SIZES:
            runs: dict[str, list[float]] = defaultdict(list)
            usual: list[list[float]] = []
            for draw in range(given.draws):
                train = drawn(whole, each, draw)
                assert train is not None
                chosen = [places[int(i)] for i in train.order]
                for key, value in run(found, train, chosen).items():
                    runs[key].append(value)
                usual.append(familiarity(found, strangers, train, chosen))
                if (name, each, draw) in fitted:
                    runs["fit"].append(fitted[name, each, draw])
                    runs["teach, same draws"].append(runs["teach"][-1])
            rows.append([name, str(each), *(_shown(runs[key]) for key in COLUMNS)])
            for key, values in runs.items():
                means[each, key] += values
            if all(usual):
                parts = [_shown(list(part)) for part in zip(*usual, strict=True)]
                familiar.append([name, str(each), *parts])
    for each in SIZES:
        rows.append(["all", str(each), *(_shown(means[each, key], False) for key in COLUMNS)])
    write_report(
        "teach",
        "A task from a handful of images",
        [
            "Written by `python -m benchmarks.teach`.",
            "",
            f"## {title}",
            "",
            f"{given.draws} draws of the images; accuracy on test images in %, mean ± deviation. "
            "`fit` is what benchmarks.small recorded for some of these draws, and stands beside "
            "`teach` on the same draws.",
            "",
            *markdown_table(["dataset", "images a class", *COLUMNS], rows),
            "",
            f"`engram.teach` with ten photographs of two breeds took {seconds(model):.2f} seconds.",
            "",
            "## Familiarity",
            "",
            "Test images that are called unfamiliar (5 % are meant to be), those of the other "
            "datasets, and AUROC between both, in %. With fewer images a class it is absent.",
            "",
            *markdown_table(["dataset", "images a class", *FAMILIARITY], familiar),
            *(compared(model, given.draws, folder) if given.against_fit else []),
        ],
    )


FAMILIARITY = ("own images below 0", "others below 0", "AUROC")
COLUMNS = (
    *("teach", "nearest class mean", "teach, same draws", "fit", "ece"),
    *("printed − test", "interval holds it"),
)


def _shown(values: list[float], spread: bool = True) -> str:
    if not values:
        return ""
    text = f"{100 * statistics.fmean(values):.1f}"
    return f"{text} ± {100 * statistics.stdev(values):.1f}" if spread and len(values) > 1 else text


if __name__ == "__main__":
    main()
