"""The folder of a run: its checkpoint, the record that it finished, a plot; written atomically."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch import Tensor

from engram.errors import EngramError, Interrupted, Notice, flag
from engram.model import MemoryViT
from engram.store.engram import Engram
from engram.store.format import check_free, read_engram
from engram.train.runs.callbacks import Callbacks, RunStart
from engram.train.runs.plots import learning_curves
from engram.train.runs.result import Result
from engram.util.charts import side_by_side
from engram.util.documents import load_json, read_toml
from engram.util.files import make_private_folder, write_atomically
from engram.util.processes import ProcessGroup
from engram.util.progress import Progress, silent
from engram.util.text import utf8

ResultT = TypeVar("ResultT", bound=Result)

_FOLDER = ".run"
RECIPE_FILE = "recipe.toml"
_CHECKPOINT, _FINISHED = "checkpoint.safetensors", "finished.json"
_UNFINISHED = (_CHECKPOINT, "variant-*")  # what a run leaves that was interrupted
_UNREADABLE = "unreadable.txt"
_FILES = (
    *(*_UNFINISHED, _FINISHED, _UNREADABLE, "history.*", "sweep.*", "report.html"),
    *("events.out.tfevents.*", "mlflow.json", "wandb.json", RECIPE_FILE),
)


def run_folder(out: Path) -> Path:
    """The folder of a run, next to its engram."""
    return out.with_name(f"{out.name.removesuffix('.safetensors')}{_FOLDER}")


def backbone_of_run(out: Path) -> str | None:
    """The backbone of the run in the folder of `out`, by its recipe file; None if there is none."""
    with contextlib.suppress(EngramError, KeyError):
        return str(read_toml(run_folder(out) / RECIPE_FILE)["backbone"])
    return None


def unreadable_list(out: Path) -> Path:
    """Path of a run's list of images that could not be read, with the reasons."""
    return run_folder(out) / _UNREADABLE


def check_out(out: Path, *, overwrite: bool, resume: bool) -> None:
    """Refuse a place for an engram that a run would not replace or continue."""
    if out.exists() and _was_interrupted(run_folder(out)) and not (overwrite or resume):
        raise _holds_interrupted(run_folder(out))
    check_free(out, overwrite or (resume and has_state(out)))


def _was_interrupted(folder: Path) -> bool:
    """Whether a run left a checkpoint, or a sweep some of its variants."""
    return any(found for name in _UNFINISHED for found in folder.glob(name))


def _holds_interrupted(folder: Path) -> EngramError:
    return EngramError(
        f"{folder} holds an interrupted run; continue it with {flag('resume', True)}, or start "
        f"again with {flag('overwrite', True)}."
    )


def _is_another(run: str) -> EngramError:
    return EngramError(
        f"{run} had other settings, data or backbone; repeat its command with "
        f"{flag('resume', True)}, or start again with {flag('overwrite', True)}."
    )


def _plain(value: Any) -> Any:
    """Part of a result for JSON."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def has_state(out: Path) -> bool:
    """Whether an earlier run left something to resume, or the record that it finished."""
    folder = run_folder(out)
    return (folder / _FINISHED).exists() or _was_interrupted(folder)


def _remove(folder: Path, patterns: Iterable[str]) -> None:
    """Remove what is in a folder by these patterns."""
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        if path.is_file():
            path.unlink()
        elif path.name.endswith(_FOLDER):  # that of a variant
            shutil.rmtree(path)


@dataclass(eq=False)
class Run:
    """One run: who shares the work, who is told of it, and the folder next to its engram.

    The folder has a checkpoint, a record and a plot. Without `out` there is none, and nothing is
    written. With `resume`, an interrupted run continues and a finished one is left as it is. With
    `overwrite`, what cannot be resumed is replaced. While a run lives, no other run can have its
    folder.
    """

    path: str | os.PathLike[str] | None  # of the engram: `out`
    processes: ProcessGroup
    overwrite: bool = False
    resume: bool = False
    test: bool = False  # measure the test split once, at the end
    progress: Progress = silent
    identity: str = field(default="", init=False)
    stopped_at: str = field(default="", init=False)  # where Ctrl-C ended it with the best so far

    def __post_init__(self) -> None:
        self.began = time.perf_counter()
        self.callbacks = Callbacks((), self.processes, RunStart(task="", data="", settings={}))
        self.out = None if self.path is None else Path(self.path)
        self.folder = None if self.out is None else run_folder(self.out)
        if self.out is not None:
            check_out(self.out, overwrite=self.overwrite, resume=self.resume)

    def __enter__(self) -> Run:
        if self.folder is None:
            return self
        self._lock = FileLock(self.folder / "lock", timeout=0, mode=0o600)
        try:
            make_private_folder(self.folder)
            if self.processes.main:
                self._lock.acquire()
        except Timeout:
            raise EngramError(
                f"Another process is training {self.out} at this moment; wait for it, stop it, or "
                f"choose another {flag('out')}."
            ) from None
        except OSError as error:
            raise EngramError(
                f"{self.out} cannot be written ({error.strerror}); choose another {flag('out')}."
            ) from None
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.callbacks.ended(error)
        finally:
            if self.folder is not None:
                self._lock.release()

    @property
    def writes(self) -> bool:
        """Whether this process writes into the folder."""
        return self.folder is not None and self.processes.main

    def file(self, name: str) -> Path:
        """A file of the folder, which this run has."""
        assert self.folder is not None
        return self.folder / name

    @property
    def checkpoint(self) -> Path:
        return self.file(_CHECKPOINT)

    def finished(self, identity: str, results: type[ResultT]) -> tuple[ResultT, Engram] | None:
        """The result and the engram of this very run, if it is finished already.

        Only with `resume`, which may be asked for again and again: a finished run is a success. An
        engram that another run wrote is not replaced without `overwrite`.
        """
        self.identity = identity
        if not self.resume or self.out is None or not self.out.exists():
            return None
        was = identity
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, EngramError):
            record, engram = load_json(self.file(_FINISHED).read_bytes()), read_engram(self.out)
            was = str(record["identity"])
            same = (was, record["content"]) == (identity, engram.content)
            if same and not self.checkpoint.exists():
                return results.recorded(engram, self.out, record["result"]), engram
        if was != identity and not self.overwrite:
            raise _is_another(f"{self.out} exists already, and its run")
        check_free(self.out, self.overwrite or _was_interrupted(self.file("")))
        return None

    def resumes(self) -> bool:
        """Whether an interrupted run is there to go on with; if not, the folder is cleared.

        None is given up by accident: without `resume` and `overwrite`, it is an EngramError.
        """
        if self.folder is not None and _was_interrupted(self.folder):
            if self.resume:
                return True
            if not self.overwrite:
                raise _holds_interrupted(self.folder)
        self._clear()
        return False

    def _clear(self) -> None:
        """Remove what an older run left in the folder, and say so where a resume was asked for."""
        if not self.writes:
            return
        if self.resume:
            notice = f"There is nothing to resume in {self.folder}; training starts anew."
            warnings.warn(notice, Notice, stacklevel=2)
        _remove(self.file(""), _FILES)

    def begin(self, identity: str, feed: list[str]) -> dict[str, Any] | None:
        """The state to resume from, or None after clearing the folder for a new run.

        A checkpoint of another run is an EngramError, unless `overwrite` gives it up. `feed` is the
        cache, on or off, and a hash of what is in it: free disk space may decide about the cache,
        so the error says what to do.
        """
        if self.resumes():
            try:
                if self.checkpoint.exists():
                    return self._state(identity, feed)
            except EngramError:
                if not self.overwrite:
                    raise
            self._clear()
        return None

    def _state(self, identity: str, feed: list[str]) -> dict[str, Any]:
        try:
            with safetensors.safe_open(self.checkpoint, "pt") as file:
                state: dict[str, Any] = load_json(file.metadata()["run"])
                state["tensors"] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise EngramError(
                f"The checkpoint {self.checkpoint} cannot be read ({error}); start "
                f"again with {flag('overwrite', True)}."
            ) from None
        was = state.get("feed", feed)
        if state.get("identity") == identity and was[0] != feed[0]:
            how = {"on": "with the cache", "off": "without the cache"}
            raise EngramError(
                f"The run in {self.folder} ran {how[was[0]]}, and this one would run "
                f"{how[feed[0]]}; continue with {flag('resume', True)} and "
                f"{flag('cache', was[0])}, or start again with {flag('overwrite', True)}."
            )
        if (state.get("identity"), was) != (identity, feed):
            raise _is_another(f"The run in {self.folder}")
        return state

    def save(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        metadata = {"run": json.dumps(state, default=str)}
        write_atomically(self.checkpoint, safetensors.torch.save(kept, metadata), owner_only=True)

    def write(self, name: str, text: str) -> None:
        """Write a file of the folder; only the main process does."""
        if self.writes:
            write_atomically(self.file(name), utf8(text), owner_only=True)

    def list_unreadable(self, unreadable: Mapping[str, str]) -> None:
        """Write why pictures could not be read, a line for each."""
        lines = (f"{reason}\n" for reason in sorted(unreadable.values()))
        self.write(_UNREADABLE, "".join(lines))

    def end(self, model: MemoryViT, result: ResultT, training: Mapping[str, Any]) -> ResultT:
        """Write the engram with a record of its training, and tell the callbacks.

        A run that Ctrl-C stopped is not done and can be resumed: `Interrupted` is raised.
        """
        seconds, interrupted = time.perf_counter() - self.began, bool(self.stopped_at)
        result = replace(result, path=self.out, seconds=seconds, interrupted=interrupted)
        if self.out is not None and self.writes:
            model.save(result.task, self.out, metrics=result.metrics, recipe=training)
            if not interrupted:
                self._finish(model.engram(result.task).content, result)
        if interrupted:
            raise self.interruption(self.stopped_at, result)
        self.callbacks.finished(result)
        return result

    def _finish(self, content: str, result: Result) -> None:
        """Record that the engram is written, draw the history, remove what was for a resume."""
        record = {"identity": self.identity, "content": content, "result": result.record()}
        self.write(_FINISHED, json.dumps(record, default=_plain))
        if result.history:
            with contextlib.suppress(EngramError):  # a full disk: the engram is what was asked for
                self.write("history.svg", side_by_side(learning_curves(result.history)))
        _remove(self.file(""), _UNFINISHED)

    def interruption(self, where: str, result: Result | None = None) -> Interrupted:
        """The error of a run that was stopped; `result` is that of the best engram so far."""
        stopped = f"Stopped at {where}."
        if result is not None:
            stopped += f" {result.path} is the best so far."
        if self.folder is not None:
            stopped += f" Run the same command with {flag('resume', True)} to continue."
        return Interrupted(stopped, result)
