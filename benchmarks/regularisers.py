"""Which regularisers and which shapes of side patches are worth it, on validation images.

    OMP_NUM_THREADS=1 python -m benchmarks.regularisers --seconds 500

Tasks train from the cached tokens of a real ViT-Ti/16 at 224 pixels: pets (592 training and 148
validation images) and fashion (600 and 400), 100 steps of 64 images, two seeds in each pass. Every
row changes one thing. No test image is read. A finished pass is a line of
results/regularisers.jsonl and never repeated; a process that is stopped loses only the pass it was
in. `--table` prints the tables. A pass takes one to four minutes of one core.

What is not in the package is tried here by replacing parts of engram.side for one pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.paper.records import Record, Records
from benchmarks.paper.runs import datasets
from benchmarks.paths import RESULTS, require_trunk
from benchmarks.report import markdown_table
from engram import side
from engram.data.datasets import Splits
from engram.model import MemoryViT
from engram.tasks.heads import TaskHead
from engram.tasks.settings import TaskSettings
from engram.train.cache_plan import CachePlan
from engram.train.feeds import CacheFeed
from engram.train.learner import Learner
from engram.train.recipe import Recipe
from engram.train.training import Training
from engram.util.processes import Team
from engram.util.progress import silent

RECORDS = Records(RESULTS / "regularisers.jsonl")
SETS = ("pets", "fashion")
SEEDS = (0, 1)
BASE = Recipe(steps=100, evaluations=5, workers=0)
BOTH, SIDE = ("masked", "side"), ("side",)

Patch = Callable[[], Any]  # a context in which a pass runs


# What is tried


def _in_training(change: Callable[[Tensor], Tensor]) -> Patch:
    """Change the cached tokens (b, tokens, D) of a batch, but not those of validation."""
    plain = CacheFeed.outputs

    def outputs(self: CacheFeed, inputs: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        changed = change(inputs.float()) if torch.is_grad_enabled() else inputs
        return plain(self, changed, tasks)

    return lambda: mock.patch.object(CacheFeed, "outputs", outputs)


def _noise(x: Tensor) -> Tensor:
    return x + 0.1 * x.std((0, 1)) * torch.randn_like(x)


def _scaled(x: Tensor) -> Tensor:
    """Every channel of an image times a factor around 1, the same for all of its tokens."""
    return x * (1 + 0.2 * torch.randn(len(x), 1, x.shape[-1]))


def _dropout() -> Any:
    """Of what the head sees."""
    plain = TaskHead.forward

    def forward(self: TaskHead, x: Tensor) -> Tensor:
        return plain(self, F.dropout(x, 0.3, torch.is_grad_enabled()))

    return mock.patch.object(TaskHead, "forward", forward)


def _drop_path() -> Any:
    """What a step reads and thinks is left out for one image in ten."""
    plain = side._Group._think

    def think(self: Any, step: int, h: Tensor, part: slice | None = None) -> Tensor:
        new = plain(self, step, h, part)
        if not torch.is_grad_enabled():
            return new
        kept = (torch.rand(*h.shape[:2], 1, 1) > 0.1).to(h)
        return h + (new - h) * kept / 0.9

    return mock.patch.object(side._Group, "_think", think)


def _every_second() -> Any:
    plain = side._Group.climb

    def climb(self: Any, step: int, h: Tensor, *given: Any) -> Tensor:
        return h if step % 2 else plain(self, step, h, *given)

    return mock.patch.object(side._Group, "climb", climb)


def _shared_projection() -> Any:
    """One P for all steps: the mean of those that the task has, of the same size as each."""
    plain = side._Group.__init__

    def init(self: Any, members: Sequence[side.Member]) -> None:
        plain(self, members)
        shared = torch.stack(self.project).mean(0) * len(self.project) ** 0.5
        self.project = [shared] * len(self.project)

    return mock.patch.object(side._Group, "__init__", init)


def _convolution() -> Any:
    """A depthwise 3 x 3 convolution over the patches and a map, in place of the attention.

    The kernels are the first nine columns of the query maps.
    """

    def init(self: Any, members: Sequence[side.Member]) -> None:
        plain_init(self, members)
        maps = torch.stack([member.side.attention for member in members], 1)  # (steps, t, 4, r, r)
        r = self.rank
        self.kernels = (maps[:, :, 0, :, :9] * r**0.5 / 3).unbind()
        self.mix = (maps[:, :, 3] * side._SHARE).unbind()

    def think(self: Any, step: int, h: Tensor, part: slice | None = None) -> Tensor:
        t, b, n, r = h.shape
        kernels, mix, up, down = (
            maps[step] if part is None else maps[step][part]
            for maps in (self.kernels, self.mix, self.up, self.down)
        )
        y = side._norm(h)
        grid = int((n - 1) ** 0.5)
        patches = y[:, :, 1:].transpose(2, 3).reshape(t, b, r, grid, grid)
        patches = patches.transpose(0, 1).reshape(b, t * r, grid, grid)
        seen = F.conv2d(patches, kernels.reshape(t * r, 1, 3, 3), padding=1, groups=t * r)
        seen = seen.view(b, t, r, n - 1).permute(1, 0, 3, 2)
        seen = torch.cat([y[:, :, :1], seen], 2)
        h = h + torch.bmm(seen.flatten(1, 2), mix).view_as(h)
        thought: Tensor = F.gelu(side._norm(h).flatten(1, 2) @ up)
        return h + torch.bmm(thought, down).view_as(h)

    plain_init = side._Group.__init__
    patches = ExitStack()
    patches.enter_context(mock.patch.object(side._Group, "__init__", init))
    patches.enter_context(mock.patch.object(side._Group, "_think", think))
    return patches


@dataclass(frozen=True)
class Row:
    """One thing that is changed."""

    name: str
    title: str
    regimes: tuple[str, ...] = BOTH
    recipe: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    patch: Patch = ExitStack


PLAIN = Row("plain", "nothing")
REGULARISERS = (
    Row("scaling", "channels scaled by N(1, 0.2²)", patch=_in_training(_scaled)),
    Row("dropout", "dropout of 30 % before the head", patch=_dropout),
    Row("mixup", "mixup 0.2", recipe={"mixup": 0.2}),
    Row("smoothing", "label smoothing 0.1", recipe={"label_smoothing": 0.1}),
    Row("noise", "feature noise of 0.1 deviations", patch=_in_training(_noise)),
    Row("decay", "weight decay 0.1", recipe={"weight_decay": 0.1}),
    Row("drop-path", "drop-path of 10 %", SIDE, patch=_drop_path),
)
SHAPES = (
    Row("rank 8", "rank 8", SIDE, settings={"rank": 8}),
    Row("rank 32", "rank 32", SIDE, settings={"rank": 32}),
    Row("convolution", "3 x 3 convolution, no attention", SIDE, patch=_convolution),
    Row("second", "every second layer", SIDE, patch=_every_second),
    Row("shared", "one projection for all layers", SIDE, patch=_shared_projection),
)
#: In the order of their worth.
QUEUE = [
    (name, row)
    for rows in ((PLAIN,), REGULARISERS[:4], SHAPES[:4], REGULARISERS[4:], SHAPES[4:])
    for row in rows
    for name in SETS
]


# A pass


def run(name: str, row: Row) -> Record:
    """Train both seeds of every regime: validation accuracy and loss, averaged weights or not."""
    splits, model = _splits(name), MemoryViT(datasets.trunk(224))
    recipe = BASE.but(**row.recipe)
    learners = {}
    for regime in row.regimes:
        for seed in SEEDS:
            called = f"{regime.replace('+', '-')}.{seed}"
            spec = splits.task_spec(called, TaskSettings(regime=regime, **row.settings))
            model.add(spec, seed=seed)
            learners[regime, seed] = Learner(model, called, recipe)
    began = time.process_time()
    # All passes read the same cache, also those without a task that needs all of a row.
    with row.patch(), mock.patch.object(CachePlan, "keeps", "all"):
        torch.manual_seed(0)
        every = list(learners.values())
        training = Training(model, every, splits, recipe, None, Team(), silent)
        training.prepare()
        training.begin("")
        training.go()
        last = _measured(training, every)
        for learner in every:
            learner.swap_average()
        averaged = _measured(training, every)
        for learner in every:
            learner.swap_average()
        training.end()
        kept = _measured(training, every)
    scores = {
        f"{regime}.{seed}": {"kept": k, "last": b, "averaged": a}
        for (regime, seed), k, b, a in zip(learners, kept, last, averaged, strict=True)
    }
    return {
        "set": name, "row": row.name, "scores": scores,
        "cpu_seconds": round(time.process_time() - began),
    }  # fmt: skip


def _measured(training: Training, learners: Sequence[Learner]) -> list[list[float]]:
    training.measure(learners)
    return [
        [round(100 * float(one.metrics["accuracy"]), 2), round(float(one.metrics["loss"]), 4)]
        for one in learners
    ]


def _splits(name: str) -> Splits:
    found = datasets.splits(name, 224, 600)
    if name != "fashion":
        return found
    return replace(found, val=found["val"].subset(range(400)))


# The tables


def tables() -> list[str]:
    lines = []
    for title, rows in (("Regularisers", REGULARISERS), ("Shapes", SHAPES)):
        regimes = BOTH if rows is REGULARISERS else SIDE
        columns = [f"{regime}, {name}" for regime in regimes for name in SETS]
        body = [
            [row.title, *(_cell(name, row, regime) for regime in regimes for name in SETS)]
            for row in (PLAIN, *rows)
        ]
        lines += ["", f"## {title}", "", *markdown_table(["changed", *columns], body)]
        if rows is REGULARISERS:
            body = [
                [f"nothing; {words}", *(_cell(n, PLAIN, r, which) for r in regimes for n in SETS)]
                for which, words in (("last", "last weights"), ("averaged", "last average"))
            ]
            lines += [f"| {' | '.join(line)} |" for line in body]
    return lines


def _cell(name: str, row: Row, regime: str, which: str = "kept") -> str:
    """Accuracy and loss of both seeds; with the difference to nothing changed."""
    if regime not in row.regimes:
        return "–"
    found = _scores(name, row, regime, which)
    if found is None:
        return "not run"
    accuracy, loss = (statistics.fmean(values) for values in zip(*found, strict=True))
    plain = _scores(name, PLAIN, regime, "kept")
    if plain is None or (row is PLAIN and which == "kept"):
        return f"{accuracy:.1f}, loss {loss:.2f}"
    gain = [a[0] - b[0] for a, b in zip(found, plain, strict=True)]
    each = " / ".join(f"{value:+.1f}" for value in gain)
    return f"{accuracy:.1f} ({each}), loss {loss:.2f}"


def _scores(name: str, row: Row, regime: str, which: str) -> list[list[float]] | None:
    record = RECORDS.get(f"{name} {row.name}")
    if record is None:
        return None
    return [record["scores"][f"{regime}.{seed}"][which] for seed in SEEDS]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.regularisers", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, help="start no pass after so many seconds")
    parser.add_argument("--table", action="store_true", help="only print the tables")
    given = parser.parse_args()
    began = time.monotonic()
    if not given.table:
        require_trunk()
        for name, row in QUEUE:
            if f"{name} {row.name}" in RECORDS:
                continue
            if given.seconds and time.monotonic() - began > given.seconds:
                break
            RECORDS.append(f"{name} {row.name}", run(name, row))
            print(name, row.name, f"{time.monotonic() - began:.0f} s", flush=True)
    print("\n".join(tables()))


if __name__ == "__main__":
    main()
