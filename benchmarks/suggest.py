"""Accuracy against the number of labels: images that `engram suggest` chooses, and random ones.

    OMP_NUM_THREADS=1 python -m benchmarks.suggest [--seeds 3]

On four datasets (ViT-Ti/16, 224 pixels), the training images are the pool. A first batch is
labelled at random, the same for all, or chosen without a task. Then, in every round, a linear head
is solved from the labelled images (L-BFGS, standardised features, the L2 penalty 0.1 of
`engram.train.heads.solve`), and the next batch is chosen. Accuracy is that on the test images,
which choose nothing: the measure of uncertainty and the way to diversity were chosen on a quarter
of the training images (`--validation`). The backbone's pass over each dataset is kept in
build/suggest. It takes some minutes of one core, writes benchmarks/results/suggest.md, and needs
the assets folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import engram
from benchmarks.paths import ASSETS, BACKBONE, BUILD, require_backbone
from benchmarks.report import markdown_table, write_report
from engram.curation.suggest import choose
from engram.tasks.kinds import KINDS

SETS = ("pets", "flowers", "waste", "bloodcells")
ROUNDS = 6
PENALTY = 0.1
Head: TypeAlias = Callable[[Tensor], Tensor]  # logits from features
#: Of features, logits, labelled features and a number of images: the rows to label.
Chooser: TypeAlias = Callable[[Tensor, Tensor, Tensor, int, np.random.Generator], Sequence[int]]


@dataclass(frozen=True)
class Features:
    """Features and labels of two splits."""

    pool: Tensor
    labels: Tensor
    test: Tensor
    test_labels: Tensor
    classes: int

    @property
    def batch(self) -> int:
        """Images of a round: one for each class, or two where classes are few."""
        return self.classes if self.classes >= 20 else max(20, 2 * self.classes)

    def validation(self) -> Features:
        """A quarter of the pool in place of the test images."""
        order = np.random.default_rng(7).permutation(len(self.pool))
        held, kept = order[: len(order) // 4], order[len(order) // 4 :]
        x, y = self.pool, self.labels
        return Features(x[kept], y[kept], x[held], y[held], self.classes)


def load(name: str) -> Features:
    """The backbone's vectors of a dataset, computed once."""
    path = BUILD / "suggest" / f"{name}.npz"
    if not path.exists():
        print(f"embedding {name}", file=sys.stderr, flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        model = engram.MemoryViT(engram.load_backbone(str(BACKBONE)))
        found = engram.embed(model, ASSETS / "data" / name, tasks=["base"], workers=0)
        np.savez(path, base=found.vectors["base"], split=found.splits, label=found.labels)
    with np.load(path) as file:
        vectors, splits, labels = file["base"], file["split"], file["label"]
    classes, numbers = np.unique(labels, return_inverse=True)
    x, y = torch.from_numpy(vectors), torch.from_numpy(numbers)
    train, test = (torch.from_numpy(splits == split) for split in ("train", "test"))
    return Features(x[train], y[train], x[test], y[test], len(classes))


def solved_head(x: Tensor, labels: Tensor, classes: int) -> Head:
    """A linear head that minimises the loss with the penalty."""
    mean, deviation = x.mean(0), x.std(0, unbiased=False)
    scale = torch.where(deviation > 1e-5, 1 / deviation, 0.0) * x.shape[1] ** -0.5
    seen = (x - mean) * scale
    weight = torch.zeros(classes, x.shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=40, history_size=10, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(seen @ weight.mT + bias, labels)
        loss = loss + PENALTY / len(labels) * weight.square().sum() / 2
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return lambda rows: ((rows - mean) * scale @ weight.mT + bias).detach()


def at_random(
    x: Tensor, logits: Tensor, known: Tensor, count: int, random: np.random.Generator
) -> Sequence[int]:
    chosen: list[int] = random.permutation(len(x))[:count].tolist()
    return chosen


def most_unsure(
    x: Tensor, logits: Tensor, known: Tensor, count: int, random: np.random.Generator
) -> Sequence[int]:
    rows: list[int] = _uncertainty(logits).topk(count).indices.tolist()
    return rows


def suggested(
    x: Tensor, logits: Tensor, known: Tensor, count: int, random: np.random.Generator
) -> Sequence[int]:
    return [row for row, _ in choose(x, _uncertainty(logits), count, known)[0]]


def _uncertainty(logits: Tensor) -> Tensor:
    found = KINDS["classification"].uncertainty(logits, {})
    assert found is not None
    return found


CHOOSERS: dict[str, Chooser] = {
    "random": at_random,
    "most unsure": most_unsure,
    "suggest": suggested,
}


def curve(data: Features, chooser: Chooser, seed: int, cold: bool = False) -> list[float]:
    """Accuracy after each round; with `cold`, the first batch is chosen without a task, too."""
    random, batch = np.random.default_rng(seed), data.batch
    if cold:
        shuffled = random.permutation(len(data.pool))  # ties are broken by the order
        rows, _ = choose(data.pool[shuffled], None, batch, data.pool[:0])
        labelled = [int(shuffled[row]) for row, _ in rows]
    else:
        labelled = random.permutation(len(data.pool))[:batch].tolist()
    found = []
    for left in reversed(range(ROUNDS)):
        head = solved_head(data.pool[labelled], data.labels[labelled], data.classes)
        found.append(float((head(data.test).argmax(1) == data.test_labels).float().mean()))
        others = np.setdiff1d(np.arange(len(data.pool)), labelled)
        if left and len(others) >= batch:
            x = data.pool[others]
            chosen = chooser(x, head(x), data.pool[labelled], batch, random)
            labelled += [int(others[row]) for row in chosen]
    return found


def rows(data: Features, seeds: int) -> Iterator[list[str]]:
    """A row for each way to choose: accuracy by number of labels, mean ± deviation of the seeds."""
    ways = [(name, chooser, False) for name, chooser in CHOOSERS.items()]
    ways.append(("suggest, also the first", suggested, True))
    for name, chooser, cold in ways:
        curves = np.array([curve(data, chooser, seed, cold) for seed in range(seeds)])
        mean, deviation = 100 * curves.mean(0), 100 * curves.std(0, ddof=1)
        cells = [f"{m:.1f} ± {d:.1f}" for m, d in zip(mean, deviation, strict=True)]
        yield [name, *cells, f"{mean.mean():.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suggest", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--validation", action="store_true", help="print, on validation images")
    given = parser.parse_args()
    require_backbone()
    lines = [
        f"Accuracy in %, mean ± deviation of {given.seeds} seeds, ViT-Ti/16, a solved linear head. "
        "Columns: labelled images. The first batch is random and the same for all, but for the "
        "last row, where it is chosen without a task.",
    ]
    for name in SETS:
        data = load(name)
        data = data.validation() if given.validation else data
        labels = [f"{data.batch * (i + 1):,}" for i in range(ROUNDS)]
        lines += ["", f"## {name}, a pool of {len(data.pool):,} images, {data.classes} classes", ""]
        lines += markdown_table(("", *labels, "mean"), rows(data, given.seeds))
    if given.validation:
        print("\n".join(lines))
    else:
        write_report("suggest", "Labels that are chosen, and random ones", lines)


if __name__ == "__main__":
    main()
