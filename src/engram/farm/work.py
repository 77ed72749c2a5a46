"""One job, wherever it runs: what `engram fit --resume` does, and what it reports meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from engram.errors import EngramError, Interrupted
from engram.farm.events import Event
from engram.farm.jobs import FarmJob
from engram.report.run import write_run_report
from engram.tasks.kinds import KINDS
from engram.train.callbacks import Callback, RunStart
from engram.train.job import TrainingJob
from engram.train.options import RunOptions
from engram.train.run import has_state, run_folder

_EVERY = 0.5  # seconds between two reports about the same work


class _Ready(Callback):
    """Tells that the next step is about to be taken: images are read, the cache is filled."""

    def __init__(self, tell: Callable[[RunStart], None]) -> None:
        self.tell, self.told = tell, False

    def started(self, start: RunStart) -> None:
        self.told = True
        self.tell(start)


def train_job(job: FarmJob, tell: Callable[[Event], None]) -> Event:
    """Train a job, or find that it is done, and write its report.

    Returns the last event: done, failed after a user's mistake, or stopped. Any other exception is
    a crash, after which another attempt may help.
    """
    last = 0.0
    job = job.but(RunOptions, resume=has_state(job.out))

    def progress(what: str, done: int, total: int, note: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _EVERY:
            last = now
            share = f" {done / total:.0%}" if total else ""
            tell(Event(job.name, "at_work", f"{what}{share}"))

    def announce(sentence: str) -> None:
        tell(Event(job.name, "said", sentence))

    def begin(start: RunStart) -> None:
        tell(Event(job.name, "ready"))
        if start.step:
            announce(f"resumed at step {start.step:,} of {start.steps:,}")

    ready = _Ready(begin)

    try:
        work = TrainingJob.start(job.data, job.out, job.given, progress, announce)
        work = replace(work, callbacks=[*work.callbacks, ready])
        regime, seeds = work.choose(job.regime, job.seeds)
        result = work.train(job.task, job.out, regime, seeds, progress)
        page = run_folder(job.out) / "report.html"
        if ready.told or not page.exists():
            tell(Event(job.name, "at_work", "writing the report"))
            write_run_report(work.model, result, work.splits, work.recipe)
    except Interrupted as stop:
        return Event(job.name, "stopped", str(stop))
    except EngramError as error:
        return Event(job.name, "failed", str(error))
    kind = KINDS[work.splits.kind]
    split = "test" if "test" in result.metrics else "val"
    document = {
        **result.to_dict(),
        "kind": kind.name,
        "trunk": work.model.trunk.source,
        "score": f"{split} {kind.title} {kind.shown(result.metrics[split][kind.score])}",
        "finished_before": not ready.told,
    }
    return Event(job.name, "done", result=document)
