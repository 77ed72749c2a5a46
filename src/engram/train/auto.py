"""`fit --regime auto`: try the regimes that leave the backbone alone, keep what validation likes
best.

One pass of the backbone over the images, then all from the cache:

    solved    a linear head, and a readout of every layer: seconds, by `solve`
    trained   masked, masked+adapter and side, at several learning rates, together in one pass;
              after a sixth of the steps the best three go on, after two fifths the best two
    averaged  a side task with the solved head or readout, as one task: their mean output is again
              linear, so it costs nothing more

The best on validation is kept. Where two differ by less than noise, it is the smaller file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engram.data.datasets import Splits, load
from engram.data.python_data import PythonData
from engram.errors import EngramError
from engram.methods import METHODS, Head, Masked, MaskedAdapter, Readout, Side, SideReadout
from engram.model import MemoryViT
from engram.store.engram import Engram
from engram.tasks.kinds import KINDS, Kind
from engram.tasks.spec import TaskSpec
from engram.tasks.task_settings import TaskSettings
from engram.train.calibrate import metrics_on_test
from engram.train.callbacks import Callback, Callbacks
from engram.train.choice import best_of, smallest_of
from engram.train.fit import ending_of, training_record
from engram.train.halving import SuccessiveHalving
from engram.train.identity import identity_of
from engram.train.learner import TaskTrainer
from engram.train.recipe import Recipe
from engram.train.recipe_file import settings_of
from engram.train.result import Ending, RunResult
from engram.train.run import Run
from engram.train.solve import PLAIN, Seen, Solution, Solver
from engram.train.trackers import run_callbacks
from engram.train.training import Training
from engram.util.flag_names import flag
from engram.util.processes import ProcessGroup
from engram.util.progress import Progress, silent

#: The regimes that are trained, with the learning rates that are tried.
RATES: Mapping[str, tuple[float, ...]] = {
    Masked.name: (5e-4, 2e-3),
    MaskedAdapter.name: (5e-4,),
    Side.name: (1e-3, 3e-3),
}
#: Of the recipe's epochs, which are meant for one task; but not fewer steps than `_STEPS`.
_EPOCHS, _STEPS = 1 / 3, 300
_EVALUATIONS, _AVERAGE = 12, 0.98


@dataclass(frozen=True)
class Tried:
    """One task that was tried, and how good it was when it was last measured."""

    regime: str
    lr: float  # 0: it was solved; of an average, that of its trained half
    parameters: int
    score: float
    how: str  # trained, solved or averaged
    epochs: float = 0.0  # of training, until it was dropped or done
    kept: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, repr=False)
class AutoResult(RunResult):
    """The result of `auto`: all that was tried, and the learning curve of what was trained."""

    tried: tuple[Tried, ...]
    history: Sequence[Mapping[str, float]]
    measured_by: str = "accuracy"  # the metric that chose

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "tried": [one.to_dict() for one in self.tried]}

    def table(self, kind: Kind) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
        """What was tried, the best first: columns and rows, for people."""
        score = kind.metric_title(self.measured_by)
        columns = ("tried", "lr", "epochs", "parameters", f"validation {score}", "")
        tried = sorted(self.tried, key=lambda one: (-one.score, one.parameters))
        return columns, tuple(
            (
                one.regime,
                f"{one.lr:g}" if one.lr else "",
                f"{one.epochs:g}" if one.epochs else one.how,
                f"{one.parameters:,}",
                kind.shown(one.score),
                "kept" if one.kept else "",
            )
            for one in tried
        )


def auto(
    model: MemoryViT,
    name: str,
    data: str | os.PathLike[str] | Splits | PythonData,
    recipe: Recipe | None = None,
    *,
    kind: str = "classification",
    extends: Sequence[str] = (),
    class_init: str = "backbone",
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    test: bool = False,
    team: ProcessGroup | None = None,
    progress: Progress = silent,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> AutoResult:
    """Try the regimes that leave the backbone alone, and add the best as a task `name` to the
    model.

    Args:
        model: The model; the best task is attached to it.
        name: The name of the new task.
        data: A path, a name or a dataset as `engram.data.load` takes it, or what that returned.
        recipe: The training settings that all share. A learning rate in it is the only one tried.
        kind: The kind of task, unless `data` is what `engram.data.load` returned.
        extends: Names of attached tasks that the new task reads; they decide what can be tried.
        class_init: Where class tokens start: `backbone` or `random`.
        out: The engram to write.
        resume: Continue an interrupted run.
        overwrite: Replace an existing engram, or give up an interrupted run.
        test: Evaluate the test split once, with the best.
        team: The processes that share the work. By default those of torchrun.
        progress: Called as progress(what, done, total, note) while work goes on.
        callbacks: Told how the run goes; see `engram.Callback`.
        **settings: Settings of the methods that are tried, such as `cells`, `rank` or
            `adapter_width`.

    Returns:
        All that was tried with its score, the metrics of the best and the path of its engram.

    Raises:
        EngramError: A setting makes no sense, the data does not fit, or the file exists.
        Interrupted: The run was stopped by Ctrl-C or SIGTERM, after a checkpoint.

    Examples:
        >>> result = engram.auto(model, "plants", "photos", engram.Recipe(epochs=3))
        >>> result.regime in ("head", "readout", "masked", "masked+adapter", "side", "side+readout")
        True
    """
    began = time.perf_counter()
    recipe, team = recipe or Recipe(), team or ProcessGroup()
    whole = data if isinstance(data, Splits) else load(data, kind=kind)
    splits = whole.with_validation(recipe.val_share, recipe.data_seed)
    if test:
        splits["test"]  # whether there is one should show now, not after an hour
    task = TaskSettings("masked", tuple(extends), class_init, settings)
    shorter = shorter_recipe(recipe, len(splits["train"]))
    portfolio = Portfolio(model, name, splits, shorter, task, team, test)
    run = None if out is None else Run(Path(out), team, overwrite, resume, model.backbone.source)
    about = settings_of(model, splits, task, recipe)
    told = run_callbacks(callbacks, name, splits, {**about, "regime": "auto"}, run, team)
    with run or contextlib.nullcontext(), told:
        finished = None if run is None else run.finished(portfolio.identity)
        if run is not None and finished is not None:
            model.attach(run.out)
            return _result(model, name, run, finished)
        engram, chosen, tried, training = portfolio.best(run, progress, told)
        model.attach(engram)
        found = {"val": chosen.metrics}
        if test:
            found["test"] = metrics_on_test(
                model, name, splits, found["val"],
                workers=recipe.workers, team=team, progress=progress,
            )  # fmt: skip
        result = {
            "seconds": time.perf_counter() - began,
            "metrics": found,
            "unreadable": training.unreadable,
            "history": training.history,
            "tried": [one.to_dict() for one in tried],
            "ending": chosen.ending and asdict(chosen.ending),
            "measured_by": portfolio.measured_by,
        }
        if run is not None and team.main:
            record = training_record(portfolio.recipe, splits, chosen.lr, chosen.ending)
            model.save(name, run.out, metrics=found, recipe=record)
            run.finish(portfolio.identity, engram.content, result, training.history)
        done = _result(model, name, run, result)
        told.finished(done)
    return done


def shorter_recipe(recipe: Recipe, images: int) -> Recipe:
    """The recipe for many tasks at once: fewer steps, averaged weights, the best ones kept.

    A task that is dropped has a high learning rate. Its averaged weights are as good as if the
    rate had come down, so validation compares what the rates will lead to.
    """
    whole = recipe.epochs * -(-images // recipe.batch)
    steps = recipe.steps or max(round(_EPOCHS * whole), min(_STEPS, whole))
    evaluations = max(recipe.evaluations, _EVALUATIONS)
    return recipe.but(
        steps=steps,
        ema=recipe.ema or _AVERAGE,
        evaluations=evaluations,
        patience=recipe.patience or evaluations,
    )


def _result(model: MemoryViT, name: str, run: Run | None, result: Mapping[str, Any]) -> AutoResult:
    engram = model.eval().engram(name)
    tried = tuple(Tried(**one) for one in result["tried"])
    return AutoResult(
        task=name,
        regime=engram.spec.regime,
        parameters=engram.parameters,
        path=None if run is None else run.out,
        **{**result, "tried": tried, "ending": ending_of(result)},
    )


@dataclass(frozen=True, eq=False)
class Candidate:
    """A task of the portfolio's model, as it was last measured."""

    name: str
    metrics: dict[str, Any]
    how: str
    lr: float = 0.0
    epochs: float = 0.0
    ending: Ending | None = None


def trained_regimes(model: MemoryViT, splits: Splits, extends: Sequence[str]) -> list[str]:
    """What can be trained on this data: a child is of its parents' family."""
    if extends:
        family = model.task(extends[0]).method.family()
        found = [regime for regime in RATES if METHODS[regime].family() is family]
        return found or list(RATES)  # the model refuses such a parent
    return [*RATES, Head.name] if KINDS[splits.kind].per_pixel else list(RATES)


class Portfolio:
    """The tasks that are tried for one dataset, on a model of their own with the same parents."""

    def __init__(
        self,
        model: MemoryViT,
        name: str,
        splits: Splits,
        recipe: Recipe,
        settings: TaskSettings,
        team: ProcessGroup,
        test: bool = False,
    ) -> None:
        self.name, self.splits, self.recipe, self.team = name, splits, recipe, team
        self.settings, self.kind = settings, KINDS[splits.kind]
        recipe.check_for(self.kind)
        self.measured_by = self.kind.score_with(recipe.balance)
        self.solves = not settings.extends and not self.kind.per_pixel
        regimes = trained_regimes(model, splits, settings.extends)
        self._check_settings(regimes)
        model.check(self._spec(name, regimes[0]))
        self.model = MemoryViT(model.backbone)
        for parent in model.tasks if settings.extends else ():
            self.model.attach(model.engram(parent))
        self.learners = []
        for regime, lr in ((r, lr) for r in regimes for lr in self._rates(r)):
            called = self._add(regime)
            self.learners.append(TaskTrainer(self.model, called, recipe, lr))
        tasks = [(one.task.spec, one.lr, one.weight_decay) for one in self.learners]
        self.identity = f"{identity_of(self.model, tasks, splits, recipe)} auto test={test}"

    def _rates(self, regime: str) -> tuple[float, ...]:
        if self.recipe.lr:
            return (self.recipe.lr,)
        sgd = self.recipe.optimizer == "sgd"
        return (0.0,) if sgd else RATES.get(regime, (0.0,))  # 0: what suits the regime

    def _add(self, regime: str, seen: Seen = PLAIN) -> str:
        """Add an untrained task, with a name that no parent has."""
        numbers = itertools.count(len(self.model.tasks))
        called = next(name for n in numbers if (name := f"tried-{n}") not in self.model.tasks)
        spec = self._spec(called, regime)
        if "layers" in spec.method.setting_names():
            spec = replace(spec, method=replace(spec.method, **seen._asdict()))
        self.model.add(spec, class_init=self.settings.class_init, seed=self.recipe.seed)
        return called

    def _spec(self, called: str, regime: str) -> TaskSpec:
        method = self.settings.method(regime, lenient=True)
        return self.splits.task_spec(called, method, self.settings.extends)

    def _check_settings(self, regimes: Sequence[str]) -> None:
        """Refuse a setting that none of the methods has."""
        known = {name for regime in regimes for name in METHODS[regime].setting_names()}
        for name in self.settings.method_settings:
            if name not in known:
                raise EngramError(
                    f"{flag(name)} is a setting of none of the regimes that are tried here "
                    f"({', '.join(regimes)}); leave it out, or choose one regime."
                )

    # The work

    def best(
        self, run: Run | None, progress: Progress, callbacks: Callbacks
    ) -> tuple[Engram, Candidate, list[Tried], Training]:
        """The best engram, what it was, all that was tried, and the training."""
        training = SuccessiveHalving(
            self.model, self.learners, self.splits, self.recipe, run, self.team, progress, callbacks
        )
        training.prepare()
        training.begin(self.identity)
        solved = self._solved(training, progress) if self.solves else []
        training.go()
        training.end()
        trained = []
        for one in self.learners:
            metrics = training.dropped.get(one.name, one.metrics)
            epochs = training.dropped_at.get(one.name, training.epochs)
            trained.append(Candidate(one.name, metrics, "trained", one.lr, epochs, one.ending))
        others = [Candidate(called, solution.metrics, "solved") for called, solution in solved]
        for learner in training.learners:
            if solved and isinstance(learner.task.method, Side):
                others.append(self._averaged(training, learner, solved))
        finished = [one for one in trained if one.name not in training.dropped] + others
        sizes = [self._size(one) for one in finished]
        chosen = finished[smallest_of(self.measured_by, [one.metrics for one in finished], sizes)]
        tried = [
            Tried(
                regime=self.model.task(one.name).spec.regime,
                lr=one.lr,
                parameters=self._size(one),
                score=float(one.metrics[self.measured_by]),
                how=one.how,
                epochs=one.epochs,
                kept=one is chosen,
            )
            for one in (*trained, *others)
        ]
        learner = TaskTrainer(self.model, chosen.name, self.recipe)
        learner.metrics = chosen.metrics
        training.complete([learner])
        chosen = replace(chosen, metrics=learner.metrics)
        return self.model.engram(chosen.name).renamed(self.name), chosen, tried, training

    def _size(self, one: Candidate) -> int:
        return self.model.engram(one.name).parameters

    def _solved(self, training: Training, progress: Progress) -> list[tuple[str, Solution]]:
        """The best plain head and the best readout, as tasks of the model."""
        progress("solving", 0, 2, "")
        task = self.model.task(self._add(Head.name))
        self.kind.prepare(task.head, self.splits["train"].labels)
        labels = self.splits["train"].labels
        solver = Solver(training.feed, self.model.backbone, task, self.team, self.recipe, labels)
        found = []
        for regime, choices in ((Head.name, (PLAIN,)), (Readout.name, solver.choices)):
            solution = solver.best(choices)
            called = self._add(regime, solution.seen)
            solution.put_into(self.model.task(called))
            found.append((called, solution))
            progress("solving", len(found), 2, "")
        return found

    def _averaged(
        self, training: Training, side: TaskTrainer, solved: Sequence[tuple[str, Solution]]
    ) -> Candidate:
        """The best average of a side task with a solved one."""
        made = []
        for _, solution in solved:
            regime = SideReadout.name if solution.seen.layers else Side.name
            average = self._add(regime, solution.seen)
            _average(self.model, average, side.name, solution)
            learner = TaskTrainer(self.model, average, self.recipe)
            training.measure([learner])
            made.append(
                Candidate(average, learner.metrics, "averaged", side.lr, ending=side.ending)
            )
        return made[best_of(self.measured_by, [one.metrics for one in made])]


def _average(model: MemoryViT, called: str, side: str, solution: Solution) -> None:
    """Fill a task with a side and a solved head: its output is the mean of both."""
    task, own = model.task(called), model.task(side)
    width, seen = model.backbone.config.width, solution.weight.shape[1]
    with torch.no_grad():
        for name, value in own.input().tensors.items():
            task.get_parameter(name).copy_(value)
        task.head.weight.zero_()
        task.head.weight[:, :seen] += solution.weight / 2
        task.head.weight[:, :width] += own.head.weight[:, :width] / 2
        task.head.weight[:, seen:] += own.head.weight[:, width:] / 2
        task.head.bias.copy_((solution.bias + own.head.bias) / 2)
    for name, value in task.head.fitted.items():
        value.copy_(own.head.fitted[name])
