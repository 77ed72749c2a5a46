"""Engrams and what belongs to them, on their way between machines that may share no disk."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from engram.errors import EngramError
from engram.farm.jobs import FarmJob
from engram.tasks.settings import TaskSettings
from engram.train.options import RunOptions, named
from engram.train.run import run_folder
from engram.util.files import make_private_folder, write_atomically
from engram.util.text import printable

Files = Mapping[str, bytes]  # by their paths below the farm's folder
_MARK = "mark"  # a file of the farm's folder: a machine that sees it there shares the disk
_STAYS = ("checkpoint.safetensors", "lock")


def mark(folder: Path) -> str:
    """What tells the farm's folder from others of the same path, on other machines."""
    path = folder / _MARK
    if not path.exists():
        write_atomically(path, secrets.token_hex(8).encode(), owner_only=True)
    return path.read_text(encoding="ascii")


def as_seen_anywhere(job: FarmJob) -> FarmJob:
    """The job with absolute paths: processes on other machines have other current folders."""
    backbone = job.given[RunOptions].get("backbone", "auto")
    job = job.but(RunOptions, backbone=_absolute(backbone))
    if job.extends:
        own = {str(job.out.with_name(f"{name}.safetensors")) for name in job.parents}
        parents = []
        for text in job.extends:
            name, path = ("", text) if text in own else named(text)
            path = str(Path(path).absolute()) if text in own else _absolute(path)
            parents.append(f"{name}={path}" if name else path)
        job = job.but(TaskSettings, extends=tuple(parents))
    data = "::".join(map(_absolute, job.data.split("::")))  # images::masks
    return replace(job, data=data, out=job.out.absolute())


def _absolute(text: str) -> str:
    return str(Path(text).absolute()) if Path(text).exists() else text


def placed(job: FarmJob, marked: str) -> FarmJob:
    """The job with its engram where this machine keeps it: in the farm's folder, if it is here."""
    folder = job.out.parent
    with contextlib.suppress(OSError):
        if (folder / _MARK).read_text(encoding="ascii") == marked:
            return job
    own = Path(tempfile.gettempdir()) / f"engram-farm-{marked}-{job.name}"
    parents = {str(folder / f"{name}.safetensors") for name in job.parents}
    moved = [str(own / Path(text).name) if text in parents else text for text in job.extends]
    if moved:
        job = job.but(TaskSettings, extends=tuple(moved))
    return replace(job, out=own / job.out.name)


def packed(out: Path) -> Files:
    """An engram that is written and the files of its run, without those of running ones."""
    if not out.exists():
        return {}
    run = sorted(run_folder(out).glob("*"))
    paths = [out, *(path for path in run if path.is_file() and path.name not in _STAYS)]
    return {path.relative_to(out.parent).as_posix(): path.read_bytes() for path in paths}


def unpack(folder: Path, files: Files, names: set[str]) -> None:
    """Write the files that are not there yet.

    They must be those of the runs in `names`: what came from elsewhere goes nowhere else.
    """
    allowed = {name for run in names for name in (f"{run}.safetensors", f"{run}.run")}
    for name, data in files.items():
        first, slash, rest = name.partition("/")
        if first not in allowed or "/" in rest or rest == ".." or (slash and not rest):
            raise EngramError(f"A node sent the file {printable(name)!r}, which nobody asked for.")
        path = folder / name
        if not path.exists() or path.read_bytes() != data:
            make_private_folder(path.parent)
            write_atomically(path, data, owner_only=bool(slash))
