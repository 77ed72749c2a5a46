"""Training that drops learners on the way, so that most of the time goes to the best of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engram.methods import Side
from engram.train.choice import best_of
from engram.train.learner import TaskTrainer
from engram.train.training import Training

#: Of the steps: when some are dropped, and how many go on.
_RUNGS = ((1 / 6, 3), (2 / 5, 2))


class SuccessiveHalving(Training):
    """Training that drops learners at the rungs."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.dropped: dict[str, dict[str, Any]] = {}  # their metrics then
        self.dropped_at: dict[str, float] = {}  # epochs

    @property
    def epochs(self) -> float:
        return round(self.step / self.feed.per_epoch, 2)

    def _evaluate(self) -> None:
        super()._evaluate()
        for share, count in _RUNGS:
            if self.step >= share * self.steps:
                self._keep_best(count)

    def _keep_best(self, count: int) -> None:
        """The best go on, and the best side task among them, which can be averaged."""
        left, names = list(self.learners), list[str]()
        side = [learner for learner in left if isinstance(learner.task.method, Side)]
        while left and len(names) < count:
            last = len(names) + 1 == count and side and not any(o.name in names for o in side)
            best = self._best(side if last else left)
            names.append(best)
            left = [learner for learner in left if learner.name != best]
        self._drop_all_but(names)

    def _best(self, learners: Sequence[TaskTrainer]) -> str:
        at = best_of(learners[0].measured_by, [learner.metrics for learner in learners])
        return learners[at].name

    def _drop_all_but(self, names: Sequence[str]) -> None:
        for learner in self.learners:
            if learner.name not in names:
                self.dropped[learner.name] = learner.metrics
                self.dropped_at[learner.name] = self.epochs
        if len(names) < len(self.learners):
            self.keep(names)

    def about(self) -> dict[str, Any]:
        return {"dropped": self.dropped, "dropped_at": self.dropped_at}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self.dropped, self.dropped_at = state["dropped"], state["dropped_at"]
