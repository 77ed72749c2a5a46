"""What a section counts: cases tried, survived and lost."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Record:
    """The outcome of one section. A case that was lost has a sentence that says how."""

    tried: int = 0
    survived: int = 0
    lost: list[str] = field(default_factory=list)
    seconds: float = 0.0
    slowest_health: float | None = None  # answer of /healthz in seconds, where a service ran
    details: str = ""

    def add(self, name: str, problem: str | None) -> None:
        """Count a case; `problem` is what went wrong, None if nothing did."""
        self.tried += 1
        if problem is None:
            self.survived += 1
        else:
            self.lost.append(f"{name}: {problem}"[:500])
