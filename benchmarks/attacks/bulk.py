"""SIGKILLs of `predict --out` while it decodes, and pairs of jobs on one output."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet

from benchmarks.attacks.jobs import Jobs, bulk_jobs, packed, pictures
from benchmarks.attacks.kills import children_of, orphans_after
from benchmarks.attacks.record import Record

IMAGES, FEW = 800, 160  # the second where only a few cases are tried
ROUNDS = 5  # kills of one job before it may finish
PARTS = ("--rows", "8", "--batch", "4")
#: Every format, with sources that are listed and one that is streamed.
CONFIGURATIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("photos", "answers.jsonl", ("--decoders", "1")),
    ("photos.tar.gz", "answers.csv", ("--decoders", "1")),
    ("photos", "answers.parquet", ("--decoders", "2")),
    ("photos.tar.gz", "answers", ("--decoders", "2")),
)
REFUSED = ("Another process", "exists", "cannot be written")


def make_sources(folder: Path, images: int) -> None:
    files = pictures(images)
    (folder / "photos").mkdir()
    for name, data in files:
        (folder / "photos" / name).write_bytes(data)
    (folder / "photos.tar.gz").write_bytes(packed(files, "w:gz"))


def rows_of(out: Path) -> Any:
    """What a table says, to be compared with another one's."""
    if out.suffix in (".jsonl", ".csv"):
        return out.read_bytes()
    return pyarrow.parquet.read_table(out).to_pylist()


def parts_of(out: Path) -> set[str]:
    folder = out.with_name(f"{out.name}.parts") if out.suffix else out
    return {path.name for path in folder.glob("part-*")}


def decoders_of(pid: int) -> set[int]:
    """The processes below a job that decode, and not the one that multiprocessing keeps."""
    return {child for child in children_of(pid) if b"spawn_main" in _command(child)}


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class Bench:
    """One configuration: its undisturbed table, and jobs on an output beside it."""

    def __init__(self, jobs: Jobs, number: int) -> None:
        source, name, flags = CONFIGURATIONS[number % len(CONFIGURATIONS)]
        self.jobs, self.source, self.flags = jobs, jobs.folder / source, (*PARTS, *flags)
        self.out, self.name = jobs.folder / f"job-{number}" / name, f"{source} to {name}"
        self.out.parent.mkdir()
        whole = jobs.folder / "whole" / name
        if not whole.exists():
            whole.parent.mkdir(exist_ok=True)
            if jobs.code(self.start(whole)) != 0:
                raise RuntimeError(f"an undisturbed job failed: {jobs.words(whole)}")
        self.expected = rows_of(whole)

    def start(self, out: Path | None = None, *more: str) -> Any:
        return self.jobs.start(self.source, out or self.out, *self.flags, *more)

    def wrote(self, before: set[str], more: int) -> Callable[[], bool]:
        """Whether a job has written so many parts by now."""
        return lambda: len(parts_of(self.out) - before) >= more

    def problem(self) -> str | None:
        """What is wrong with the table, or with what is left beside it."""
        rows = rows_of(self.out)
        if rows != self.expected:
            return f"the table differs: {len(rows):,} in place of {len(self.expected):,}"
        left = {path.name for path in self.out.parent.iterdir()}
        left -= {self.out.name, f"{self.out.name}.log"}
        left = {name for name in left if not name.endswith(".tmp")}  # a killed job's
        return f"{', '.join(left)} is left" if left else None


def kill(bench: Bench, kills: int, rng: random.Random, record: Record) -> None:
    """Kill a job while it decodes, after it has written a part; then let it finish."""
    jobs, problems = bench.jobs, list[str | None]()
    while len(problems) < kills:
        before, process = parts_of(bench.out), bench.start()
        ready = jobs.watch(process, bench.wrote(before, rng.randrange(1, 12)))
        decoders = decoders_of(process.pid) if process.exitcode is None else set()
        process.kill()
        process.join()
        if process.exitcode == -9 and ready and decoders:
            left = orphans_after(decoders)
            problems.append(f"the decoders {left} outlive it" if left else None)
        elif process.exitcode == 0:  # it was faster
            shutil.rmtree(bench.out, ignore_errors=True)
            bench.out.unlink(missing_ok=True)
        elif process.exitcode != -9:
            problems.append(f"it ended with {process.exitcode}: {jobs.words(bench.out)}")
    if bench.out.is_dir() or not bench.out.exists():
        code = jobs.code(bench.start())
        if code != 0:
            problems[-1] = f"it does not continue ({code}): {jobs.words(bench.out)}"
    problems[-1] = problems[-1] or bench.problem()
    for problem in problems:
        record.add(f"kill, {bench.name}", problem)


def pair(bench: Bench, rng: random.Random, flags: Sequence[str]) -> tuple[str | None, int]:
    """Two jobs on one output, one a little later: what was lost, and how many were refused."""
    jobs, first = bench.jobs, bench.start(None, *flags)
    parts = rng.randrange(30)  # that the first may have written
    jobs.watch(first, bench.wrote(set(), parts))
    second = bench.start(None, *flags)
    codes = [jobs.code(first), jobs.code(second)]
    words = jobs.words(bench.out)
    refused = codes.count(2)
    if 0 not in codes or set(codes) - {0, 2}:
        return f"they ended with {codes}: {words}", refused
    if refused and not any(reason in words for reason in REFUSED):
        return f"one was refused without a reason: {words}", refused
    return bench.problem(), refused


def run(count: int) -> Record:
    """Three quarters of the cases are kills, the others are pairs."""
    record, rng, refused = Record(), random.Random(5), 0
    pairs, images = max(1, count // 4), IMAGES if count > 4 else FEW
    with bulk_jobs() as jobs:
        make_sources(jobs.folder, images)
        number = 0
        for left in range(count - pairs, 0, -ROUNDS):
            kill(Bench(jobs, number), min(left, ROUNDS), rng, record)
            number += 1
        for i in range(pairs):
            bench = Bench(jobs, number + i)
            problem, times = pair(bench, rng, ("--overwrite",) if i % 2 else ())
            refused += times
            record.add(f"pair, {bench.name}", problem)
        record.details = (
            f"{count - pairs} kills and {pairs} pairs of jobs over {images:,} images, "
            f"{refused} second jobs refused; at most {jobs.peak / 1e6:.0f} MB for a job and its "
            "decoders"
        )
    return record
