"""Callbacks that keep the curves of a run: as CSV, for TensorBoard, MLflow, Weights & Biases.

`--log` names them. A run with a folder writes the first two anyway, TensorBoard's where it is
installed. MLflow and Weights & Biases keep the id of their run in the folder: a run that is resumed
goes on in the same one, and logs no step twice.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engram.data.datasets import Splits
from engram.errors import EngramError, Interrupted, Notice, flag
from engram.model import MemoryViT
from engram.tasks.task_settings import TaskSettings
from engram.train.recipe import Recipe
from engram.train.runs.callbacks import Callback, Callbacks, RunStart
from engram.train.runs.result import Result
from engram.train.runs.run import RECIPE_FILE, Run
from engram.util.documents import load_json, to_toml
from engram.util.files import make_folder, private, write_atomically
from engram.util.optional import require
from engram.util.text import first_line, utf8


def history_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a history that `CSVLog` wrote; an EngramError if it is damaged."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file, strict=True))
        for row in rows:
            int(row["step"])
            list(map(float, row.values()))
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise EngramError(
            f"{path} is no history of a run ({first_line(error)}); move it away, or start again "
            f"with {flag('overwrite', True)}."
        ) from None
    return rows


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same columns as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[-1]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


class RecipeFile(Callback):
    """Writes `recipe.toml` into the run's folder: with `--recipe`, the file repeats the run.

    Args:
        more: What a run does not know of itself, such as how its data was read.
    """

    def __init__(self, more: Mapping[str, Any] | None = None) -> None:
        self.more = more or {}

    def started(self, start: RunStart) -> None:
        path = start.file(RECIPE_FILE, "RecipeFile")
        settings = {**start.settings, **self.more}
        given = {name: value for name, value in settings.items() if value not in (None, "", (), [])}
        command = f"engram {'sweep' if 'seeds' in settings else 'fit'} DATA --task {start.task}"
        lead = (
            "# The settings of this run. The same data and this command repeat it:\n"
            f"# {command} --recipe recipe.toml -o FILE.safetensors\n"
        )
        write_atomically(path, utf8(lead + to_toml(given)), owner_only=True)


class CSVLog(Callback):
    """Writes the history as CSV, a row for each evaluation.

    Args:
        path: The file. By default `history.csv` in the run's folder.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = path

    def started(self, start: RunStart) -> None:
        self._path = Path(self.path) if self.path else start.file("history.csv", "CSVLog")
        self._rows: list[Mapping[str, Any]] = []
        if start.step and self._path.exists():
            self._rows += [r for r in history_rows(self._path) if int(r["step"]) <= start.step]

    def evaluated(self, row: Mapping[str, float]) -> None:
        self._rows.append(row)
        write_atomically(self._path, utf8(csv_text(self._rows)), owner_only=True)


class TensorBoard(Callback):
    """Writes the history as TensorBoard's events (extra `plots`).

    Args:
        folder: Where to write them. By default the run's folder.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = folder
        _, self._records, self._events = (
            require(module, extra="plots", purpose="Logging for TensorBoard")
            for module in (
                "tensorboard",
                "tensorboard.summary.writer.record_writer",
                "tensorboard.compat.proto.event_pb2",
            )
        )

    def started(self, start: RunStart) -> None:
        folder = Path(self.folder) if self.folder else start.file("", "TensorBoard")
        make_folder(folder)
        # Not by SummaryWriter, which puts the name of the machine into that of the file.
        path = folder / f"events.out.tfevents.{time.time():.6f}"
        self._file = open(path, "xb", opener=private)  # noqa: SIM115
        self._writer = self._records.RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        if start.step:
            # What was logged behind the checkpoint will be logged again, so the old values go.
            began = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(step=start.step + 1, session_log=began)

    def _write(self, **event: Any) -> None:
        written = self._events.Event(wall_time=time.time(), **event)
        self._writer.write(written.SerializeToString())
        self._file.flush()

    def evaluated(self, row: Mapping[str, float]) -> None:
        values = [{"tag": name, "simple_value": value} for name, value in _values(row)]
        self._write(step=int(row["step"]), summary={"value": values})

    def finished(self, result: Result) -> None:
        self._file.close()

    def stopped(self, error: BaseException) -> None:
        self._file.close()


class _Remembered:
    """State of a tracker in the run's folder: the id of its run, and the last step it logged."""

    def __init__(self, start: RunStart, name: str) -> None:
        self._path = None if start.folder is None else start.folder / name
        self.run, self.step = "", 0
        if self._path is not None and self._path.exists():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                kept = load_json(self._path.read_bytes())
                self.run, self.step = str(kept["run"]), int(kept["step"])

    def set(self, run: str, step: int) -> None:
        self.run, self.step = run, step
        if self._path is not None:
            text = json.dumps({"run": run, "step": step})
            write_atomically(self._path, utf8(text), owner_only=True)


class MLflow(Callback):
    """Logs settings, history and final metrics as a run of MLflow (extra `mlflow`).

    Args:
        uri: The tracking server or store. By default what `MLFLOW_TRACKING_URI` says, or a store
            in this folder: `mlflow.db` with the whole of MLflow, `mlruns/` with mlflow-skinny.
        experiment: By default what `MLFLOW_EXPERIMENT_NAME` says, or `engram`.
    """

    def __init__(self, uri: str = "", experiment: str = "") -> None:
        self._mlflow = require("mlflow", extra="mlflow", purpose="Logging for MLflow")
        self.uri = uri
        self.experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "engram")

    def started(self, start: RunStart) -> None:
        self._kept = _Remembered(start, "mlflow.json")
        self._waiting: list[Mapping[str, float]] = []
        uri = self.uri
        if not uri and not self._mlflow.is_tracking_uri_set() and not _has_database():
            uri = Path("mlruns").resolve().as_uri()
        uri = uri or self._mlflow.get_tracking_uri()
        if uri.startswith("file:") or "://" not in uri:
            # MLflow 3 refuses a store of files, unless the user says that it is wanted; it is.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        if uri.partition(":")[0].partition("+")[0] in _DATABASES and not _has_database():
            raise EngramError(
                f"MLflow's store {uri} is a database, which the package mlflow-skinny cannot use; "
                "pip install mlflow, or let MLFLOW_TRACKING_URI name a server or a folder."
            )
        try:
            self._client = self._mlflow.MlflowClient(tracking_uri=uri)
            run = self._resumed() or self._created(start)
        except Exception as error:  # whatever its stores and servers raise
            raise EngramError(
                f"MLflow cannot be used at {uri} ({first_line(error)}); check "
                "MLFLOW_TRACKING_URI, or leave mlflow out of --log."
            ) from error
        self._kept.set(run, self._kept.step)

    def _resumed(self) -> str:
        """The run that this one goes on with, if it is still there."""
        if self._kept.run:
            with contextlib.suppress(self._mlflow.MlflowException):
                self._client.update_run(self._kept.run, status="RUNNING")
                return self._kept.run
        return ""

    def _created(self, start: RunStart) -> str:
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else None
        experiment = experiment or self._client.create_experiment(self.experiment)
        run: str = self._client.create_run(experiment, run_name=start.task).info.run_id
        param = self._mlflow.entities.Param
        settings = {"task": start.task, "data": start.data, **start.settings}
        params = [param(name, str(value)[:500]) for name, value in settings.items()]
        for first in range(0, len(params), 100):  # as many as MLflow takes at once
            self._client.log_batch(run, params=params[first : first + 100])
        self._kept.step = 0
        return run

    def evaluated(self, row: Mapping[str, float]) -> None:
        if row["step"] > self._kept.step:
            self._waiting.append(row)
            self._send()

    def _send(self) -> None:
        """Log what is waiting; a server that does not answer stops no run."""
        with self._patient("the next evaluation is logged with this one"):
            while self._waiting:
                row = self._waiting[0]
                self._log(_values(row), int(row["step"]))
                self._kept.set(self._kept.run, int(row["step"]))
                del self._waiting[0]

    @contextlib.contextmanager
    def _patient(self, then: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever its stores and servers raise
            notice = f"MLflow does not answer ({first_line(error)}); {then}."
            warnings.warn(notice, Notice, stacklevel=4)

    def _log(self, values: Iterator[tuple[str, float]], step: int) -> None:
        now, metric = int(time.time() * 1000), self._mlflow.entities.Metric
        metrics = [metric(name, value, now, step) for name, value in values]
        self._client.log_batch(self._kept.run, metrics=metrics)

    def finished(self, result: Result) -> None:
        self._send()
        with self._patient("its run lacks the final metrics"):
            self._log(_final(result), self._kept.step)
            self._client.set_tag(self._kept.run, "regime", result.regime)
            self._client.set_tag(self._kept.run, "engram", str(result.path))
            self._client.set_terminated(self._kept.run, "FINISHED")

    def stopped(self, error: BaseException) -> None:
        self._client.set_terminated(self._kept.run, "KILLED" if _asked(error) else "FAILED")


class WeightsAndBiases(Callback):
    """Logs settings, history and final metrics as a run of Weights & Biases (extra `wandb`).

    What is not given here, W&B takes from its own environment variables, such as `WANDB_MODE`,
    `WANDB_DIR` and `WANDB_ENTITY`. With `WANDB_MODE=offline` it needs neither account nor network.

    Args:
        project: By default what `WANDB_PROJECT` says, or `engram`.
    """

    def __init__(self, project: str = "") -> None:
        self._wandb = require("wandb", extra="wandb", purpose="Logging for Weights & Biases")
        self.project = project or os.environ.get("WANDB_PROJECT", "engram")

    def started(self, start: RunStart) -> None:
        self._kept = _Remembered(start, "wandb.json")
        wandb = self._wandb
        try:
            self._run = wandb.init(
                project=self.project,
                name=start.task,
                id=self._kept.run or None,
                resume="allow" if self._kept.run else None,
                config={"task": start.task, "data": start.data, **start.settings},
                settings=wandb.Settings(console="off"),  # stdout is for what the command prints
            )
        except (wandb.Error, OSError) as error:
            raise EngramError(
                f"Weights & Biases cannot be used ({first_line(error)}); run wandb login, set "
                "WANDB_MODE=offline, or leave wandb out of --log."
            ) from error
        self._kept.set(self._run.id, self._kept.step)

    def evaluated(self, row: Mapping[str, float]) -> None:
        step = int(row["step"])
        if step > self._kept.step:
            self._run.log(dict(_values(row)), step=step)
            self._kept.set(self._run.id, step)

    def finished(self, result: Result) -> None:
        final = {**dict(_final(result)), "regime": result.regime, "engram": str(result.path)}
        self._run.summary.update(final)
        self._run.finish(exit_code=0)

    def stopped(self, error: BaseException) -> None:
        self._run.finish(exit_code=130 if _asked(error) else 1)


_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")

#: The names of `--log`.
TRACKERS: Mapping[str, type[Callback]] = {
    "csv": CSVLog,
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
}


def trackers_named(names: Sequence[str]) -> list[Callback]:
    """A callback for each name of `--log`; one that cannot be had is an EngramError."""
    for name in names:
        if name not in TRACKERS:
            raise EngramError(
                f"There is no log {name!r}; --log takes {', '.join(TRACKERS)}, with commas between "
                "them."
            )
    return [TRACKERS[name]() for name in dict.fromkeys(names)]


def settings_of(
    model: MemoryViT, splits: Splits, task: TaskSettings, recipe: Recipe, **others: Any
) -> dict[str, Any]:
    """Settings that repeat a run on the same data: backbone, kind, task, recipe, and `others`."""
    source = model.backbone.source
    backbone = os.path.abspath(source) if source != "pico" and os.path.exists(source) else source
    about = {"backbone": backbone, "kind": splits.kind, **task.to_dict(), **recipe.to_dict()}
    return {**about, **others}


def run_callbacks(
    given: Sequence[Callback], task: str, splits: Splits, settings: Mapping[str, Any], run: Run
) -> Callbacks:
    """Callbacks of a run: those that were given, and the logs in its folder.

    A log of the folder is left out where one of the same class is given.
    """
    standard = list[Callback]()
    if run.writes:
        standard += [RecipeFile(), CSVLog()]
        with contextlib.suppress(EngramError):  # it is not installed
            standard.append(TensorBoard())
    classes = {type(one) for one in given}
    start = RunStart(task=task, data=splits.name, settings=settings, folder=run.folder)
    standard = [one for one in standard if type(one) not in classes]
    return Callbacks([*standard, *given], run.processes, start)


def _values(row: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in row.items() if name != "step")


def _final(result: Result) -> Iterator[tuple[str, float]]:
    """The metrics of the engram that was kept, by split; those that are one number."""
    for split, metrics in result.metrics.items():
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                yield f"final_{split}_{name}", float(value)


def _asked(error: BaseException) -> bool:
    """Whether somebody stopped the run."""
    return isinstance(error, (Interrupted, KeyboardInterrupt))


def _has_database() -> bool:
    """Whether MLflow can use a database in this folder, its default: mlflow-skinny cannot."""
    return importlib.util.find_spec("sqlalchemy") is not None
