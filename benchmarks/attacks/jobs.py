"""`engram predict --out` in processes of their own, the tables that it writes, and its memory."""

from __future__ import annotations

import io
import multiprocessing
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

import engram
from benchmarks.attacks.headers import make_backbone
from benchmarks.attacks.kills import start_command
from benchmarks.serve.bodies import memory
from engram.model import MemoryViT

EVERY = 0.005  # seconds between two looks at a job
SAMPLES = 0.1  # seconds between two looks at its memory, which take a while
PATIENCE = 600.0  # seconds that a job may take, on a busy machine


def pictures(count: int) -> list[tuple[str, bytes]]:
    """Names and PNG files of small images, all of them different."""
    rng, found = np.random.default_rng(0), []
    for i in range(count):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(file, "PNG")
        found.append((f"{i:04}.png", file.getvalue()))
    return found


def packed(files: Sequence[tuple[str, bytes]], mode: str = "w") -> bytes:
    """An archive of files, as tarfile writes it."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


@dataclass
class Jobs:
    """Where jobs are started: a process that has loaded everything forks one for each command."""

    folder: Path
    context: Any
    peak: int = 0  # bytes of the largest job with its decoders

    @property
    def task(self) -> Path:
        return self.folder / "colours.safetensors"

    def start(self, source: Path, out: Path, *flags: str) -> Any:
        arguments = ["predict", str(self.task), str(source), "--out", str(out), *flags]
        log = str(out.with_name(f"{out.name}.log"))
        process = self.context.Process(target=_start, args=(arguments, log, str(self.folder)))
        process.start()
        return process

    def watch(self, process: Any, until: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        """Look at the memory of a job until something is so, or the job ends, or it is late."""
        deadline, next_sample = time.monotonic() + seconds, 0.0
        while process.exitcode is None and (now := time.monotonic()) < deadline:
            if until():
                return True
            if now >= next_sample:
                self.peak = max(self.peak, memory(process.pid))
                next_sample = now + SAMPLES
            time.sleep(EVERY)
        return until()

    def code(self, process: Any, seconds: float = PATIENCE) -> int | None:
        """The exit code of a job; None, and the job is killed, if it does not end in time."""
        self.watch(process, lambda: process.exitcode is not None, seconds)
        code: int | None = process.exitcode
        process.kill()
        process.join()
        return code

    def words(self, out: Path) -> str:
        """What the jobs on an output said."""
        return out.with_name(f"{out.name}.log").read_text(errors="replace")[-400:]


def _start(arguments: Sequence[str], log: str, cache: str) -> None:
    main = sys.modules["__main__"]  # decoders would import it: not that of the command line
    main.__spec__ = None
    vars(main).pop("__file__", None)
    start_command(arguments, log, cache)


@contextmanager
def bulk_jobs() -> Iterator[Jobs]:
    """A folder with a backbone and a task, and jobs that begin at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engram.cli.main", "torch", "engram.report.run_page"])
    with TemporaryDirectory() as name:
        folder = Path(name)
        engram.save_backbone(make_backbone(), folder / "backbone")
        model = MemoryViT(engram.load_backbone(folder / "backbone"))
        model.add_task("colours", ["red", "green", "blue"])
        jobs = Jobs(folder, context)
        model.save("colours", jobs.task)
        yield jobs
