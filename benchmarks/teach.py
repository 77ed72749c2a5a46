"""A task from one, two or five images a class: `engram.teach` beside the nearest class mean.

    OMP_NUM_THREADS=1 python -m benchmarks.teach [--backbone FILE] [--draws 3]

Both answer for all test images of three datasets, from the same features: the pooled token. Images
are drawn as in benchmarks.small, whose records say what `fit` had for some of these draws, with all
that it tries. Leave-one-out accuracy is what `teach` prints, and the interval beside it.
The features are kept in build/teach, and computing them takes ten minutes of one core; the
rest takes seconds. Writes benchmarks/results/teach.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import engram
from benchmarks.paths import BACKBONE, BUILD
from benchmarks.report import markdown_table, write_report
from benchmarks.small import drawn, load, records
from engram.data.datasets import Dataset
from engram.tasks.feature_sums import FeatureSums
from engram.tasks.metrics import classification_metrics
from engram.train.validation import leave_one_out_estimate

#: Constants of `teach` were chosen on waste, textures, pets and blood cells: others are measured.
SETS = ("flowers", "leaves", "xray")
SIZES = (1, 2, 5)


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
    test = classification_metrics([(logits, found.labels)])
    result = {
        "teach": test["accuracy"],
        "nearest class mean": float((nearest == found.labels).double().mean()),
        "ece": test["ece"],
    }
    left_out, known = sums.leave_one_out(x, labels)
    if len(known):
        metrics = classification_metrics([(left_out.float(), known)])
        estimate = leave_one_out_estimate(metrics, len(x))
        low, high = estimate["interval"]
        result["printed − test"] = estimate["accuracy"] - test["accuracy"]
        result["interval holds it"] = float(low <= test["accuracy"] <= high)
    return result


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
    given = parser.parse_args()
    model = engram.MemoryViT(engram.load_backbone(given.backbone))
    fitted, title = fit_records(Path(given.backbone).name), Path(given.backbone).name
    rows: list[list[str]] = []
    means: dict[tuple[int, str], list[float]] = defaultdict(list)
    for name in SETS:
        found, whole = features(model, name, BUILD / "teach" / title), load(name)["train"]
        places = {int(row): i for i, row in enumerate(whole.order)}
        for each in SIZES:
            runs: dict[str, list[float]] = defaultdict(list)
            for draw in range(given.draws):
                train = drawn(whole, each, draw)
                assert train is not None
                for key, value in run(found, train, [places[int(i)] for i in train.order]).items():
                    runs[key].append(value)
                if (name, each, draw) in fitted:
                    runs["fit"].append(fitted[name, each, draw])
                    runs["teach, same draws"].append(runs["teach"][-1])
            rows.append([name, str(each), *(_shown(runs[key]) for key in COLUMNS)])
            for key, values in runs.items():
                means[each, key] += values
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
        ],
    )


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
