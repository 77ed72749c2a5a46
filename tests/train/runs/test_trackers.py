"""Logs of a run: the same values everywhere, closed in the end, and no step twice."""

from __future__ import annotations

import csv
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.training import start
from tests.support.waiting import wait_until

import engram
from engram import Callback, EngramError, Recipe
from engram.data.datasets import Splits
from engram.report.run_page import read_history
from engram.train.runs import trackers
from engram.train.runs.callbacks import RunStart
from engram.train.runs.trackers import CSVLog, MLflow, TensorBoard, WeightsAndBiases, trackers_named

QUICK = Recipe(steps=6, patience=0, batch=16, evaluations=6, workers=0, checkpoint_seconds=0)
STEPS = [1, 2, 3, 4, 5, 6]


class Killed(Callback):
    """Ends the run after a step, with the checkpoint of an earlier one."""

    def __init__(self, out: Path, step: int = 4, checkpoint: int = 2) -> None:
        self.file = out.with_suffix(".run") / "checkpoint.safetensors"
        self.at, self.checkpoint, self.kept = step, checkpoint, b""

    def checkpointed(self, step: int) -> None:
        if step == self.checkpoint:
            self.kept = self.file.read_bytes()
        if step == self.at:
            self.file.write_bytes(self.kept)
            raise KeyboardInterrupt


def interrupted_and_resumed(backbone: Path, splits: Splits, out: Path, *callbacks: Callback) -> Any:
    """A run that is stopped and goes on, as two processes would do it."""
    first = [*callbacks, Killed(out)]
    with pytest.raises(KeyboardInterrupt):
        engram.fit(start(backbone, splits), "colours", splits, QUICK, out=out, callbacks=first)
    return engram.fit(
        start(backbone, splits), "colours", splits, QUICK, out=out, callbacks=callbacks, resume=True
    )


# CSV and TensorBoard


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_a_run_logs_into_its_folder_and_no_step_twice(
    small_backbone: Path, splits: Splits, tmp_path: Path
) -> None:
    result = interrupted_and_resumed(small_backbone, splits, tmp_path / "c.safetensors")
    with (tmp_path / "c.run" / "history.csv").open(newline="") as file:
        rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    assert rows == result.history
    seen = scalars(tmp_path / "c.run", "val_loss")
    assert [step for step, _ in seen] == STEPS
    assert [value for _, value in seen] == pytest.approx([row["val_loss"] for row in rows])


@pytest.mark.parametrize("text", ["no steps\n1\n", "step,loss\nx,1\n", "step,loss\n1\n", '"'])
def test_a_damaged_history_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "history.csv").write_text(text)
    start = RunStart(task="t", data="d", settings={}, folder=tmp_path, step=3)
    with pytest.raises(EngramError, match="no history of a run"):
        CSVLog().started(start)
    assert read_history(tmp_path / "history.csv") == []  # a report does without the curve


def test_a_log_goes_where_it_is_told(small_backbone: Path, splits: Splits, tmp_path: Path) -> None:
    elsewhere = [CSVLog(tmp_path / "log.csv"), TensorBoard(tmp_path / "board")]
    model = start(small_backbone, splits)
    engram.fit(model, "colours", splits, QUICK, callbacks=elsewhere)
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 7
    assert [step for step, _ in scalars(tmp_path / "board", "loss")] == STEPS
    out = tmp_path / "c.safetensors"
    engram.fit(model, "colours", splits, QUICK, callbacks=elsewhere, out=out)
    assert not (tmp_path / "c.run" / "history.csv").exists()
    assert not list((tmp_path / "c.run").glob("events.*"))


def test_a_new_run_keeps_no_curves_of_the_one_it_replaces(
    small_backbone: Path, splits: Splits, tmp_path: Path
) -> None:
    out = tmp_path / "c.safetensors"
    for _ in range(2):
        model = start(small_backbone, splits)
        engram.fit(model, "colours", splits, QUICK, out=out, overwrite=True)
    assert [step for step, _ in scalars(tmp_path / "c.run", "loss")] == STEPS


def test_without_a_folder_a_log_needs_a_path(small_backbone: Path, splits: Splits) -> None:
    with pytest.raises(EngramError, match="CSVLog needs a path"):
        engram.fit(start(small_backbone, splits), "colours", splits, QUICK, callbacks=[CSVLog()])


# MLflow


@pytest.fixture
def mlflow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store of files, and no setting of MLflow from outside."""
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(
        "MLFLOW_ALLOW_FILE_STORE", "true"
    )  # the tracker's own stays in no other test
    return (tmp_path / "mlruns").as_uri()


def test_mlflow_goes_on_with_the_same_run_and_logs_no_step_twice(
    small_backbone: Path, splits: Splits, tmp_path: Path, mlflow_store: str
) -> None:
    from mlflow import MlflowClient

    client, tracker = MlflowClient(tracking_uri=mlflow_store), MLflow(mlflow_store)
    statuses: list[str] = []

    class Status(Callback):
        def started(self, _: Any) -> None:
            statuses.extend(run.info.status for run in runs())

        def stopped(self, _: BaseException) -> None:
            statuses.extend(run.info.status for run in runs())

    def runs() -> list[Any]:
        experiment = client.get_experiment_by_name("engram")
        return list(client.search_runs([experiment.experiment_id]))

    out = tmp_path / "c.safetensors"
    result = interrupted_and_resumed(small_backbone, splits, out, tracker, Status())
    assert statuses == ["RUNNING", "KILLED", "RUNNING"]
    (run,) = runs()
    assert (run.info.status, run.info.run_name) == ("FINISHED", "colours")
    assert run.data.params["cells"] == "3"
    assert run.data.params["steps"] == "6"
    assert run.data.tags["engram"] == str(out)
    logged = client.get_metric_history(run.info.run_id, "val_loss")
    assert [(point.step, point.value) for point in logged] == [
        (row["step"], row["val_loss"]) for row in result.history
    ]
    assert run.data.metrics["final_val_accuracy"] == result.metrics["val"]["accuracy"]


def test_a_store_that_is_down_stops_no_run_that_has_begun(
    small_backbone: Path, splits: Splits, tmp_path: Path, mlflow_store: str
) -> None:
    from mlflow import MlflowClient

    store, away = tmp_path / "mlruns", tmp_path / "away"

    class Down(Callback):
        def step(self, step: int, loss: float) -> None:
            if step == 2:
                store.rename(away)
            if step == 4:
                away.rename(store)

    model = start(small_backbone, splits)
    with pytest.warns(engram.errors.Notice, match="MLflow does not answer"):
        engram.fit(model, "colours", splits, QUICK, callbacks=[MLflow(mlflow_store), Down()])
    client = MlflowClient(tracking_uri=mlflow_store)
    (run,) = client.search_runs([client.get_experiment_by_name("engram").experiment_id])
    assert [point.step for point in client.get_metric_history(run.info.run_id, "loss")] == STEPS


def test_a_store_that_cannot_be_used_is_refused_at_the_start(
    small_backbone: Path, splits: Splits, mlflow_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "_has_database", lambda: False)  # as with mlflow-skinny
    for uri, match in (
        ("nowhere://", "MLflow cannot be used"),
        ("sqlite:///m.db", "is a database"),
    ):
        with pytest.raises(EngramError, match=match):
            engram.fit(
                start(small_backbone, splits), "colours", splits, QUICK, callbacks=[MLflow(uri)]
            )


# Weights & Biases


@pytest.fixture
def wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Offline, with every folder of its own here; its service ends with the test."""
    wandb = pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    yield tmp_path / "wandb"
    wandb.teardown()
    children = ["ps", "-o", "args=", "--ppid", str(os.getpid())]
    wait_until(lambda: b"wandb" not in subprocess.run(children, capture_output=True).stdout)


def records(folder: Path) -> Iterator[Any]:
    """What Weights & Biases would send, run after run: its files are logs as LevelDB has them."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("offline-run-*/run-*.wandb"), key=lambda p: p.stat().st_mtime):
        data, at, parts = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:  # no record begins so close to the end of a block
                at += 32768 - at % 32768
                continue
            _, length, place = struct.unpack("<IHB", data[at : at + 7])
            parts += data[at + 7 : at + 7 + length]
            at += 7 + length
            if place in (1, 4):  # whole, or the last part
                yield Record.FromString(parts)
                parts = b""


def test_weights_and_biases_goes_on_with_the_same_run_and_logs_no_step_twice(
    small_backbone: Path, splits: Splits, tmp_path: Path, wandb_offline: Path
) -> None:
    out = tmp_path / "c.safetensors"
    result = interrupted_and_resumed(small_backbone, splits, out, WeightsAndBiases())
    found = list(records(wandb_offline))
    runs = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert len({run.run_id for run in runs}) == 1
    assert {(run.project, run.display_name) for run in runs} == {("engram", "colours")}
    history: list[Mapping[str, str]] = [
        {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]
    assert [(int(row["_step"]), float(row["val_loss"])) for row in history] == [
        (row["step"], row["val_loss"]) for row in result.history
    ]
    exits = [r.exit.exit_code for r in found if r.WhichOneof("record_type") == "exit"]
    assert exits == [130, 0]


def test_an_account_that_is_missing_is_a_sentence(
    small_backbone: Path, splits: Splits, wandb_offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "short")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(EngramError, match="Weights & Biases cannot be used"):
        engram.fit(
            start(small_backbone, splits), "colours", splits, QUICK, callbacks=[WeightsAndBiases()]
        )


# By name


def test_a_log_is_named() -> None:
    first, second = trackers_named(["tensorboard", "mlflow", "mlflow"])
    assert isinstance(first, TensorBoard)
    assert isinstance(second, MLflow)
    with pytest.raises(EngramError, match="no log 'board'"):
        trackers_named(["board"])


@pytest.mark.parametrize(
    ("name", "package"),
    [("tensorboard", "tensorboard"), ("mlflow", "mlflow-skinny"), ("wandb", "wandb")],
)
def test_a_package_that_is_missing_is_named(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EngramError, match=f"pip install .*{package}"):
        trackers_named([name])
