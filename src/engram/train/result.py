"""What training gives back: the engram's path, how good it is, how long it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What every run gives back; `metrics` are by split."""

    task: str
    regime: str
    parameters: int
    seconds: float
    metrics: Mapping[str, Mapping[str, Any]]
    path: Path | None = None
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The result as `--json` prints it."""
        return {
            "task": self.task,
            "path": None if self.path is None else str(self.path),
            "regime": self.regime,
            "parameters": self.parameters,
            "seconds": round(self.seconds, 2),
            "metrics": {split: dict(values) for split, values in self.metrics.items()},
        }


@dataclass(frozen=True, kw_only=True)
class Result(RunResult):
    """The result of `fit`, with the learning curve."""

    history: Sequence[Mapping[str, float]]
