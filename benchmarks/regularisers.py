"""Which regularisers and which forms of the side network are worth it, on validation images.

    OMP_NUM_THREADS=1 python -m benchmarks.regularisers --seconds 500

Tasks train from the cached tokens of a real ViT-Ti/16 at 224 pixels: pets (592 training and 148
validation images), fashion (600 and 400) and, for side tasks, handwritten digits (600 and 400),
100 steps of 64 images, two seeds in each pass. Every row changes one thing. Forms of the side
network are compared with three other seeds, on textures, blood cells and leaves (400 and 200 each)
and the outlines of pets (300 and 100, mean IoU), too, and on textures with a DINOv2-small. No test
image is read. A finished pass is a line of results/regularisers.jsonl and never repeated; a process
that is stopped loses only the pass it was in. `--table` prints the tables. A pass takes one to four
minutes of one core.

What is not in the package is tried here by replacing parts of engram.methods.side for one pass.
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

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.paper.records import Record, Records
from benchmarks.paper.runs import datasets
from benchmarks.paths import ASSETS, DINOV2_SMALL, RESULTS, require_backbone
from benchmarks.report import markdown_table
from engram.backbones.load import load_backbone
from engram.data.datasets import Splits, load
from engram.data.folds import split_validation
from engram.methods import create_method, side
from engram.methods.method import Initial, TaskInput, TaskShape
from engram.model import MemoryViT
from engram.tasks.heads import TaskHead
from engram.train.features.feeds import CacheFeed, FeedPlan
from engram.train.loop.task_trainer import TaskTrainer
from engram.train.loop.training import Training
from engram.train.recipe import Recipe
from engram.train.runs.run import Run
from engram.util.processes import ProcessGroup
from engram.vit import ViT

RECORDS = Records(RESULTS / "regularisers.jsonl")
FOLDERS = ("textures", "bloodcells", "leaves")
DINOV2 = " on DINOv2-small"  # at the end of a set's name
SETS = {"masked": ("pets", "fashion"), "side": ("pets", "fashion", "digits")}
FORM_SETS = (*SETS["side"], *FOLDERS, "outlines", "textures" + DINOV2)
SEEDS, FORM_SEEDS = (0, 1), (2, 3, 4)
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
    """What a step reads and what its MLP adds is left out for one image in ten."""
    plain = side._SideGroup._attend_and_mlp

    def attend_and_mlp(self: Any, step: int, h: Tensor, tasks: slice | None) -> Tensor:
        new = plain(self, step, h, tasks)
        if not torch.is_grad_enabled():
            return new
        kept = (torch.rand(*h.shape[:2], 1, 1) > 0.1).to(h)
        return h + (new - h) * kept / 0.9

    return mock.patch.object(side._SideGroup, "_attend_and_mlp", attend_and_mlp)


def _every_second() -> Any:
    plain = side._SideGroup.step

    def one_step(self: Any, step: int, h: Tensor, *given: Any) -> Tensor:
        return h if step % 2 else plain(self, step, h, *given)

    return mock.patch.object(side._SideGroup, "step", one_step)


def _shared_projection() -> Any:
    """One P for all steps: the mean of those that the task has, of the same size as each."""
    plain = side._SideGroup.__init__

    def init(self: Any, tasks: Sequence[TaskInput]) -> None:
        plain(self, tasks)
        shared = torch.stack(self.project).mean(0) * len(self.project) ** 0.5
        self.project = (shared,) * len(self.project)

    return mock.patch.object(side._SideGroup, "__init__", init)


def _no_reading() -> Any:
    return mock.patch.object(side._SideGroup, "_attend", lambda self, y, *weights: 0 * y)


def _no_grid() -> Any:
    return mock.patch.object(side, "_GRID_SCALE", 0.0)


def _no_queries() -> Any:
    plain = side._SideGroup.pool

    def pool(self: Any, h: Tensor, grid: Tensor, route: None) -> Tensor:
        pooled = plain(self, h, grid, route)
        pooled[..., : side.QUERIES * self.rank] *= 0
        return pooled

    return mock.patch.object(side._SideGroup, "pool", pool)


def _replaced(*changes: tuple[type, str, Any]) -> ExitStack:
    patches = ExitStack()
    for owner, name, new in changes:
        patches.enter_context(mock.patch.object(owner, name, new))
    return patches


def _one_projection() -> Any:
    """One P for all steps, trained as such."""
    parameters, init = side.Side.parameters, side._SideGroup.__init__

    def own_parameters(self: side.Side, task: TaskShape) -> dict[str, Initial]:
        found = parameters(self, task)
        each = found["side.project"]
        return {**found, "side.project": replace(each, shape=each.shape[1:])}

    def own_init(self: Any, tasks: Sequence[TaskInput]) -> None:
        def repeated(task: TaskInput) -> TaskInput:
            one, steps = task.tensors["side.project"], len(task.tensors["cells"])
            project = one.expand(steps, *one.shape)
            return replace(task, tensors={**task.tensors, "side.project": project})

        init(self, [repeated(task) for task in tasks])

    return _replaced(
        (side.Side, "parameters", own_parameters), (side._SideGroup, "__init__", own_init)
    )


def _grid_alone() -> Any:
    """No queries, so that the head has no columns for what they pool."""
    parameters, features = side.Side.parameters, side.Side.features
    init = side._SideGroup.__init__

    def own_parameters(self: side.Side, task: TaskShape) -> dict[str, Initial]:
        found = parameters(self, task)
        return {name: one for name, one in found.items() if name != "side.queries"}

    def own_features(self: side.Side, task: TaskShape) -> int:
        return features(self, task) - (0 if task.per_pixel else side.QUERIES * self.rank)

    def own_init(self: Any, tasks: Sequence[TaskInput]) -> None:
        init(self, tasks)
        self.queries = None if tasks[0].per_pixel else ()  # whether there is something to pool

    def own_pool(self: Any, h: Tensor, grid: Tensor, route: None) -> Tensor:
        pooled = (grid.to(h) @ h).flatten(2)
        return side._GRID_SCALE * F.layer_norm(pooled, pooled.shape[-1:])

    return _replaced(
        (side.Side, "parameters", own_parameters),
        (side.Side, "features", own_features),
        (side._SideGroup, "__init__", own_init),
        (side._SideGroup, "pool", own_pool),
    )


def _simpler() -> Any:
    patches = ExitStack()
    patches.enter_context(_one_projection())
    patches.enter_context(_grid_alone())
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
    Row("no squares", "eight queries alone, no grid", SIDE, patch=_no_grid),
    Row("no reading", "nothing is read: neither mean nor cells", SIDE, patch=_no_reading),
    Row("no queries", "the grid alone", SIDE, patch=_no_queries),
    Row("rank 8", "rank 8", SIDE, settings={"rank": 8}),
    Row("rank 32", "rank 32", SIDE, settings={"rank": 32}),
    Row("second", "every second layer", SIDE, patch=_every_second),
    Row("shared", "one projection for all layers", SIDE, patch=_shared_projection),
)
AS_IT_IS = Row("form plain", "as it is: a projection a layer, queries and grid", SIDE)
FORMS = (
    Row("form simpler", "one projection for all layers, and the grid alone", SIDE, patch=_simpler),
    Row("form projection", "one projection for all layers", SIDE, patch=_one_projection),
    Row("form grid", "the grid alone", SIDE, patch=_grid_alone),
)
#: In the order of their worth.
QUEUE = [
    (name, regime, row)
    for rows in ((PLAIN,), SHAPES, REGULARISERS)
    for row in rows
    for regime in row.regimes
    for name in SETS[regime]
]
QUEUE += [
    (name, "side", row)
    for rows in ((AS_IT_IS, FORMS[0]), FORMS[1:])
    for name in FORM_SETS
    for row in rows
]


# A pass


def run(name: str, regime: str, row: Row) -> Record:
    """Train all seeds: validation accuracy and loss, averaged weights or not."""
    splits, model = _splits(name), MemoryViT(_backbone(name))
    recipe = BASE.but(**row.recipe)
    began = time.process_time()
    # All passes read the same cache, also those without a task that needs all of a row.
    with row.patch(), mock.patch.object(FeedPlan, "keeps", "all"):
        torch.manual_seed(0)
        every = []
        for seed in FORM_SEEDS if row in (AS_IT_IS, *FORMS) else SEEDS:
            called = f"task.{seed}"
            method = create_method(regime, dict(row.settings))
            model.add(splits.task_spec(called, method), seed=seed)
            every.append(TaskTrainer(model, called, recipe))
        training = Training(model, every, splits, recipe, Run(None, ProcessGroup()))
        training.prepare()
        training.begin("")
        training.go()
        last = _measured(training, every)
        for trainer in every:
            trainer.swap_average()
        averaged = _measured(training, every)
        for trainer in every:
            trainer.swap_average()
        training.end()
        kept = _measured(training, every)
    return {
        "kept": kept, "last": last, "averaged": averaged,
        "cpu_seconds": round(time.process_time() - began),
    }  # fmt: skip


def record_name(name: str, regime: str, row: Row) -> str:
    return f"{name} {regime} {row.name}"


def _measured(training: Training, trainers: Sequence[TaskTrainer]) -> list[list[float]]:
    training.measure(trainers)
    return [
        [
            round(100 * float(one.metrics["miou" if "miou" in one.metrics else "accuracy"]), 2),
            round(float(one.metrics["loss"]), 4),
        ]
        for one in trainers
    ]


def _backbone(name: str) -> ViT:
    if name.endswith(DINOV2):
        return load_backbone(DINOV2_SMALL)
    return datasets.backbone(224, raw=name in (*FOLDERS, "outlines"))


def _splits(name: str) -> Splits:
    name = name.removesuffix(DINOV2)
    if name in FOLDERS:
        found = load(ASSETS / "data" / name)
        train, val = split_validation(found["train"], 1 / 3, 0)
        return Splits(name, found.classes, train=train, val=val, augment="none")
    if name == "outlines":
        folders = f"{ASSETS / 'data' / 'pets'}::{ASSETS / 'data' / 'pets_masks'}"
        classes = ["pet", "background"]
        found = load(folders, kind="segmentation", classes=classes, values=[1, 2], ignore=3)
        order = np.random.default_rng(0).permutation(len(found["train"]))
        train, val = (found["train"].subset(part) for part in (order[:300], order[300:400]))
        return replace(found, train=train, val=val, augment="none")
    if name == "digits":
        whole = load("digits")["train"]
        order = np.random.default_rng(0).permutation(len(whole))
        train, val = whole.subset(order[:600]), whole.subset(order[600:1_000])
        return Splits(name, whole.classes, train=train, val=val, augment="none")
    found = datasets.splits(name, 224, 600)
    return found if name == "pets" else replace(found, val=found["val"].subset(range(400)))


# The tables


def tables() -> list[str]:
    return [*_regularisers_and_shapes(), *_forms()]


def _regularisers_and_shapes() -> list[str]:
    lines = []
    for title, regime, rows in (
        ("masked", "masked", REGULARISERS),
        ("side", "side", REGULARISERS),
        ("Shapes of the side network", "side", SHAPES),
    ):
        body = [
            [row.title, *(_cell(name, regime, row) for name in SETS[regime])]
            for row in (PLAIN, *rows)
            if regime in row.regimes
        ]
        if rows is REGULARISERS:
            last = [_cell(name, regime, PLAIN, "last") for name in SETS[regime]]
            body.append(["no averaged weights: the last ones", *last])
        lines += ["", f"## {title}", "", *markdown_table(["changed", *SETS[regime]], body)]
    return lines


def _forms() -> list[str]:
    """Accuracy as it is, and the difference of each seed to it, of all passes that have run."""
    body = []
    for row in (AS_IT_IS, *FORMS):
        cells = []
        for name in FORM_SETS:
            record = RECORDS.get(record_name(name, "side", row))
            plain = RECORDS.get(record_name(name, "side", AS_IT_IS))
            if record is None or plain is None:
                cells.append("not run")
                continue
            own, other = ([a for a, _ in one["kept"]] for one in (record, plain))
            each = " / ".join(f"{a - b:+.1f}" for a, b in zip(own, other, strict=True))
            cells.append(f"{statistics.fmean(own):.1f}" + ("" if row is AS_IT_IS else f" ({each})"))
        body.append([row.title, *cells])
    head = ["side network", *FORM_SETS]
    return ["", "## Forms of the side network, three seeds", "", *markdown_table(head, body)]


def _cell(name: str, regime: str, row: Row, which: str = "kept") -> str:
    """Accuracy and loss of both seeds; with the difference to nothing changed."""
    record = RECORDS.get(record_name(name, regime, row))
    plain = RECORDS.get(record_name(name, regime, PLAIN))
    if record is None:
        return "not run"
    accuracy, loss = (statistics.fmean(values) for values in zip(*record[which], strict=True))
    if plain is None or (row is PLAIN and which == "kept"):
        return f"{accuracy:.1f}, loss {loss:.2f}"
    gain = [a[0] - b[0] for a, b in zip(record[which], plain["kept"], strict=True)]
    each = " / ".join(f"{value:+.1f}" for value in gain)
    return f"{accuracy:.1f} ({each}), loss {loss:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.regularisers", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, help="start no pass after so many seconds")
    parser.add_argument("--table", action="store_true", help="only print the tables")
    given = parser.parse_args()
    began = time.monotonic()
    if not given.table:
        require_backbone()
        for name, regime, row in QUEUE:
            called = record_name(name, regime, row)
            if called in RECORDS:
                continue
            if name.endswith(DINOV2) and not DINOV2_SMALL.exists():
                continue
            if given.seconds and time.monotonic() - began > given.seconds:
                break
            RECORDS.append(called, run(name, regime, row))
            print(called, f"{time.monotonic() - began:.0f} s", flush=True)
    print("\n".join(tables()))


if __name__ == "__main__":
    main()
