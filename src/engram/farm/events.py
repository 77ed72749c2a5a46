"""What a runner says about a job; read without torch, by processes that only pass it on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Event:
    """What a runner says about a job.

    `started`   a runner has it
    `at_work`   what it is doing, in `text`
    `ready`     its cache is filled; its training begins
    `said`      a sentence for the user, in `text`
    `retried`   it begins again; `text` says why
    `done`      its engram is written; `result` has the details
    `failed`    it ended for good; `text` says why
    `stopped`   it was interrupted, and can be resumed
    """

    job: str
    kind: Literal["at_work", "started", "ready", "said", "retried", "done", "failed", "stopped"]
    text: str = ""
    result: dict[str, Any] = field(default_factory=dict)
