"""Training that drops trials on the way, so that most of the time goes to the best of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engram.data.datasets import Splits
from engram.data.loader import Transform
from engram.methods import Side
from engram.model import MemoryViT
from engram.train.choice import best_of, noise
from engram.train.learner import TaskTrainer
from engram.train.recipe import Recipe
from engram.train.run import Run
from engram.train.training import Training
from engram.train.validation import HeldOut

#: Of the steps: when some are dropped, and how many go on.
_RUNGS = ((1 / 6, 3), (2 / 5, 2))
#: Scouts train for a share of the recipe's epochs, but at most for one of the steps.
_SCOUT_EPOCHS, _SCOUT_STEPS = 1 / 6, 1 / 3
_HOPELESS = 4.0  # times the margin of a tie, below what was solved


@dataclass(eq=False)
class Trial:
    """Tasks that are tried as one: for every fold, and last for all images; and their scout."""

    trainers: Sequence[TaskTrainer]
    scout: TaskTrainer | None = None
    how: str = "trained"  # or solved, or averaged
    lr: float = 0.0  # 0: it was solved
    #: Of held-out images, as last measured.
    metrics: dict[str, Any] = field(default_factory=dict)
    #: Answers of all that it was chosen from itself: the settings of a solved head.
    rivals: Sequence[HeldOut] = ()
    epochs: float = 0.0  # of training, until it was dropped or done
    dropped: bool = False  # before the end of its training

    @property
    def final(self) -> TaskTrainer:
        return self.trainers[-1]


class SuccessiveHalving(Training):
    """Training that drops trials at the rungs.

    With folds, every trial first sends a *scout*, which trains for a sixth of the epochs and
    is measured on one fold. The trial of the best scout is then trained on all folds, from the
    beginning, unless its scout is far behind `to_beat`, a score that is there already.
    """

    def __init__(
        self, model: MemoryViT, trials: Sequence[Trial], splits: Splits, recipe: Recipe, run: Run
    ) -> None:
        self.trials, self.scouts = trials, [one.scout for one in trials if one.scout is not None]
        learners = self.scouts or [trainer for one in trials for trainer in one.trainers]
        super().__init__(model, learners, splits, recipe, run)
        self.dropped: dict[str, dict[str, Any]] = {}  # by trainer: its metrics then, and the epochs
        self.to_beat = -math.inf

    def prepare(self, transform: Transform | None = None) -> None:
        super().prepare(transform)
        for trainer in (trainer for one in self.trials for trainer in one.trainers):
            trainer.prepare(self.splits["train"].labels)

    @property
    def scouting(self) -> bool:
        return bool(self.scouts) and self.first == 0

    @property
    def has_answer(self) -> bool:
        solved = self.to_beat > -math.inf
        return solved or (super().has_answer and not self.scouting)

    def end(self) -> None:
        super().end()
        if self.interrupted and self.scouting:  # a scout knows one fold only
            self._drop_all_but([])
        for one in self.trials:
            measured = one.scout or one.final
            metrics = self.dropped.get(measured.name, one.final.metrics)
            one.metrics, one.dropped = metrics, measured.name in self.dropped
            one.lr, one.epochs = measured.lr, metrics.get("epochs", self._epochs)

    @property
    def _epochs(self) -> float:
        return round((self.step - self.first) / self.feed.per_epoch, 2)

    def _evaluate(self) -> None:
        super()._evaluate()
        if self.scouts:
            enough = _SCOUT_EPOCHS * self.recipe.epochs * self.feed.per_epoch
            enough = min(enough, _SCOUT_STEPS * self.steps)
            ended = self.step >= enough or all(one.done for one in self.learners)
            if self.scouting and ended:
                self._follow_best()
            return
        for share, count in _RUNGS:
            if self.step >= share * self.steps:
                self._keep_best(count)

    def _follow_best(self) -> None:
        """Train the trial of the best scout on all folds, or end here."""
        best = self._best(self.learners)
        self._drop_all_but([best])
        margin = _HOPELESS * noise(best.measured_by, best.metrics)
        if best.score < self.to_beat - margin:
            self._drop_all_but([])
            self.steps = self.step
        else:
            self._follow(best)

    def _follow(self, scout: TaskTrainer) -> None:
        """Train the trial of a scout from the beginning."""
        self._take(self.trials[self.scouts.index(scout)].trainers)
        self._freeze_others()
        self.first, self.steps = self.step, self.step + self.steps

    def _keep_best(self, count: int) -> None:
        """The best go on, and the best side task among them, which can be averaged."""
        left, kept = self._finals(), list[TaskTrainer]()
        while left and len(kept) < count:
            side = [one for one in left if isinstance(one.task.method, Side)]
            none_yet = side and not any(isinstance(one.task.method, Side) for one in kept)
            kept.append(self._best(side if none_yet and len(kept) + 1 == count else left))
            left.remove(kept[-1])
        self._drop_all_but(kept)

    def _finals(self) -> list[TaskTrainer]:
        """Trainers that stand for their trials: scouts, or those that learn from all images."""
        return [one for one in self.learners if one.name == one.trial]

    def _best(self, learners: Sequence[TaskTrainer]) -> TaskTrainer:
        return learners[best_of(learners[0].measured_by, [one.metrics for one in learners])]

    def _drop_all_but(self, kept: Sequence[TaskTrainer]) -> None:
        for one in self._finals():
            if one not in kept:
                self.dropped[one.name] = {**one.metrics, "epochs": self._epochs}
        trials = [one.name for one in kept]
        names = [one.name for one in self.learners if one.trial in trials]
        if names and len(names) < len(self.learners):
            self.keep(names)

    def about(self) -> dict[str, Any]:
        return {"dropped": self.dropped, "steps": self.steps, "first": self.first}

    def _restore(self, state: Mapping[str, Any]) -> None:
        for one in self.trials:
            if one.scout and state["names"] == [trainer.name for trainer in one.trainers]:
                self._follow(one.scout)
        super()._restore(state)
        self.first, self.steps, self.dropped = state["first"], state["steps"], state["dropped"]
