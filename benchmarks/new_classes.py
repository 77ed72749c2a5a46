"""New classes for an existing task, from their images alone, with a real ViT-Ti/16.

    python -m benchmarks.new_classes --work FOLDER [--regimes head] [--seeds 3] [--pieces N]

Of fashion the first 5 classes are learned first and the other 5 later, of pets 20 and then 17
(subsets of benchmarks.paper, 224 pixels), with a linear head and with the regime masked, everything
else at its default:

- joint: one training with the images of all classes;
- replay: `engram fit --add-classes`, from images of the later classes and the old engram alone;
- fine-tuning: training goes on from the old engram, with images of the later classes alone;
- before: the first task, which knows only the first classes.

Accuracy is that of the answers among all classes on the test images, which choose nothing. Finished
pieces stay in the folder, and the same command continues; --pieces ends it after so many. It takes
about half an hour on one idle core for one seed, writes benchmarks/results/new_classes.md, and
needs what benchmarks.paper needs but for CIFAR-10.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import engram
from benchmarks.paper.runs import datasets
from benchmarks.report import markdown_table, write_report
from benchmarks.unfamiliar import Answered, Work, answer, some_classes, splits_of
from engram.data.datasets import Splits
from engram.train.add_classes import add_classes, with_known_classes

FIRST = {"fashion": 5, "pets": 20}
REGIMES = ("head", "masked")
WAYS = ("joint", "replay", "fine-tuning", "before")


@dataclass(frozen=True)
class Case:
    """A dataset whose classes come in two parts, a regime and a seed."""

    work: Work
    data: str
    regime: str
    seed: int

    @property
    def known(self) -> int:
        return FIRST[self.data]

    @property
    def recipe(self) -> engram.Recipe:
        return engram.Recipe(workers=0, seed=self.seed, data_seed=self.seed)

    def name(self, way: str) -> str:
        return f"{way}-{self.data}-{self.regime}-{self.seed}"

    def path(self, way: str) -> Path:
        return self.work.folder / f"{self.name(way)}.safetensors"

    def part(self, later: bool) -> Splits:
        whole = splits_of(self.data)
        some = range(self.known, len(whole.classes)) if later else range(self.known)
        return some_classes(whole, some)

    def engrams(self) -> list[Path]:
        """All four, in the order in which they need each other."""
        for way, make in (("before", self._before), ("joint", self._joint),
                          ("replay", self._replay), ("fine-tuning", self._tuned)):  # fmt: skip
            if self.work.piece(self.path(way)):
                make(self.path(way))
        return [self.path(way) for way in WAYS]

    def _fit(self, splits: Splits, way: str, out: Path) -> None:
        model = engram.MemoryViT(datasets.backbone(224))
        model.add_task(self.name(way), splits.classes, regime=self.regime, seed=self.seed)
        engram.fit(model, self.name(way), splits, self.recipe, out=out, resume=True)

    def _before(self, out: Path) -> None:
        self._fit(self.part(later=False), "before", out)

    def _joint(self, out: Path) -> None:
        self._fit(splits_of(self.data), "joint", out)

    def _replay(self, out: Path) -> None:
        model = engram.MemoryViT(datasets.backbone(224))
        add_classes(
            model, self.path("before"), self.part(later=True), self.recipe,
            task=self.name("replay"), out=out, overwrite=True,
        )  # fmt: skip

    def _tuned(self, out: Path) -> None:
        """All parameters of the old task, with a head that has room for the later classes."""
        old, name = engram.inspect(self.path("before")), self.name("fine-tuning")
        later = with_known_classes(self.part(later=True), old)
        model = engram.MemoryViT(datasets.backbone(224))
        task = model.add_task(name, later.classes, regime=self.regime, seed=self.seed)
        with torch.no_grad():
            for key, tensor in task.tensors().items():
                before = old.tensors[key]
                tensor[: len(before)] = before
        engram.fit(model, name, later, self.recipe, out=out, resume=True)

    def answers(self, every: list[Path]) -> Answered:
        """Of all tasks of this dataset, in one pass over its test images."""
        path = self.work.folder / f"{self.data}-{self.regime}-{self.seed}.pt"
        if self.work.piece(path):
            model = engram.MemoryViT(datasets.backbone(224)).eval()
            for one in every:
                model.attach(one)
            torch.save(answer(model, splits_of(self.data)["test"]), path)
        found: Answered = torch.load(path)
        return found

    def accuracies(self, answered: Answered) -> Iterator[tuple[str, list[float]]]:
        """Of each way: on all test images, on those of the first classes, and of the later."""
        labels = answered["labels"]
        old = labels < self.known
        for way in WAYS:
            right = (answered[f"{self.name(way)} logits"].argmax(1) == labels).double()
            yield way, [float(right[part].mean()) for part in (slice(None), old, ~old)]


def rows(work: Work, regimes: Sequence[str], seeds: int) -> Iterator[list[str]]:
    for regime in regimes:
        for data in FIRST:
            found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
            for case in (Case(work, data, regime, seed) for seed in range(seeds)):
                for way, values in case.accuracies(case.answers(case.engrams())):
                    found[way].append(values)
            for way in WAYS:
                columns = zip(*found[way], strict=True)
                parts = f"{FIRST[data]} + {len(splits_of(data).classes) - FIRST[data]}"
                yield [f"{data} {parts}", regime, way, *map(_cell, columns)]


def _cell(values: tuple[float, ...]) -> str:
    mean = f"{100 * statistics.fmean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * statistics.stdev(values):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.new_classes", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for finished pieces")
    parser.add_argument("--pieces", type=int, default=1_000, help="end after so many pieces")
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=REGIMES)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    given = parser.parse_args()
    work = Work(given.work, given.pieces)
    columns = ("data", "regime", "way", "all classes", "first classes", "later classes")
    table = markdown_table(columns, rows(work, given.regimes, given.seeds))
    lead = f"Test accuracy in per cent among all classes; seeds: {given.seeds}."
    write_report("new_classes", "New classes for an existing task (ViT-Ti/16)", [lead, "", *table])


if __name__ == "__main__":
    main()
