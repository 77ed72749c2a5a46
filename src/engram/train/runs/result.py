"""Results of training: the engram's path, how good it is, how long it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from engram.inference.evaluate import Answers
from engram.store.engram import Engram
from engram.tasks.kinds import KINDS


@dataclass(frozen=True)
class Ending:
    """End of a training: the steps it took, and the step whose weights were kept."""

    steps: int
    planned: int
    per_epoch: int
    kept: int  # the step whose weights were kept
    patience: int  # in validations; 0: the last weights are kept
    interrupted: bool = False  # by Ctrl-C

    @property
    def early(self) -> bool:
        """Whether it stopped before the last planned step."""
        return self.steps < self.planned

    def to_dict(self) -> dict[str, Any]:
        """The document of `--json` and of the engram's header."""
        return {
            "steps": self.steps,
            "planned_steps": self.planned,
            "steps_per_epoch": self.per_epoch,
            "epochs": self._epochs(self.steps),
            "kept_step": self.kept,
            "stopped_early": self.early,
            "interrupted": self.interrupted,
        }

    def __str__(self) -> str:
        epochs, planned = (f"{self._epochs(steps):g}" for steps in (self.steps, self.planned))
        kept = f"the weights of step {self.kept}, the best on validation"
        if not self.patience:
            kept = "the last weights"
        if not self.early:
            return f"{planned} epochs ({self.steps:,} steps); kept {kept}"
        why = f"no improvement in {self.patience} validations"
        if self.interrupted:
            why = "interrupted"
        return (
            f"stopped after {epochs} of {planned} epochs ({self.steps:,} steps): {why}; kept {kept}"
        )

    def _epochs(self, steps: int) -> float:
        return round(steps / self.per_epoch, 1)


@dataclass(frozen=True)
class Tried:
    """One task that was tried, and how good it was when it was last measured."""

    regime: str
    lr: float  # 0: it was solved; of an average, that of its trained half
    parameters: int
    metric: str  # the one that chooses
    value: float  # on held-out images
    images: int  # so many of them
    how: str  # trained, solved or averaged
    epochs: float = 0.0  # of training
    kept: bool = False
    tied: bool = False  # with the best, but for noise
    dropped: bool = False  # after a short training
    own_pass: bool = False  # it changes the backbone's tokens; measured on the first fold alone

    @classmethod
    def create(cls, engram: Engram, metric: str, metrics: Mapping[str, Any], **found: Any) -> Self:
        """A task that was tried, by the metric that chooses."""
        return cls(
            regime=engram.spec.regime, parameters=engram.parameters, metric=metric,
            value=float(metrics[metric]), images=int(metrics["images"]), **found,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """The result of every run; `metrics` are by split, `history` is the learning curve."""

    task: str
    regime: str
    parameters: int
    metrics: Mapping[str, Mapping[str, Any]]
    seconds: float = 0.0
    path: Path | None = None
    unreadable: Mapping[str, str] = field(default_factory=dict)
    history: Sequence[Mapping[str, float]] = ()
    ending: Ending | None = None  # None: it was solved, not trained
    answers: Answers | None = None  # for test or validation images, where this run found them
    interrupted: bool = False  # by Ctrl-C: the engram is the best so far, and `resume` goes on

    @classmethod
    def create(cls, engram: Engram, **found: Any) -> Self:
        """The result of a run that made this engram, and what else it found."""
        spec, parameters = engram.spec, engram.parameters
        return cls(task=spec.name, regime=spec.regime, parameters=parameters, **found)

    @classmethod
    def recorded(cls, engram: Engram, path: Path, record: Mapping[str, Any]) -> Self:
        """The result of a run that wrote this engram, from its `record`."""
        ending = record["ending"]
        found = {**record, "ending": ending and Ending(**ending)}
        return cls.create(engram, path=path, **found)

    def record(self) -> dict[str, Any]:
        """The fields that the engram does not have, for the run's folder."""
        others = ("task", "regime", "parameters", "path", "answers", "interrupted")
        names = [item.name for item in fields(self) if item.name not in others]
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        scores = [
            f"{split} {kind.score} {values[kind.score]:.4g}"
            for split, values in self.metrics.items()
            for kind in KINDS.values()
            if kind.score in values
        ]
        facts = [self.regime, f"{self.parameters:,} parameters", *dict.fromkeys(scores)]
        path = [] if self.path is None else [repr(str(self.path))]
        return f"{type(self).__name__}({self.task!r}, {', '.join(facts + path)})"

    def to_dict(self) -> dict[str, Any]:
        """The result as `--json` prints it."""
        return {
            "task": self.task,
            "path": None if self.path is None else str(self.path),
            "regime": self.regime,
            "parameters": self.parameters,
            "seconds": round(self.seconds, 2),
            "metrics": {split: dict(values) for split, values in self.metrics.items()},
            "training": None if self.ending is None else self.ending.to_dict(),
            "interrupted": self.interrupted,
        }
