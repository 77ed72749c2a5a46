"""Callbacks: objects that are told how a run goes, and the one who tells them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engram.errors import EngramError, Notice, flag
from engram.train.runs.result import Result
from engram.util.processes import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """Argument of `Callback.started`.

    `settings` are those that repeat the run, as a recipe file holds them. `step` is 0, or where a
    resumed run goes on; `steps` is how many there will be. `folder` is `NAME.run`, or None without
    `out`.
    """

    task: str
    data: str
    settings: Mapping[str, Any]
    folder: Path | None = None
    step: int = 0
    steps: int = 0

    def file(self, name: str, what: str) -> Path:
        """A file of the run's folder; an EngramError if it has none."""
        if self.folder is None:
            raise EngramError(f"{what} needs a path, because this run has no folder: no out.")
        return self.folder / name


class Callback:
    """Is told how a run goes. Subclass it, and override what you need.

    Give instances to `fit`, `sweep` or `auto` as `callbacks=[…]`. Every `started` is followed by
    exactly one `finished` or `stopped`, unless the process is killed. With torchrun, only the main
    process calls them. They run between two steps, so training waits for them.

    An exception in a callback stops the run. The other callbacks are still told, a checkpoint is
    written, and the EngramError names the callback; corrected, the run continues with `resume`.

    Examples:
        >>> class Best(engram.Callback):
        ...     best = 0.0
        ...
        ...     def evaluated(self, row):
        ...         self.best = max(self.best, row["val_accuracy"])
        >>> best = Best()
        >>> recipe = engram.Recipe(steps=4)
        >>> result = engram.fit(model, "flowers", "photos", recipe, callbacks=[best])
        >>> 0 <= best.best <= 1
        True
    """

    def started(self, start: RunStart) -> None:
        """Everything is ready for the first step, or for the first one after a resume."""

    def step(self, step: int, loss: float) -> None:
        """An optimiser step is done; the loss is the mean of its batch, over all variants."""

    def evaluated(self, row: Mapping[str, float]) -> None:
        """The validation images were evaluated.

        `row` is one row of the history: step, epoch, loss, lr, val_loss and val_accuracy (or the
        score of the kind of task). Of several tasks that train together, it is the best one's.
        """

    def checkpointed(self, step: int) -> None:
        """A checkpoint was written; a run that is resumed goes on behind this step."""

    def finished(self, result: Result) -> None:
        """The run is done, and its engram is written if it has an `out`."""

    def stopped(self, error: BaseException) -> None:
        """The run ended early, by an error or because somebody stopped it.

        Then `error` is an `Interrupted` or a KeyboardInterrupt: Ctrl-C, or SIGTERM.
        """


class Callbacks:
    """The callbacks of one run. In the processes that are not the main one there are none."""

    def __init__(self, given: Iterable[Callback], processes: ProcessGroup, start: RunStart) -> None:
        self._given = list(given) if processes.main else []
        for one in self._given:
            if not isinstance(one, Callback):
                raise EngramError(
                    f"{one!r} is no callback; give an instance of a subclass of engram.Callback."
                )
        self._start, self._step = start, 0
        self._begun = False
        self._open: list[Callback] = []  # started, but neither finished nor stopped

    def started(self, step: int, steps: int) -> None:
        """Tell them that the run starts; a sweep may say it with each of its parts."""
        if self._begun:
            return
        self._begun = True
        self._step, now = step, replace(self._start, step=step, steps=steps)

        def start(one: Callback) -> None:
            one.started(now)
            self._open.append(one)

        self._tell("started", start, self._given)

    def step(self, step: int, loss: float) -> None:
        self._step = step
        self._tell("step", lambda one: one.step(step, loss), self._open)

    def evaluated(self, row: Mapping[str, float]) -> None:
        self._tell("evaluated", lambda one: one.evaluated(row), self._open)

    def checkpointed(self, step: int) -> None:
        self._tell("checkpointed", lambda one: one.checkpointed(step), self._open)

    def finished(self, result: Result) -> None:
        told, self._open = self._open, []
        self._tell("finished", lambda one: one.finished(result), told)

    def ended(self, error: BaseException | None) -> None:
        """Tell those that have not heard of the end of the run about the error, if there is one."""
        told, self._open = self._open, []
        if error is None:
            return
        try:
            self._tell("stopped", lambda one: one.stopped(error), told)
        except EngramError as second:  # why the run stopped matters more
            warnings.warn(str(second), Notice, stacklevel=2)

    def _tell(self, event: str, tell: Callable[[Callback], None], told: Iterable[Callback]) -> None:
        """Tell all of them, then raise what the first that failed raised."""
        problems = []
        for one in told:
            try:
                tell(one)
            except EngramError as error:  # a sentence already
                problems.append(error)
            except Exception as error:
                problems.append(self._explained(one, event, error))
        if problems:
            raise problems[0]

    def _explained(self, one: Callback, event: str, error: Exception) -> EngramError:
        why, resume = f"{type(error).__name__}: {error}".rstrip(".: "), flag("resume", True)
        then = f"The run is kept as of step {self._step}: correct it and use {resume}."
        if event in ("finished", "stopped"):
            then = "That was its last call, so the run itself is as it would be without it."
        elif self._start.folder is None:
            then = "Correct it and train again; without out, there is no checkpoint."
        name = type(one).__name__
        explained = EngramError(f"The callback {name} failed in {event} ({why}). {then}")
        explained.__cause__ = error
        return explained


class Part(Callback):
    """Tells the callbacks of a sweep about one of its variants, as a part of one long run."""

    def __init__(self, whole: Callbacks, number: int, count: int) -> None:
        self._whole, self._number, self._count = whole, number, count

    def started(self, start: RunStart) -> None:
        self._before = self._number * start.steps
        self._whole.started(self._before + start.step, self._count * start.steps)

    def step(self, step: int, loss: float) -> None:
        self._whole.step(self._before + step, loss)

    def evaluated(self, row: Mapping[str, float]) -> None:
        step = self._before + row["step"]
        self._whole.evaluated({**row, "step": step, "variant": self._number})

    def checkpointed(self, step: int) -> None:
        self._whole.checkpointed(self._before + step)
