"""Lists, tables and folders of strangers: a bulk job answers the good images, and only those.

Every case is a command `engram predict --out` in a process of its own, with a source that has
hostile entries between good images. It survives if it ends in time with as many answers and errors
as it should (or, where the source as a whole is damaged, with exit code 2 and a sentence), if the
server on loopback was asked for nothing, and within a limit of memory for all its processes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
from PIL import Image

import engram
from benchmarks.attacks.headers import make_backbone
from benchmarks.attacks.record import Record

SECONDS = 120.0  # for one case, on a machine that may be busy
MEMORY = 1_500_000_000  # bytes of a job and its decoder together, resident
GOOD = 3  # images of every case that are answered


@dataclass(frozen=True)
class Case:
    """A source, how many of its images have errors, and whether SIGTERM is sent while it waits."""

    source: str
    errors: int
    good: int = GOOD
    refused: bool = False
    stdin: Callable[[], bytes] | None = None
    terminate: bool = False


class _Server(BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_response(404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


def run(count: int) -> Record:
    """Try so many cases, all kinds in turn."""
    record, peak, rng = Record(), 0, random.Random(6)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    _Server.asked = 0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        engram.save_backbone(make_backbone(), work / "backbone")
        for i in range(count):
            name, make = list(CASES.items())[i % len(CASES)]
            case = work / f"case-{i}"
            case.mkdir()
            made = make(case, server.server_port, rng)
            problem, most = attack(work, case, made)
            peak = max(peak, most)
            if _Server.asked:
                problem, _Server.asked = "an address of the list was fetched", 0
            if most > MEMORY and problem is None:
                problem = f"{most / 1e6:,.0f} MB of memory"
            record.add(name, problem)
    server.shutdown()
    server.server_close()
    record.details = f"peak memory {peak / 1e6:,.0f} MB, of at most {MEMORY / 1e6:,.0f} MB"
    return record


def attack(work: Path, case: Path, given: Case) -> tuple[str | None, int]:
    """Run one command: what went wrong, and the most memory that it and its decoder took."""
    out = case / "answers.jsonl"
    command = [
        *(sys.executable, "-m", "engram", "predict", given.source, "-o", str(out), "--json"),
        *("--backbone", str(work / "backbone"), "--batch", "4", "--rows", "4"),
    ]
    with open(case / "log", "wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, cwd=case
        )
        assert process.stdin is not None
        feeding = threading.Thread(target=_feed, args=(process, given), daemon=True)
        feeding.start()
        most, deadline, told = 0, time.monotonic() + SECONDS, not given.terminate
        begun = case / "answers.jsonl.parts" / "part-000000.jsonl"
        while process.poll() is None and time.monotonic() < deadline:
            most = max(most, _resident(process.pid))
            if not told and begun.exists():
                process.send_signal(signal.SIGTERM)
                told = True
            time.sleep(0.05)
        late = process.poll() is None
        process.kill()
        process.wait()
        feeding.join()
        process.stdin.close()
    if late:
        return f"took more than {SECONDS:.0f} seconds", most
    words = (case / "log").read_text("utf-8", "replace")
    return _verdict(given, process.returncode, out, words), most


def _feed(process: subprocess.Popen[bytes], given: Case) -> None:
    try:
        assert process.stdin is not None
        process.stdin.write(given.stdin() if given.stdin else b"")
        process.stdin.flush()
        if not given.terminate:
            process.stdin.close()
    except OSError:  # it has ended
        pass


def _verdict(given: Case, code: int, out: Path, log: str) -> str | None:
    expected = 130 if given.terminate else 2 if given.refused else 0
    if code != expected:
        return f"exit code {code}: {log[-200:]}"
    if expected:
        return "a traceback" if "Traceback" in log or "Something went wrong" in log else None
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    good = sum("error" not in row for row in rows)
    if (good, len(rows) - good) != (given.good, given.errors):
        return f"{good} answers and {len(rows) - good} errors of {given.good} and {given.errors}"
    return None


def _resident(pid: int) -> int:
    total = 0
    try:
        parent = psutil.Process(pid)
        for one in (parent, *parent.children(recursive=True)):
            total += one.memory_info().rss
    except psutil.Error:
        pass
    return total


# The cases


def _images(folder: Path, count: int = GOOD) -> list[str]:
    rng = np.random.default_rng(0)
    for i in range(count):
        Image.fromarray(rng.integers(0, 256, (20, 20, 3), np.uint8)).save(folder / f"{i}.png")
    return [f"{i}.png" for i in range(count)]


def _folder(case: Path, port: int, rng: random.Random) -> Case:
    """Names that are no UTF-8, a pipe, links to themselves and to devices, a file without end."""
    folder = case / "photos"
    folder.mkdir()
    _images(folder)
    for i in range(GOOD):
        odd = bytes([rng.randrange(128, 192), 255, i + 65])
        os.rename(folder / f"{i}.png", os.path.join(os.fsencode(folder), odd + b".png"))
    os.mkfifo(folder / "pipe.png")
    (folder / "self.png").symlink_to("self.png")
    (folder / "loop").symlink_to("loop")
    (folder / "zero.png").symlink_to("/dev/zero")
    with open(folder / "sparse.png", "wb") as file:
        file.truncate(10**12)
    return Case("photos", 4)


def _paths(case: Path, port: int) -> list[bytes]:
    os.mkfifo(case / "pipe.png")
    return [
        b"/dev/zero", b"/dev/stdin", b"pipe.png", b"/proc/kmsg", b"/proc/self/mem", b"\xff.png",
        b"a\0b.png", b"reference://x", b"file:///dev/zero", b"zip://x::file:///etc/hostname",
        f"http://127.0.0.1:{port}/a.png".encode(),
        f"simplecache::http://127.0.0.1:{port}/a.png".encode(),
        f"http://localhost:{port}/a.png".encode(), b"s3://bucket/a.png", b"ftp://h/a.png",
        b"x" * 200_000,
    ]  # fmt: skip


def _mixed(case: Path, port: int, rng: random.Random) -> tuple[list[bytes], int]:
    bad = _paths(case, port)
    lines = [*bad, *map(os.fsencode, _images(case))]
    rng.shuffle(lines)
    return lines, len(bad)


def _text(case: Path, port: int, rng: random.Random) -> Case:
    lines, errors = _mixed(case, port, rng)
    (case / "list.txt").write_bytes(b"\n".join(lines))
    return Case("list.txt", errors)


def _csv(case: Path, port: int, rng: random.Random) -> Case:
    lines, errors = _mixed(case, port, rng)
    lines = [line[:100_000] for line in lines]
    (case / "list.csv").write_bytes(b"\n".join([b"image,n", *(line + b",1" for line in lines)]))
    return Case("list.csv", errors)


def _parquet(case: Path, port: int, rng: random.Random) -> Case:
    lines, errors = _mixed(case, port, rng)
    cells = pyarrow.array(lines).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"image": cells}), case / "list.parquet")
    return Case("list.parquet", errors)


def _bomb(case: Path, port: int, rng: random.Random) -> Case:
    """Kilobytes that hold 2 GB: a value that all rows repeat."""
    cells = pyarrow.DictionaryArray.from_arrays([0] * 250, [b"\0" * 8_000_000])
    table = pyarrow.table({"image": cells})
    options = {"compression": "zstd", "dictionary_pagesize_limit": 2**30, "store_schema": False}
    pyarrow.parquet.write_table(table, case / "bomb.parquet", **options)
    return Case("bomb.parquet", 250, good=0)


def _page(case: Path, port: int, rng: random.Random) -> Case:
    """One page that becomes 400 MB."""
    table = pyarrow.table({"image": [b"\0" * 400_000_000]})
    options = {"compression": "zstd", "use_dictionary": False}
    pyarrow.parquet.write_table(table, case / "page.parquet", **options)
    return Case("page.parquet", 0, refused=True)


def _long_line(case: Path, port: int, rng: random.Random) -> Case:
    """A line of 1.5 GB on standard input, between good ones."""
    good = b"\n".join(map(os.fsencode, _images(case)))
    size = rng.choice([1_500_000_000, 50_000_000])
    return Case("-", 1, stdin=lambda: b"x" * size + b"\n" + good)


def _row(case: Path, port: int, rng: random.Random) -> Case:
    """A row of a table without end, in one line or in many."""
    row = rng.choice([b"x" * 50_000_000, b'"a\n",' * 10_000_000])
    (case / "row.csv").write_bytes(b"image,n\n" + row + b"\n")
    return Case("row.csv", 0, refused=True)


def _waiting(case: Path, port: int, rng: random.Random) -> Case:
    """SIGTERM while standard input says nothing."""
    lines = b"".join(os.fsencode(name) + b"\n" for name in _images(case, 80))
    return Case("-", 0, stdin=lambda: lines, terminate=True)


#: What is tried: it writes a source into a folder, and says what a job makes of it.
CASES: dict[str, Callable[[Path, int, random.Random], Case]] = {
    "a list": _text,
    "a folder": _folder,
    "a table": _csv,
    "a parquet file of paths": _parquet,
    "a parquet file that repeats a value": _bomb,
    "a line without end": _long_line,
    "SIGTERM": _waiting,
    "a row without end": _row,
    "a parquet page": _page,
}
