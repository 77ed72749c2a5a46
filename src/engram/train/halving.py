"""Training that drops trials on the way, so that most of the time goes to the best of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from engram.data.loader import Transform
from engram.methods import Side
from engram.train.choice import best_of, noise
from engram.train.learner import TaskTrainer
from engram.train.training import Training

#: Of the steps: when some are dropped, and how many go on.
_RUNGS = ((1 / 6, 3), (2 / 5, 2))
#: Of the steps that scouts train for.
_SCOUTING = 1 / 6
_HOPELESS = 4.0  # times the margin of a tie, below what was solved


def trials(learners: Sequence[TaskTrainer]) -> list[list[TaskTrainer]]:
    """Task trainers by trial; in cross-validation a trial has one for every fold and one more."""
    found: dict[str, list[TaskTrainer]] = {}
    for one in learners:
        found.setdefault(one.trial, []).append(one)
    return list(found.values())


class SuccessiveHalving(Training):
    """Training that drops trials at the rungs.

    With several folds, every trial first sends a *scout*, which trains for a sixth of the steps and
    is measured on one fold. The trial of the best scout is then trained on all folds, from the
    beginning, unless its scout is far behind `to_beat`, a score that is there already.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.dropped: dict[str, dict[str, Any]] = {}  # their metrics then, by trial
        self.dropped_at: dict[str, float] = {}  # epochs
        self.followers: Mapping[str, Sequence[TaskTrainer]] = {}  # of scouts, by name
        self.to_beat = -math.inf

    def prepare(self, transform: Transform | None = None) -> None:
        super().prepare(transform)
        for followers in self.followers.values():
            for one in followers:
                one.prepare(self.splits["train"].labels)

    @property
    def epochs(self) -> float:
        return round((self.step - self.first) / self.feed.per_epoch, 2)

    def _evaluate(self) -> None:
        super()._evaluate()
        if self.followers:
            scouted = self.step >= _SCOUTING * self.steps or all(one.done for one in self.learners)
            if self.first == 0 and scouted:
                self._follow_best()
            return
        for share, count in _RUNGS:
            if self.step >= share * self.steps:
                self._keep_best(count)

    def _follow_best(self) -> None:
        """Train the trial of the best scout on all folds, or end here."""
        scouts = list(self.learners)
        best = scouts[best_of(scouts[0].measured_by, [one.metrics for one in scouts])]
        self._drop_all_but([best.name])
        margin = _HOPELESS * noise(best.measured_by, best.metrics)
        if best.score < self.to_beat - margin:
            self._drop_all_but([])
            self.steps = self.step
        else:
            self.follow(best.name)

    def follow(self, scout: str) -> None:
        """Train the trial of a scout from the beginning."""
        self._take(self.followers[scout])
        self._freeze_others()
        self.first, self.steps = self.step, self.step + self.steps

    def _keep_best(self, count: int) -> None:
        """The best go on, and the best side task among them, which can be averaged."""
        left = [trial[-1] for trial in trials(self.learners)]
        side, names = [one for one in left if isinstance(one.task.method, Side)], list[str]()
        while left and len(names) < count:
            last = len(names) + 1 == count and side and not any(o.name in names for o in side)
            best = self._best(side if last else left)
            names.append(best)
            left = [learner for learner in left if learner.name != best]
        self._drop_all_but(names)

    def _best(self, learners: Sequence[TaskTrainer]) -> str:
        at = best_of(learners[0].measured_by, [learner.metrics for learner in learners])
        return learners[at].name

    def _drop_all_but(self, kept: Sequence[str]) -> None:
        for trial in trials(self.learners):
            if trial[-1].name not in kept:
                self.dropped[trial[-1].name] = trial[-1].metrics
                self.dropped_at[trial[-1].name] = self.epochs
        names = [one.name for one in self.learners if one.trial in kept]
        if names and len(names) < len(self.learners):
            self.keep(names)

    def about(self) -> dict[str, Any]:
        return {"dropped": self.dropped, "dropped_at": self.dropped_at, "steps": self.steps,
                "first": self.first}  # fmt: skip

    def _restore(self, state: Mapping[str, Any]) -> None:
        for scout, followers in self.followers.items():
            if state["names"] == [one.name for one in followers]:
                self.follow(scout)
        super()._restore(state)
        self.first, self.steps = state["first"], state["steps"]
        self.dropped, self.dropped_at = state["dropped"], state["dropped_at"]
