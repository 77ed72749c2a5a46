"""What a run keeps on disk while it trains: checkpoint, log and plot, written atomically."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from engram.errors import EngramError
from engram.train.plots import learning_curves
from engram.util.charts import side_by_side
from engram.util.files import write_atomically
from engram.util.processes import Team
from engram.util.text import utf8


def run_folder(out: Path) -> Path:
    """The folder of a run, next to its engram."""
    return out.with_name(f"{out.name.removesuffix('.safetensors')}.run")


class Run:
    """The folder next to the engram that a run will write: checkpoint, log and plot."""

    def __init__(self, out: Path, team: Team, overwrite: bool) -> None:
        if out.is_dir():
            raise EngramError(f"{out} is a folder; -o names the engram's file.")
        if out.exists() and not overwrite:
            raise EngramError(
                f"{out} exists already; choose another -o, or replace it with --overwrite."
            )
        self.out, self.team, self.overwrite = out, team, overwrite
        self.folder = run_folder(out)
        self._writer: Any = None

    def __enter__(self) -> Run:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise EngramError(
                f"{self.out} cannot be written ({error.strerror}); choose another -o."
            ) from None
        return self

    def __exit__(self, *exception: object) -> None:
        if self._writer is not None:
            self._writer.close()

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.safetensors"

    def check_interrupted(self, interrupted: bool, resume: bool) -> None:
        """Refuse to start over an interrupted run without `overwrite`."""
        if interrupted and not resume and not self.overwrite:
            raise EngramError(
                f"{self.folder} holds an interrupted run; continue it with --resume, or start "
                "again with --overwrite."
            )

    def clear(self) -> None:
        """Remove what an older run left in the folder."""
        if self.team.main:
            for pattern in ("unreadable.txt", "history.*", "sweep.*", "report.html"):
                for path in filter(Path.is_file, self.folder.glob(pattern)):
                    path.unlink()

    def begin(self, identity: str, feed: list[str], resume: bool) -> dict[str, Any] | None:
        """The state to resume from, or None after clearing the folder for a new run.

        A checkpoint of another run is an EngramError. `feed` is the cache, on or off, and a hash of
        what is in it: free disk space may decide about the cache, so the error says what to do.
        """
        interrupted = self.checkpoint.exists()
        self.check_interrupted(interrupted, resume)
        if not (interrupted and resume):
            self.clear()
            return None
        try:
            with safetensors.safe_open(self.checkpoint, "pt") as file:
                state: dict[str, Any] = json.loads(file.metadata()["run"])
                state["tensors"] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise EngramError(
                f"The checkpoint {self.checkpoint} cannot be read ({error}); start "
                "again with --overwrite."
            ) from None
        was = state.get("feed", feed)
        if state["identity"] == identity and was[0] != feed[0]:
            how = {"on": "with the cache", "off": "without the cache"}
            raise EngramError(
                f"The run in {self.folder} ran {how[was[0]]}, and this one would run "
                f"{how[feed[0]]}; continue with --resume --cache {was[0]}, or start again with "
                "--overwrite."
            )
        if (state["identity"], was) != (identity, feed):
            raise EngramError(
                f"The run in {self.folder} had other settings, data or trunk; repeat its "
                "command with --resume, or start again with --overwrite."
            )
        return state

    def save(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        metadata = {"run": json.dumps(state, default=str)}
        write_atomically(self.checkpoint, safetensors.torch.save(kept, metadata))

    def log(self, history: Sequence[Mapping[str, float]]) -> None:
        """The history as CSV and, where TensorBoard is installed, as its events."""
        text = io.StringIO()
        rows = csv.DictWriter(text, list(history[-1]))
        rows.writeheader()
        rows.writerows(history)
        self.write("history.csv", text.getvalue())
        if self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return
            self._writer = SummaryWriter(str(self.folder))
        for key, value in history[-1].items():
            self._writer.add_scalar(key, value, history[-1]["step"])

    def write(self, name: str, text: str) -> None:
        write_atomically(self.folder / name, utf8(text))

    def list_unreadable(self, unreadable: Mapping[str, str]) -> None:
        """Write why pictures could not be read, a line for each."""
        lines = (f"{reason}\n" for reason in sorted(unreadable.values()))
        self.write("unreadable.txt", "".join(lines))

    def finish(self, history: Sequence[Mapping[str, float]]) -> None:
        """The engram is written: draw the history and let the checkpoint go."""
        if history:
            with contextlib.suppress(EngramError):  # a full disk: the engram is what was asked for
                self.write("history.svg", side_by_side(learning_curves(history)))
        self.checkpoint.unlink(missing_ok=True)
