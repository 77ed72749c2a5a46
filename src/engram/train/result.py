"""What training gives back: the engram's path, how good it is, how long it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engram.inference.evaluate import Answers
from engram.tasks.kinds import KINDS


@dataclass(frozen=True)
class Ending:
    """How far a training went, and which of its weights were kept."""

    steps: int
    planned: int
    per_epoch: int
    kept: int  # the step whose weights were kept
    patience: int  # in validations; 0: the last weights are kept

    @property
    def early(self) -> bool:
        """Whether it stopped before the last planned step."""
        return self.steps < self.planned

    def to_dict(self) -> dict[str, Any]:
        """As `--json` prints it, and as the engram records it."""
        return {
            "steps": self.steps,
            "planned_steps": self.planned,
            "steps_per_epoch": self.per_epoch,
            "epochs": self._epochs(self.steps),
            "kept_step": self.kept,
            "stopped_early": self.early,
        }

    @classmethod
    def recorded(cls, record: Mapping[str, Any]) -> Ending | None:
        """From what an engram records of its training; None where it says nothing of its end."""
        if "training" not in record:
            return None
        names = ("steps", "planned_steps", "steps_per_epoch", "kept_step")
        steps, planned, per_epoch, kept = (int(record["training"][name]) for name in names)
        return cls(steps, planned, per_epoch, kept, int(record["patience"]))

    def __str__(self) -> str:
        """For people."""
        epochs, planned = (f"{self._epochs(steps):g}" for steps in (self.steps, self.planned))
        kept = f"the weights of step {self.kept}, the best on validation"
        if not self.patience:
            kept = "the last weights"
        if not self.early:
            return f"{planned} epochs ({self.steps:,} steps); kept {kept}"
        return (
            f"stopped after {epochs} of {planned} epochs ({self.steps:,} steps): no improvement in "
            f"{self.patience} validations; kept {kept}"
        )

    def _epochs(self, steps: int) -> float:
        return round(steps / self.per_epoch, 1)


@dataclass(frozen=True, kw_only=True, repr=False)
class RunResult:
    """What every run gives back; `metrics` are by split."""

    task: str
    regime: str
    parameters: int
    seconds: float
    metrics: Mapping[str, Mapping[str, Any]]
    path: Path | None = None
    unreadable: Mapping[str, str] = field(default_factory=dict)
    ending: Ending | None = None  # None: it was solved, not trained
    held_out: Answers | None = None  # for validation images; None where an earlier run found them

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
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class Result(RunResult):
    """The result of `fit`, with the learning curve."""

    history: Sequence[Mapping[str, float]]
