"""Damaged and hostile archives: an error that says where, no image lost, memory within a limit."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import struct
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.attacks.isolated import run_isolated
from benchmarks.attacks.jobs import Jobs, bulk_jobs, packed, pictures
from benchmarks.attacks.record import Record
from engram.errors import EngramError
from engram.images.decode import MAX_IMAGE_BYTES
from engram.inference.bulk.answering import Questions
from engram.inference.bulk.bulk_settings import BulkSettings
from engram.inference.bulk.predict_to import predict_to
from engram.inference.engine import load_model
from engram.model import MemoryViT

SETTINGS = BulkSettings(rows=3, batch=2, decoders=0)
IMAGES = pictures(12)
GOOD = IMAGES[0][1]
LARGE = 3 << 30  # bytes that a bomb unpacks to
MOST_MEMORY = 4 * MAX_IMAGE_BYTES  # a job holds one twice, and so does its decoder
MOST_SECONDS = 60.0  # to end after SIGTERM on a busy machine; most take one


# Damage


def flip(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def flip_header(data: bytes, rng: random.Random) -> bytes:
    place = data.index(rng.choice(IMAGES)[0].encode()) if b"ustar" in data else 0
    return data[:place] + flip(data[place : place + 512], rng) + data[place + 512 :]


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def cut_at_block(data: bytes, rng: random.Random) -> bytes:
    return data[: 512 * rng.randrange(len(data) // 512 + 1)]


def zeros(data: bytes, rng: random.Random) -> bytes:
    """Zeros in the first half: at the very end they are what every archive has."""
    place, size = 512 * rng.randrange(len(data) // 1024), rng.choice((512, 4096))
    return data[:place] + bytes(size) + data[place + size :]


def lost_block(data: bytes, rng: random.Random) -> bytes:
    place = 512 * rng.randrange(len(data) // 512 + 1)
    return data[:place] + data[place + 512 :]


def noise(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + rng.randbytes(rng.choice((1, 512, 5000))) + data[place:]


DAMAGES = (flip, flip_header, cut, cut_at_block, zeros, lost_block, noise)


def attack(model: MemoryViT, good: bytes, bad: bytes, name: str) -> None:
    """Answer about a damaged archive, then about the repaired one, as a user does.

    A job that succeeds has a row for every image: in a tar file the pictures themselves have no
    checksum, but in gzip they have.
    """
    with TemporaryDirectory() as folder:
        source, out, whole = (Path(folder) / one for one in (name, "a.jsonl", "whole.jsonl"))
        questions = Questions(model, list(model.tasks), SETTINGS)
        source.write_bytes(good)
        predict_to(questions, [str(source)], whole)
        expected = [json.loads(line) for line in whole.read_bytes().splitlines()]
        source.write_bytes(bad)
        try:
            predict_to(questions, [str(source)], out)
        except EngramError as error:
            if str(source) not in str(error) or out.exists():
                raise RuntimeError(f"an odd error: {error}") from error
            source.write_bytes(good)
            predict_to(questions, [str(source)], out)
            same = _close
        else:
            same = _close if name.endswith(".gz") else _alike
        rows = [json.loads(line) for line in out.read_bytes().splitlines()]
        if len(rows) != len(expected) or not all(map(same, rows, expected)):
            raise RuntimeError(f"{len(rows)} rows, or others, in place of {len(expected)}")


def _alike(row: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(row["image"] == other["image"])


def _close(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Batches of another size may differ in the last bit."""
    column = "colours.probability"
    near = abs((row.get(column) or 0.0) - (other.get(column) or 0.0)) < 1e-4
    same = all(row.get(name) == other.get(name) for name in ("colours", "error"))
    return _alike(row, other) and same and near


def damaged(model: MemoryViT, count: int) -> Record:
    rng, cases = random.Random(6), []
    archives = {"a.tar": packed(IMAGES), "a.tar.gz": packed(IMAGES, "w:gz")}
    archives["b.tar.gz"] = gzip.compress(archives["a.tar"], 0)  # wrong bytes unpack to wrong bytes
    for i in range(count):
        damage, name = DAMAGES[i % len(DAMAGES)], list(archives)[i // len(DAMAGES) % 3]
        bad = damage(archives[name], rng)
        cases.append((f"{damage.__name__} of {name}, {i}", (archives[name], bad, name)))
    return run_isolated(cases, lambda case: attack(model, *case))


# Bombs


def member(name: str, data: bytes = b"", *, size: int = -1, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A header that may declare another size than the data have, and the data."""
    info = tarfile.TarInfo(name)
    info.size, info.type = len(data) if size < 0 else size, kind
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def sparse(real: int) -> bytes:
    block = bytearray(member("x.png", size=512, kind=tarfile.GNUTYPE_SPARSE))
    block[386:410] = b"%011o\0%011o\0" % (0, 512)
    block[483:495] = b"\x80" + struct.pack(">3xQ", real)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + bytes(512)


def between(middle: bytes) -> bytes:
    """Good images around something else."""
    return member("first.png", GOOD) + middle + member("last.png", GOOD) + bytes(1024)


def unpacking(head: bytes, tail: bytes, size: int = LARGE) -> bytes:
    """A gzip file of a few MB with so many zeros between head and tail."""
    piece = gzip.compress(bytes(1 << 26))
    return gzip.compress(head) + piece * (size >> 26) + gzip.compress(tail)


def many_large() -> bytes:
    """A dozen files, each just within the limit."""
    size = MAX_IMAGE_BYTES - (1 << 26)
    pieces = [unpacking(member(f"{i}.png", size=size), b"", size) for i in range(12)]
    return b"".join(pieces) + gzip.compress(member("last.png", GOOD) + bytes(1024))


FIRST, LAST = member("first.png", GOOD), member("last.png", GOOD) + bytes(1024)
#: By name of the file: what it has, the exit code, and the good images that have to be answered.
BOMBS: dict[str, tuple[Callable[[], bytes], int, int]] = {
    "three bytes.tar": (lambda: b"tar", 2, 0),
    "10^18 bytes of holes.tar": (lambda: between(sparse(10**18)), 0, 2),
    "3 GB of holes.tar": (lambda: between(sparse(3 * 10**9)), 0, 2),
    "10^18 bytes declared.tar": (lambda: between(member("x.png", size=10**18)), 2, 0),
    "a name of 3 GB.tar": (lambda: between(member("x", size=LARGE, kind=b"L")), 2, 0),
    "links.tar": (lambda: between(member("x.png", kind=b"2") + member("y.png", kind=b"6")), 0, 2),
    "an image of 3 GB.tar.gz": (
        lambda: unpacking(FIRST + member("x.png", size=LARGE), LAST), 0, 2,
    ),
    "another file of 3 GB.tar.gz": (lambda: unpacking(FIRST + member("x", size=LARGE), LAST), 0, 2),
    "fields of 3 GB.tar.gz": (
        lambda: unpacking(FIRST + member("x", size=LARGE, kind=b"x"), LAST), 2, 0,
    ),
    "3 GB behind the end.tar.gz": (lambda: unpacking(FIRST + bytes(1024), b""), 2, 0),
    "a dozen of 200 MB.tar.gz": (many_large, 0, 1),
}  # fmt: skip
STOPPED = ("an image of 3 GB.tar.gz", "another file of 3 GB.tar.gz", "a dozen of 200 MB.tar.gz")


def bomb_problem(jobs: Jobs, name: str) -> str | None:
    make, expected, good = BOMBS[name]
    source, out = jobs.folder / name, jobs.folder / "bomb.jsonl"
    source.write_bytes(make())
    code, words = jobs.code(jobs.start(source, out, "--overwrite")), jobs.words(out)
    if code != expected or "went wrong" in words or "Traceback" in words:
        return f"it ended with {code}: {words}"
    rows = [json.loads(line) for line in out.read_bytes().splitlines()] if code == 0 else []
    answered = sum("colours" in row for row in rows)
    out.unlink(missing_ok=True)
    return None if answered == good else f"{answered} of {good} good images were answered"


def stop_problem(jobs: Jobs, name: str) -> str | None:
    """SIGTERM while an archive is unpacked."""
    out = jobs.folder / "stopped.jsonl"
    process = jobs.start(jobs.folder / name, out)
    jobs.watch(process, (jobs.folder / "stopped.jsonl.parts" / "_job.json").exists)
    jobs.watch(process, _after(0.5))
    if process.exitcode is not None:
        return f"it ended with {process.exitcode} before it could be stopped"
    os.kill(process.pid, signal.SIGTERM)
    code = jobs.code(process, MOST_SECONDS)
    shutil.rmtree(jobs.folder / "stopped.jsonl.parts", ignore_errors=True)
    if code is None:
        return f"it did not end within {MOST_SECONDS:.0f} seconds"
    return None if code in (130, -signal.SIGTERM) else f"it ended with {code}: {jobs.words(out)}"


def _after(seconds: float) -> Callable[[], bool]:
    deadline = time.monotonic() + seconds
    return lambda: time.monotonic() >= deadline


def run(count: int) -> Record:
    """So many damaged archives, and all bombs; of a few cases, only the small bombs."""
    with bulk_jobs() as jobs:
        record = damaged(load_model([str(jobs.task)], None), count)
        names = [name for name in BOMBS if count >= 100 or name.endswith(".tar")]
        for name in names:
            jobs.peak, before = 0, jobs.peak
            problem = bomb_problem(jobs, name)
            if problem is None and jobs.peak > MOST_MEMORY:
                problem = f"it took {jobs.peak / 1e6:.0f} MB"
            record.add(name, problem)
            jobs.peak = max(jobs.peak, before)
        for name in STOPPED if count >= 100 else ():
            record.add(f"SIGTERM, {name}", stop_problem(jobs, name))
        record.details = (
            f"{count} damaged archives, {len(names)} that declare or unpack to up to 3 GB or "
            f"10^18 bytes; at most {jobs.peak / 1e6:.0f} MB for a job and its decoder"
        )
    return record
