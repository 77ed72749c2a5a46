"""`fit --regime auto`: try the regimes that leave the backbone alone, and keep the best.

One pass of the backbone over the images, then all from the cache:

    solved    a linear head, and a readout of every layer: seconds, by `solve`
    trained   masked, masked+adapter and side: short trainings at several learning rates, together
              in one pass, then a whole one of the best (`screening.py`)
    averaged  each of these with the readout, as one task: their mean output is again linear, so
              it costs nothing more

In cross-validation each of these is a task for every fold and one for all images, which is what is
kept (`validation.py`). The best has the lowest loss among those that tie for the highest score.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engram.data.datasets import Splits, load
from engram.data.python_data import PythonData
from engram.errors import EngramError, Interrupted, flag
from engram.inference.evaluate import Answers
from engram.methods import (
    METHODS,
    Head,
    Masked,
    MaskedAdapter,
    MaskedAdapterReadout,
    MaskedReadout,
    Readout,
    Side,
    SideReadout,
)
from engram.methods.method_flags import DEFAULT_REGIME
from engram.methods.readout import WithStatistics
from engram.model import MemoryViT
from engram.store.engram import Engram
from engram.tasks.kind import Kind
from engram.tasks.kinds import KINDS
from engram.tasks.spec import TaskSpec
from engram.tasks.task import Task
from engram.tasks.task_settings import TaskSettings
from engram.train.fit import training_record
from engram.train.heads.columns import Reads, whole_readout
from engram.train.heads.solve import Solution, Solver
from engram.train.loop.task_trainer import TaskTrainer, fold_trainers
from engram.train.loop.training import Training
from engram.train.loop.validation import best_of, ties, with_held_out
from engram.train.recipe import Recipe
from engram.train.runs.callbacks import Callback
from engram.train.runs.identity import identity_of
from engram.train.runs.result import Result, Tried
from engram.train.runs.run import Run
from engram.train.runs.trackers import run_callbacks, settings_of
from engram.train.search.own_pass import best_own_pass, check_own_pass, suggestion
from engram.train.search.screening import Screening, Trial
from engram.train.search.variants import SweepRunner, Trained, Variant
from engram.util.processes import ProcessGroup
from engram.util.progress import Progress, silent
from engram.util.text import duration


class Rates(NamedTuple):
    """Learning rates of a regime: those that are always tried, and further ones.

    A further one is tried where the rate next to it is the best so far.
    """

    first: tuple[float, ...]
    further: tuple[float, ...] = ()


#: The regimes that are trained. For `side` the cache keeps all that the solved readout reads, too.
RATES: Mapping[str, Rates] = {
    Masked.name: Rates((5e-4, 2e-3, 8e-3), (1e-4, 3e-2)),
    MaskedAdapter.name: Rates((5e-4, 2e-3), (1e-4, 8e-3, 3e-2)),
    Side.name: Rates((1e-3, 3e-3, 1e-2), (3e-4, 3e-2)),
}
#: What is made of a trained task of such a regime and the solved readout.
WITH_READOUT: Mapping[str, type[WithStatistics]] = {
    Masked.name: MaskedReadout,
    MaskedAdapter.name: MaskedAdapterReadout,
    Side.name: SideReadout,
}
#: Of the recipe's epochs, which are meant for one task; but not fewer steps than `_STEPS`.
_EPOCHS, _STEPS = 1 / 6, 150
_EVALUATIONS, _AVERAGE = 12, 0.98


@dataclass(frozen=True, kw_only=True, repr=False)
class AutoResult(Result):
    """The result of `auto`: all that was tried, and the learning curve of what was trained."""

    tried: tuple[Tried, ...]
    own_pass: str = ""  # what was found with `own_pass`, or that there is such a thing

    @classmethod
    def recorded(cls, engram: Engram, path: Path, record: Mapping[str, Any]) -> AutoResult:
        tried = tuple(Tried(**one) for one in record["tried"])
        return super().recorded(engram, path, {**record, "tried": tried})

    def to_dict(self) -> dict[str, Any]:
        tried = [asdict(one) for one in self.tried]
        return {**super().to_dict(), "tried": tried, "own_pass": self.own_pass}

    def table(self, kind: Kind) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
        """Columns and rows of a table of the trials, the best first and short trainings last."""
        metric = kind.metric_title(self.tried[0].metric)
        columns = ("tried", "lr", "epochs", "parameters", f"validation {metric}", "")
        tried = sorted(self.tried, key=lambda one: (one.dropped, -one.value, one.parameters))
        return columns, tuple(
            (
                one.regime,
                f"{one.lr:g}" if one.lr else "",
                f"{one.epochs:g}" if one.epochs else one.how,
                f"{one.parameters:,}",
                kind.shown(one.value),
                _remark(one),
            )
            for one in tried
        )


def _remark(one: Tried) -> str:
    """Whether a row was kept and why, is a tie, or is of a short training."""
    if one.own_pass:
        return "kept: own pass" if one.kept else "own pass"
    if one.kept:
        return "kept: lowest loss of the ties" if one.tied else "kept"
    return "tie" if one.tied else f"short, on {one.images:,} images" if one.dropped else ""


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
    processes: ProcessGroup | None = None,
    progress: Progress = silent,
    callbacks: Sequence[Callback] = (),
    own_pass: bool = False,
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
        processes: Those that share the work. By default those of torchrun.
        progress: Called as progress(what, done, total, note) while work goes on.
        callbacks: Told how the run goes; see `engram.Callback`.
        own_pass: Try `memory`, `adapter` and `full` as well, which change the backbone's tokens and
            take longer. One of them is kept where it is clearly better.
        **settings: Settings of the methods that are tried, such as `cells`, `rank` or
            `adapter_width`.

    Returns:
        All that was tried with its score, the metrics of the best and the path of its engram.

    Raises:
        EngramError: A setting makes no sense, the data does not fit, or the file exists.
        Interrupted: The run was stopped by Ctrl-C or SIGTERM, after a checkpoint. After Ctrl-C and
            a first answer, `out` has the best engram so far, and the exception's `result` is that.

    Examples:
        >>> result = engram.auto(model, "plants", "photos", engram.Recipe(epochs=3))
        >>> result.regime in engram.methods.METHODS
        True
    """
    recipe = recipe or Recipe()
    run = Run(out, processes or ProcessGroup(), overwrite, resume, test, progress)
    whole = data if isinstance(data, Splits) else load(data, kind=kind)
    splits = with_held_out(whole, recipe, not KINDS[whole.kind].per_pixel, test)
    task = TaskSettings(DEFAULT_REGIME, tuple(extends), class_init, settings)
    runner = SweepRunner(model, name, splits, recipe, task, run)
    shorter = replace(runner, recipe=shorter_recipe(recipe, len(splits["train"])))
    portfolio = Portfolio(shorter)
    identity = f"{portfolio.identity} auto test={test}{' own-pass' if own_pass else ''}"
    if own_pass:
        check_own_pass(runner)
    about = settings_of(model, splits, task, recipe)
    about |= {"regime": "auto", **({"own_pass": True} if own_pass else {})}
    run.callbacks = run_callbacks(callbacks, name, splits, about, run)
    with run:
        if found := run.finished(identity, AutoResult):
            model.attach(found[1])
            model.eval()
            return found[0]
        kept, final, tried, training = portfolio.best()
        answers: Answers | None = training.held_out(final, name)
        own_pass_told = suggestion(kept.metrics)
        if own_pass and not run.stopped_at:
            try:
                own = best_own_pass(runner, final)
            except Interrupted as error:
                if error.result is None:
                    raise
                run.stopped_at = "a regime with a pass of its own"
            else:
                own_pass_told, tried = own.told, [*tried, *own.tried]
                if own.kept is not None:
                    tried = [replace(one, kept=one.kept and one.own_pass) for one in tried]
                    kept, answers = own.kept, None
        result = AutoResult.create(
            kept.engram, metrics={"val": kept.metrics}, unreadable=training.unreadable,
            history=training.history, tried=tuple(tried), ending=kept.ending,
            own_pass=own_pass_told, answers=answers,
        )  # fmt: skip
        record = training_record(portfolio.recipe, splits, kept.variant.recipe.lr, kept.ending)
        return runner.end(kept.engram, result, record)


def shorter_recipe(recipe: Recipe, images: int) -> Recipe:
    """The recipe for many tasks at once: fewer steps, averaged weights, the best ones kept.

    A scout ends while its learning rate is high. Its averaged weights are as good as if the rate
    had come down, so validation compares what the rates will lead to.
    """
    whole = recipe.epochs * recipe.per_epoch(images)
    steps = recipe.steps or max(round(_EPOCHS * whole), min(_STEPS, whole))
    evaluations = max(recipe.evaluations, _EVALUATIONS)
    return recipe.but(
        steps=steps,
        ema=recipe.ema or _AVERAGE,
        evaluations=evaluations,
        patience=recipe.patience or evaluations,
    )


def trained_regimes(model: MemoryViT, splits: Splits, extends: Sequence[str]) -> list[str]:
    """Regimes that can be trained on this data: a child is of its parents' family."""
    if extends:
        family = model.task(extends[0]).method.family()
        found = [regime for regime in RATES if METHODS[regime].family() is family]
        return found or list(RATES)  # the model refuses such a parent
    return [*RATES, Head.name] if KINDS[splits.kind].per_pixel else list(RATES)


class Portfolio:
    """The tasks that are tried for one dataset, on a model of their own with the same parents."""

    def __init__(self, runner: SweepRunner) -> None:
        self.name, self.splits, self.recipe = runner.name, runner.splits, runner.recipe
        self.settings, self.run = runner.task, runner.run
        self.kind = KINDS[self.splits.kind]
        self.recipe.check_for(self.kind)
        self.measured_by = self.kind.score_with(self.recipe.balance)
        self.solves = not self.settings.extends and not self.kind.per_pixel
        regimes = trained_regimes(runner.model, self.splits, self.settings.extends)
        self._check_settings(regimes)
        runner.model.check(self._spec(self.name, regimes[0]))
        self.model = runner.scratch()
        self.finished: list[Trial] = []  # what the choice was made from
        self.trials = [trial for regime in regimes for trial in self._trials(regime)]
        trainers = [trainer for trial in self.trials for trainer in trial.trainers]
        tasks = [(one.task.spec, one.lr, self.recipe.weight_decay) for one in trainers]
        self.identity = identity_of(self.model, tasks, self.splits, self.recipe)

    def _trials(self, regime: str) -> list[Trial]:
        """Trials of a regime at all rates, in their order, with their scouts."""
        rates = RATES.get(regime, Rates((0.0,)))  # 0: what suits the regime
        if self.recipe.lr or self.recipe.optimizer == "sgd":
            rates = Rates((self.recipe.lr,))
        trials = []
        for lr in sorted(rates.first + rates.further):
            trainers = self._trainers(regime, lr=lr)
            scout = TaskTrainer(self.model, self._add(regime), self._recipe(lr))
            scout.fold = None if self.splits.folds is None else 0
            trials.append(Trial(trainers, scout, waits=lr in rates.further))
        return trials

    def _trainers(self, regime: str, reads: Reads = None, lr: float = 0.0) -> list[TaskTrainer]:
        """Untrained tasks of one candidate: one for every fold, and one for all images."""
        folds = self.splits.folds
        names = [self._add(regime, reads) for _ in range(1 if folds is None else folds.count + 1)]
        return fold_trainers(self.model, names, self._recipe(lr))

    def _recipe(self, lr: float) -> Recipe:
        return self.recipe.but(lr=lr or self.recipe.lr)

    def _add(self, regime: str, reads: Reads = None) -> str:
        """Add an untrained task, with a name that no parent has."""
        numbers = itertools.count(len(self.model.tasks))
        called = next(name for n in numbers if (name := f"tried-{n}") not in self.model.tasks)
        spec = self._spec(called, regime)
        if reads is not None:
            spec = replace(spec, method=replace(spec.method, **reads.settings()))
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

    def best(self) -> tuple[Trained, TaskTrainer, list[Tried], Training]:
        """The best task, also as it was measured, all that was tried, and the training."""
        training = Screening(self.model, self.trials, self.splits, self.recipe, self.run)
        training.prepare()
        training.begin(self.run.identity)
        solved = self._solved(training) if self.solves else []
        training.to_beat = max((self._score(one) for one in solved), default=-math.inf)
        training.go(lambda: self._say(solved, training))
        training.checkpoint()  # what follows may take long, and is done again after a crash
        training.end()
        trained = [one for one in self.trials if one.metrics]  # others waited to the end
        left = [one for one in trained if not one.dropped]
        others = [*solved, *self._averaged(training, left, solved)]
        self.finished = finished = [*left, *others]
        measured = [one.metrics for one in finished]
        chosen = finished[best_of(self.measured_by, measured)]
        tied = [finished[i] for i in ties(self.measured_by, measured)]
        tried = [
            Tried.create(
                self.model.engram(one.final.name), self.measured_by, one.metrics,
                lr=one.lr, how=one.how, epochs=one.epochs, dropped=one.dropped,
                kept=one is chosen, tied=one in tied and len(tied) > 1,
            )
            for one in (*trained, *others)
        ]  # fmt: skip
        rivals = [one.final.held_out for one in finished]
        solutions = [one.solution for one in finished if one.solution is not None]
        rivals += [setting.answers for solution in solutions for setting in solution.tried]
        final = chosen.final
        final.metrics = chosen.metrics
        training.complete(chosen.trainers, rivals)
        engram = self.model.engram(final.name).renamed(self.name)
        variant = Variant(self.settings, self.recipe.but(lr=chosen.lr))
        return Trained(variant, final.metrics, engram, final.ending), final, tried, training

    def _solved(self, training: Training) -> list[Trial]:
        """The best plain head and the best readout, as tasks of the model."""
        training.progress("solving", 0, 2, "")
        solver = Solver.of(training, self._add(Readout.name, whole_readout(self.model.backbone)))
        found: list[Trial] = []
        for regime, choices in ((Head.name, (None,)), (Readout.name, solver.columns.choices)):
            solution = solver.best(choices)
            trainers = self._trainers(regime, solution.reads)
            for fold, one in enumerate(trainers):
                solution.put_into(one.task, fold)
            trainers[-1].held_out = solution.answers
            found.append(Trial(trainers, solution=solution, metrics=solution.metrics))
            if len(found) < 2:
                training.progress("solving", len(found), 2, self._answer(found[0]))
        return found

    def _say(self, solved: Sequence[Trial], training: Training) -> None:
        """Say the first answer: the best of what was solved, before anything is trained."""
        if solved:
            best = solved[best_of(self.measured_by, [one.metrics for one in solved])]
            after = duration(time.perf_counter() - self.run.began)
            keeps = ", Ctrl-C keeps the best so far" if training.can_keep else ""
            note = f"{self._answer(best)} after {after}; trying to improve{keeps}"
            training.progress("solving", len(solved), len(solved), note)

    def _answer(self, one: Trial) -> str:
        return f"{one.final.task.spec.regime} {self.kind.shown(self._score(one))}"

    def _score(self, one: Trial) -> float:
        return float(one.metrics[self.measured_by])

    def _averaged(
        self, training: Training, trained: Sequence[Trial], solved: Sequence[Trial]
    ) -> list[Trial]:
        """The averages of trained tasks with the readout, which was solved last."""
        solution = solved[-1].solution if solved else None
        if solution is None:
            return []
        averages = []
        for one in trained:
            method = WITH_READOUT[one.final.task.spec.regime]
            trainers = self._trainers(method.name, solution.reads)
            for fold, (own, other) in enumerate(zip(trainers, one.trainers, strict=True)):
                self._average(own.task, other.task, solution, fold)
            trainers[-1].ending = one.final.ending
            averages.append(Trial(trainers, lr=one.lr))
        training.measure([trainer for one in averages for trainer in one.trainers])
        for one in averages:
            one.metrics = one.final.metrics
        return averages

    def _average(self, task: Task, other: Task, solution: Solution, fold: int) -> None:
        """Fill a task with a trained and a solved one: its output is the mean of both."""
        method, width = task.method, self.model.backbone.config.width
        assert isinstance(method, WithStatistics)
        with torch.no_grad():
            for name, value in other.input().tensors.items():
                task.get_parameter(name).copy_(value)
            for name, values in solution.tensors.items():
                task.get_parameter(name).copy_(values[fold])
            weight = method.mean_weight(other.head.weight, solution.weight[fold], width)
            task.head.weight.copy_(weight)
            task.head.bias.copy_((other.head.bias + solution.bias[fold]) / 2)
        for name, value in task.head.fitted.items():
            value.copy_(other.head.fitted[name])
