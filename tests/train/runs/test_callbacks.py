"""Callbacks hear of a run in order, close whatever happens, and lose nothing by failing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.training import start

import engram
from engram import Callback, EngramError, MemoryViT, Recipe
from engram.data.datasets import Splits
from engram.errors import Notice
from engram.train.runs.callbacks import Callbacks, RunStart
from engram.train.runs.result import Result
from engram.util.processes import ProcessGroup

QUICK = Recipe(steps=4, patience=0, batch=16, evaluations=2, workers=0, checkpoint_seconds=0)


class Heard(Callback):
    """Writes down what it hears; raises in `fails`, or stops the run at a step."""

    def __init__(self, fails: str = "", stop: int = 0) -> None:
        self.events: list[Any] = []
        self.fails, self.stop = fails, stop
        self.start: RunStart | None = None
        self.rows: list[Mapping[str, float]] = []
        self.result: Result | None = None
        self.error: BaseException | None = None

    def _hear(self, event: str, *what: Any) -> None:
        self.events.append((event, *what))
        if event == self.fails:
            raise ValueError("it is broken")

    def started(self, start: RunStart) -> None:
        self.start = start
        self._hear("started", start.step)

    def step(self, step: int, loss: float) -> None:
        assert loss > 0
        self._hear("step", step)
        if step == self.stop:
            raise KeyboardInterrupt

    def evaluated(self, row: Mapping[str, float]) -> None:
        self.rows.append(row)
        self._hear("evaluated", row["step"])

    def checkpointed(self, step: int) -> None:
        self._hear("checkpointed", step)

    def finished(self, result: Result) -> None:
        self.result = result
        self._hear("finished")

    def stopped(self, error: BaseException) -> None:
        self.error = error
        self._hear("stopped")

    def only(self, *events: str) -> list[Any]:
        return [event for event in self.events if event[0] in events]


def fit(backbone: Path, splits: Splits, *heard: Callback, **more: Any) -> Result:
    return engram.fit(start(backbone, splits), "colours", splits, QUICK, callbacks=heard, **more)


def test_a_run_is_told_in_order(small_backbone: Path, splits: Splits, tmp_path: Path) -> None:
    heard, out = Heard(), tmp_path / "c.safetensors"
    result = fit(small_backbone, splits, heard, out=out)
    assert heard.events == [
        ("started", 0),
        *[("step", 1), ("checkpointed", 1)],
        *[("step", 2), ("evaluated", 2), ("checkpointed", 2)],
        *[("step", 3), ("checkpointed", 3)],
        *[("step", 4), ("evaluated", 4), ("checkpointed", 4)],
        ("finished",),
    ]
    assert heard.start is not None
    assert (heard.start.task, heard.start.steps) == ("colours", 4)
    assert heard.start.folder == tmp_path / "c.run"
    assert heard.start.settings["cells"] == 3
    assert heard.rows == result.history  # type: ignore[attr-defined]
    assert heard.result is result
    again = Heard()
    fit(small_backbone, splits, again, out=out, resume=True)
    assert again.events == []  # it had finished, so there was no run


def test_in_memory_there_are_no_checkpoints(small_backbone: Path, splits: Splits) -> None:
    heard = Heard()
    fit(small_backbone, splits, heard)
    assert heard.only("checkpointed") == []
    assert heard.start is not None
    assert heard.start.folder is None


@pytest.mark.parametrize("event", ["started", "step", "evaluated", "checkpointed"])
def test_a_callback_that_fails_stops_the_run_and_nothing_is_lost(
    event: str, small_backbone: Path, splits: Splits, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole.safetensors", tmp_path / "c.safetensors"
    fit(small_backbone, splits, out=whole)
    bad, good = Heard(fails=event), Heard()
    match = rf"Heard failed in {event} \(ValueError: it is broken\)"
    with pytest.raises(EngramError, match=match) as caught:
        fit(small_backbone, splits, bad, good, out=out)
    assert isinstance(caught.value.__cause__, ValueError)  # Python shows where
    told = [one for one in bad.events if one[0] not in ("stopped", "finished")]
    assert [one for one in good.events if one[0] != "stopped"] == told  # the other heard the same
    assert good.error is caught.value
    assert not out.exists()
    after = Heard()
    fit(small_backbone, splits, after, out=out, resume=event != "started")
    step = {"started": 0, "step": 1, "evaluated": 2, "checkpointed": 1}[event]
    assert after.events[:2] == [("started", step), ("step", step + 1)]
    assert engram.inspect(out).content == engram.inspect(whole).content
    histories = [path.with_suffix(".run") / "history.csv" for path in (whole, out)]
    assert histories[0].read_text() == histories[1].read_text()


def test_a_callback_that_fails_at_the_end_leaves_the_engram(
    small_backbone: Path, splits: Splits, tmp_path: Path
) -> None:
    out = tmp_path / "c.safetensors"
    bad, good = Heard(fails="finished"), Heard()
    with pytest.raises(EngramError, match="failed in finished"):
        fit(small_backbone, splits, bad, good, out=out)
    assert out.exists()
    assert good.only("finished", "stopped") == [("finished",)]
    assert bad.only("finished", "stopped") == [("finished",)]


def test_whoever_stops_a_run_the_callbacks_hear_of_it(small_backbone: Path, splits: Splits) -> None:
    heard, bad = Heard(), Heard(fails="stopped")
    with (
        pytest.warns(Notice, match="failed in stopped"),
        pytest.raises(KeyboardInterrupt),
    ):
        fit(small_backbone, splits, bad, heard, Heard(stop=3))
    assert isinstance(heard.error, KeyboardInterrupt)
    assert heard.events[-1] == ("stopped",)
    diverging = QUICK.but(optimizer="sgd", lr=1e30, clip=0, warmup=0)
    model, heard = start(small_backbone, splits), Heard()
    with pytest.raises(EngramError, match="not finite"):
        engram.fit(model, "colours", splits, diverging, callbacks=[heard])
    assert isinstance(heard.error, EngramError)


def test_only_instances_are_callbacks(small_backbone: Path, splits: Splits) -> None:
    with pytest.raises(EngramError, match="is no callback"):
        fit(small_backbone, splits, Heard)  # type: ignore[arg-type]


def test_only_the_main_process_calls_them() -> None:
    for rank, events in ((1, []), (0, [("started", 0)])):
        heard, processes = Heard(), ProcessGroup()
        processes.rank = rank
        Callbacks([heard], processes, RunStart(task="t", data="d", settings={})).started(0, 4)
        assert heard.events == events


def test_auto_is_one_run(model: MemoryViT, splits: Splits) -> None:
    heard = Heard()
    result = engram.auto(model, "t", splits, QUICK, callbacks=[heard])
    assert heard.start is not None
    assert heard.start.settings["regime"] == "auto"
    assert heard.events[:2] == [("started", 0), ("step", 1)]
    assert heard.result is result


@pytest.mark.parametrize("regime", ["masked", "memory"])
def test_a_sweep_is_one_run(regime: str, model: MemoryViT, splits: Splits, tmp_path: Path) -> None:
    """Masked variants train together, the others one by one: behind each other, that is."""
    heard, out = Heard(), tmp_path / "s.safetensors"
    settings: dict[str, Any] = {"lrs": [1e-3, 3e-3], "cells": [2], "regime": regime}
    count = 1 if regime == "masked" else 2
    stopping = Heard(stop=4 * count - 1)
    with pytest.raises(KeyboardInterrupt):
        engram.sweep(model, "t", splits, QUICK, **settings, out=out, callbacks=[stopping])
    result = engram.sweep(
        model, "t", splits, QUICK, **settings, out=out, callbacks=[heard], resume=True
    )
    steps = [step for _, step in stopping.only("step") + heard.only("step")]
    assert steps == [*range(1, 4 * count), *range(4 * count - 1, 4 * count + 1)]
    assert heard.only("started") == [("started", 4 * count - 2)]
    assert heard.start is not None
    assert heard.start.steps == 4 * count
    assert heard.start.settings["lr"] == [1e-3, 3e-3]
    assert heard.result is result
    lines = (tmp_path / "s.run" / "history.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == [str(2 * i + 2) for i in range(2 * count)]
