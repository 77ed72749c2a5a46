"""What hostile bodies cost the service: how long /healthz waits, and how much memory they take.

    OMP_NUM_THREADS=1 python -m benchmarks.serve.bodies [--only NAME]

`engram serve` runs in its own process on pico. While it reads a body, /healthz is requested without
a pause, and the memory of the service and of all its processes is sampled. It takes two minutes and
prints a table; the exit code is 1 if an answer of /healthz took more than 200 ms, or if the memory
grew by more than four times the body plus 32 MB, which is what a process takes to start working.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.report import markdown_table
from benchmarks.serve.malformed import BOUNDARY, form, good_picture
from benchmarks.serve.soak import Service, make_world

JSON, FORM = "application/json", f"multipart/form-data; boundary={BOUNDARY.decode()}"
MEGABYTE = 1_000_000
EMOJI = "\N{GRINNING FACE}".encode()  # a text with it takes four bytes per character in memory
MOST_SECONDS, MOST_GROWTH, MOST_BASE = 0.2, 4, 32 * MEGABYTE


@dataclass(frozen=True)
class Measured:
    """What one body did."""

    status: int
    seconds: float
    slowest: float  # answer of /healthz, in seconds
    grown: int  # bytes of memory, at most

    def within(self, size: int) -> bool:
        return self.slowest <= MOST_SECONDS and self.grown <= MOST_GROWTH * size + MOST_BASE


def bodies() -> dict[str, Callable[[], tuple[str, bytes]]]:
    """By name, a content type and a body."""
    coded = base64.b64encode(random.Random(0).randbytes(30 * MEGABYTE))
    escaped = b"\\u0041" * (40 * MEGABYTE // 6)
    part = form(("x", b"1", False), closed=False)
    ones: dict[str, Callable[[], tuple[str, bytes]]] = {
        f"list of ones, {size} MB": lambda size=size: (  # type: ignore[misc]
            JSON,
            b'{"images":[1%s]}' % (b",1" * (size * MEGABYTE // 2)),
        )
        for size in (1, 4, 40)
    }
    return {
        **ones,
        "unknown field, 40 MB": lambda: (JSON, b'{"x":[1%s]}' % (b",1" * (20 * MEGABYTE))),
        "list of texts, 40 MB": lambda: (JSON, b'{"images":[""%s]}' % (b',""' * 13_333_333)),
        "list of tasks, 40 MB": lambda: (JSON, b'{"tasks":[""%s]}' % (b',""' * 13_333_333)),
        "many keys, 40 MB": lambda: (JSON, b'{"a":1%s}' % (b',"a":1' * 6_666_666)),
        "nested lists, 40 MB": lambda: (JSON, b"[" * (40 * MEGABYTE)),
        "nested objects, 40 MB": lambda: (JSON, b'{"a":' * (8 * MEGABYTE)),
        "spaces, 40 MB": lambda: (JSON, b" " * (40 * MEGABYTE)),
        "digits, 40 MB": lambda: (JSON, b'{"top_k":%s}' % (b"1" * (40 * MEGABYTE))),
        "text of base64, 40 MB": lambda: (JSON, b'{"images":["%s"]}' % coded),
        "text of escapes, 40 MB": lambda: (JSON, b'{"images":["%s"]}' % escaped),
        "text beyond ASCII, 40 MB": lambda: (JSON, b'{"images":["%s%s"]}' % (EMOJI, coded)),
        "key beyond ASCII, 40 MB": lambda: (JSON, b'{"%s%s":1}' % (EMOJI, coded)),
        "name of a task, 40 MB": lambda: (JSON, b'{"tasks":["%s"]}' % coded),
        "100,000 parts": lambda: (FORM, part * 100_000),
        "a form of line ends, 40 MB": lambda: (
            FORM, form(("image", b"\r\n--" * (10 * MEGABYTE), True))
        ),
        "a form of headers, 40 MB": lambda: (
            FORM, b"--" + BOUNDARY + b"\r\n" + b"A: 1\r\n" * (40 * MEGABYTE // 6)
        ),
        "30 images that are none, 60 MB": lambda: (
            FORM, form(*[("image", coded[: 2 * MEGABYTE], True)] * 30)
        ),
        "a good image": lambda: (FORM, form(("image", good_picture(), True))),
    }  # fmt: skip


def memory(pid: int) -> int:
    """Bytes of memory of a process and all its children, what they share counted once."""
    total = 0
    for one in _tree(pid):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it has ended
        return
    for thread in threads:
        try:
            children = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        except OSError:  # the thread has ended
            continue
        for child in children:
            yield from _tree(int(child))


@contextmanager
def repeated(work: Callable[[], None]) -> Iterator[None]:
    """Call `work` in a thread again and again until the block ends."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            work()
            time.sleep(0.005)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def send(url: str, kind: str, body: bytes) -> int:
    """The status of a request to predict; 0 if the connection was closed without one."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=600)
    try:
        connection.request("POST", "/v1/predict", body, {"Content-Type": kind})
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def measure(service: Service, kind: str, body: bytes) -> Measured:
    """Send a body while /healthz and the memory are watched."""
    address = urlsplit(service.url)
    slowest, most, before = 0.0, 0, memory(service.process.pid)

    def check_health() -> None:
        nonlocal slowest
        began = time.perf_counter()
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=600)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
        connection.close()
        slowest = max(slowest, time.perf_counter() - began)

    def check_memory() -> None:
        nonlocal most
        most = max(most, memory(service.process.pid))

    began = time.perf_counter()
    with repeated(check_health), repeated(check_memory):
        status = send(service.url, kind, body)
        seconds = time.perf_counter() - began
        time.sleep(0.3)
    return Measured(status, seconds, slowest, max(0, most - before))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="bodies with this in their name")
    only = parser.parse_args().only
    rows, good = [], True
    with tempfile.TemporaryDirectory() as folder:
        service = Service(make_world(Path(folder)).bundle, Path(folder))
        send(service.url, *bodies()["a good image"]())
        for name, make in bodies().items():
            if only not in name:
                continue
            kind, body = make()
            measured = measure(service, kind, body)
            good = good and measured.within(len(body))
            rows.append(
                [
                    name,
                    f"{len(body) / MEGABYTE:.1f} MB",
                    str(measured.status),
                    f"{measured.seconds:.2f} s",
                    f"{1000 * measured.slowest:.0f} ms",
                    f"{measured.grown / MEGABYTE:.0f} MB",
                    f"{measured.grown / len(body):.1f}",
                ]
            )
            print("  ".join(rows[-1]), flush=True)
        service.stop()
    heads = ["body", "size", "status", "took", "slowest /healthz", "memory grew by", "times body"]
    print("\n".join(markdown_table(heads, rows)))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
