"""Shadows: new versions of tasks that answer beside those that clients hear, to compare the two.

After a pass, and after its requests have their outputs, each shadow of a task that was asked for
runs on the same images. What it says goes into metrics and the log only. A service with images
waiting skips this for up to nine passes in ten, so that its clients wait for at most a tenth more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from engram.serve.catalogue import Snapshot
from engram.serve.log import Log
from engram.serve.outputs import Outputs, forward_asked, is_finite
from engram.serve.telemetry import Telemetry

MOST_SKIPPED = 9  # passes in a row that are not compared, of a service with images waiting


class Shadows:
    """Compares the shadows of a snapshot with the tasks that answered."""

    def __init__(self, telemetry: Telemetry, log: Log) -> None:
        self._telemetry, self._log, self._skipped = telemetry, log, 0

    def skips(self, waiting: bool) -> bool:
        """Whether the pass that just ended is not compared."""
        self._skipped = self._skipped + 1 if waiting and self._skipped < MOST_SKIPPED else 0
        return self._skipped > 0

    def compare(
        self,
        snapshot: Snapshot,
        views: Sequence[Tensor],
        outputs: Sequence[Outputs],
        seconds: float,
    ) -> None:
        """Run the shadows of the tasks in `outputs`, which took a pass of so many seconds.

        An error of a shadow is a line in the log.
        """
        for name, shadow in snapshot.shadows.items():
            rows = [i for i, own in enumerate(outputs) if name in own]
            if not rows:
                continue
            began = time.perf_counter()
            try:
                found = forward_asked(shadow, [views[i] for i in rows], [[name]] * len(rows), False)
                own = time.perf_counter() - began
                pairs = [(outputs[i][name], one[name]) for i, one in zip(rows, found, strict=True)]
                shares = [agreement(snapshot, shadow, name, *pair) for pair in pairs]
            except Exception as error:
                self._log.event_seldom("shadow failed", task=name, reason=repr(error))
                continue
            version = shadow.version(name)
            self._telemetry.shadow_seconds.labels(name, version).observe(own)
            for share in shares:
                self._telemetry.shadow_agreement.labels(name, version).observe(share)
            self._log.event("shadow", task=name, version=version, images=len(rows),
                            agreement=round(sum(shares) / len(shares), 4), ms=round(1000 * own, 1),
                            answered_ms=round(1000 * seconds, 1))  # fmt: skip


def agreement(
    snapshot: Snapshot, shadow: Snapshot, name: str, output: Tensor, other: Tensor
) -> float:
    """Agreement of a task and its shadow about an image; 0 for an output that is not finite."""
    if not is_finite(output) or not is_finite(other):
        return 0.0
    task = snapshot.model.task(name)
    return task.kind.agreement(task.reading(output), shadow.model.task(name).reading(other))
