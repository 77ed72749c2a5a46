"""What each member of `auto`'s portfolio is there for, on held-out training images.

    OMP_NUM_THREADS=1 python -m benchmarks.portfolio [--backbone FOLDER] [--only pets,waste]
    python -m benchmarks.portfolio --table

On every dataset `auto` solves its linear heads, and trains each regime that could be a member at
the best of its rates, as it does where a regime wins: five folds, so that every image is held out
once. The answers are kept in build/portfolio, so portfolios can be compared afterwards: what is
lost without a member, or gained with one more, or with averages of members. The choice is made on
half of the held-out images and measured on the other half, many times. No test image is read.

A finished dataset is a line of results/portfolio.jsonl; the same command continues. With a ViT-Ti
a dataset takes about five minutes of one core, with a DINOv2-small twenty. The page is
results/portfolio.md.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

import engram
from benchmarks import small
from benchmarks.paper.records import Record, Records
from benchmarks.paths import BACKBONE, BUILD, RESULTS
from benchmarks.report import markdown_table, write_report
from engram.tasks.task_settings import TaskSettings
from engram.train.loop.validation import with_held_out
from engram.train.runs.run import Run
from engram.train.search import auto, screening
from engram.train.search.auto import WITH_READOUT, Portfolio, Rates, shorter_recipe
from engram.train.search.variants import SweepRunner
from engram.util.processes import ProcessGroup

RECORDS = Records(RESULTS / "portfolio.jsonl")
WORK = BUILD / "portfolio"
RECIPE = engram.Recipe(folds=5, workers=0)
ALL = (1e-4, 5e-4, 2e-3, 8e-3, 3e-2)
#: What could be trained, with every rate that has a scout.
TRAINED: Mapping[str, Sequence[float]] = {
    "side": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),  # first: what it reads is cached, heads see it, too
    "masked": ALL,
    "masked+adapter": ALL,
    "pooling": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
}
SOLVED = ("head", "readout")


def measure(backbone: str, name: str, work: Path) -> Record:
    """Train all members on a dataset; their answers go to `work`."""
    processes, vit = ProcessGroup("cpu"), engram.load_backbone(backbone)
    whole = replace(small.load(name), test=None)
    recipe = shorter_recipe(RECIPE, len(whole["train"]))
    answers: dict[str, npt.NDArray[np.float32]] = {}
    record: dict[str, Any] = {"images": len(whole["train"]), "members": {}}
    for regime, rates in TRAINED.items():
        splits = with_held_out(whole, recipe)
        model = engram.MemoryViT(vit)
        run = Run(None, processes)
        runner = SweepRunner(model, name, splits, recipe, TaskSettings(), run)
        began = time.process_time()
        with (
            mock.patch.object(auto, "RATES", {regime: Rates(tuple(rates))}),
            mock.patch.object(screening, "_HOPELESS", math.inf),
        ):
            portfolio = Portfolio(runner)
            portfolio.solves = not answers  # heads are solved once, and averaged afterwards
            _, _, tried, _ = portfolio.best()
        for trial in portfolio.finished:
            member = trial.final.task.spec.regime
            if member in answers or trial.how == "averaged":
                continue
            outputs, labels, samples, _ = trial.final.held_out
            answers[member] = outputs.float().numpy()
            answers["labels"], answers["samples"] = labels.numpy(), samples.numpy()
            own = [one for one in tried if one.regime == member]
            record["members"][member] = {
                "accuracy": round(100 * float((outputs.argmax(1) == labels).float().mean()), 2),
                "loss": round(float(F.cross_entropy(outputs, labels)), 4),
                "lr": trial.lr,
                "epochs": trial.epochs,
                "rates": [[one.lr, round(one.value, 4)] for one in own],
                "seconds": round(time.process_time() - began, 1),
            }
        print(name, regime, record["members"].get(regime), flush=True)
    work.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(work, **answers)  # type: ignore[arg-type]
    return {**record, **compared(*load_answers(work))}


# Comparing portfolios


def load_answers(path: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    found = {name: torch.from_numpy(value) for name, value in np.load(path).items()}
    labels = found.pop("labels")
    found.pop("samples")
    return found, labels


def compared(answers: dict[str, torch.Tensor], labels: torch.Tensor) -> Record:
    """Accuracy and loss of every member and of its average with the readout, and portfolios."""
    readout = answers["readout"]
    averages = {f"{name}+readout": (answers[name] + readout) / 2 for name in TRAINED}
    every = answers | averages
    losses = {name: float(F.cross_entropy(one, labels)) for name, one in every.items()}
    scores = {
        name: [round(100 * float((one.argmax(1) == labels).double().mean()), 2), round(loss, 4)]
        for (name, one), loss in zip(every.items(), losses.values(), strict=True)
    }

    def chosen(trained: Sequence[str], *solved: str, average: bool = True) -> float:
        """The best of the solved, of one trained regime, and of its average."""
        names = [*solved]
        if trained:
            best = min(trained, key=losses.__getitem__)
            names += [best, f"{best}+readout"] if average else [best]
        return round(chosen_accuracy([every[name] for name in names], labels), 2)

    members = tuple(WITH_READOUT)
    return {
        "scores": scores,
        "portfolios": {
            "`auto`": chosen(members, *SOLVED),
            "without averages": chosen(members, *SOLVED, average=False),
            "without head": chosen(members, "readout"),
            "without readout and averages": chosen(members, "head", average=False),
            "head and readout, nothing trained": chosen((), *SOLVED),
            **{
                f"of the trained, {one} alone": chosen([one], *SOLVED)
                for one in (*members, "pooling")
            },
            **{
                f"without {one}": chosen([other for other in members if other != one], *SOLVED)
                for one in members
            },
            "with pooling": chosen([*members, "pooling"], *SOLVED),
        },
    }


def chosen_accuracy(
    outputs: Sequence[torch.Tensor], labels: torch.Tensor, repeats: int = 200
) -> float:
    """Accuracy on half of the images of the one that is best on the other half, on average."""
    right = torch.stack([(one.argmax(1) == labels).double() for one in outputs], 1)
    lost = torch.stack(
        [F.cross_entropy(one, labels, reduction="none").double() for one in outputs], 1
    )
    random, found = torch.Generator().manual_seed(0), []
    for _ in range(repeats):
        order = torch.randperm(len(labels), generator=random)
        here, there = order.chunk(2)
        scores = right[here].mean(0)
        best = scores.max()
        ties = scores >= best - 0.5 * (best * (1 - best) / len(here)) ** 0.5
        pick = torch.where(ties, lost[here].mean(0), torch.inf).argmin()
        found.append(float(right[there, pick].mean()))
    return 100 * sum(found) / len(found)


def page() -> list[str]:
    lines = [_ABOUT]
    for backbone in TITLES:
        every = {name: RECORDS.get(f"{backbone}, {name}") for name in small.SETS}
        found = {name: one for name, one in every.items() if one is not None}
        if not found:
            continue
        lines += ["", f"## {TITLES[backbone]}", ""]
        first, sets = next(iter(found.values())), found.values()
        rows = []
        for member in first["scores"]:
            accuracies, losses = zip(*(one["scores"][member] for one in sets), strict=True)
            both = f"{mean(accuracies):.2f} / {mean(losses):.3f}"
            rows.append([member, *(f"{one:.1f}" for one in accuracies), both])
        lines += markdown_table(["", *found, "mean accuracy / loss"], rows)
        rows = []
        for portfolio in first["portfolios"]:
            each = [one["portfolios"][portfolio] for one in sets]
            rows.append([portfolio, *(f"{one:.1f}" for one in each), f"{mean(each):.2f}"])
        lines += ["", *markdown_table(["portfolio", *found, "mean"], rows)]
    return lines


_ABOUT = """
Accuracy in per cent on held-out training images, five folds; in the last column of the first table
the mean and the mean loss. A regime with `+readout` is its average with the readout. Then
portfolios: the choice is made on half of the held-out images and measured on the other half, 200
times. `auto` has the head, the readout, the trained regime with the lowest loss, and its average.
`python -m benchmarks.portfolio`, one seed; no test image is read.
""".strip()
TITLES = {"timm.safetensors": "ViT-Ti/16", "dinov2_small": "DINOv2-small"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.portfolio", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--backbone", default=str(BACKBONE))
    parser.add_argument("--only", default=",".join(small.SETS), help="datasets, with commas")
    parser.add_argument("--table", action="store_true", help="only write the page")
    given = parser.parse_args(arguments)
    if not given.table:
        os.environ.setdefault("ENGRAM_CACHE", str(BUILD / "small" / "cache"))
        torch.set_num_threads(1)
        for name in given.only.split(","):
            called = f"{Path(given.backbone).name}, {name}"
            if called not in RECORDS:
                work = WORK / f"{Path(given.backbone).name}-{name}.npz"
                RECORDS.append(called, measure(given.backbone, name, work))
    write_report("portfolio", "What each member of the portfolio is there for", page())


if __name__ == "__main__":
    main()
