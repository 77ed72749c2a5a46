"""The clients of the long load, each a process: good, hostile, attaching, in bulk, /healthz.

A client tells what it saw as an `Event` in a queue, until it is told to stop.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.serve.malformed import JSON, form, good_picture, malformed, predict, request

FORM = "multipart/form-data; boundary=----boundary"
GOOD = ("form", "json", "embed", "v2", "v2 masks")
TOLERANCE = 1e-4  # of logits; images of other requests in the pass change the last bits
TRIES = 20  # of a good request, while the service is busy or a worker was killed
FILES = 120  # of a bulk job


class Event(NamedTuple):
    """What a client saw: of which kind, its outcome, what was wrong if anything, and how long."""

    kind: str
    outcome: str
    problem: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Target:
    """What clients need: where the service is, and what they may send."""

    url: str
    token: str
    images: Sequence[bytes]
    engrams: Mapping[str, bytes]
    folder: Path  # of engrams for bulk jobs
    expected: dict[tuple[str, int], Any] = field(default_factory=dict)


Tell = Callable[[Event], None]
Stopped = Callable[[], bool]


class Connection:
    """A connection from a loopback address of its own, as clients of a real service have."""

    def __init__(self, url: str, number: int) -> None:
        self.address, self.own = urlsplit(url), f"127.0.3.{number + 1}"

    def ask(
        self, method: str, path: str, body: bytes = b"", **headers: str
    ) -> tuple[int, bytes, float]:
        """Status, body and seconds of an answer; status 0 if there is none."""
        began = time.perf_counter()
        connection = http.client.HTTPConnection(
            str(self.address.hostname), self.address.port, timeout=60, source_address=(self.own, 0)
        )
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            status, data = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            status, data = 0, repr(error).encode()
        finally:
            connection.close()
        return status, data, time.perf_counter() - began

    def open(self) -> socket.socket:
        where = str(self.address.hostname), int(self.address.port or 80)
        return socket.create_connection(where, 30, source_address=(self.own, 0))

    def send(self, *pieces: bytes, pause: float = 0.0) -> int:
        """The status after these bytes; 0 if the connection was closed without one."""
        data = b""
        with suppress(OSError), self.open() as connection:
            with suppress(OSError):  # refused before everything was sent: the answer is there
                for i, piece in enumerate(pieces):
                    time.sleep(pause if i else 0)
                    connection.sendall(piece)
            while b"\r\n" not in data and (more := connection.recv(65536)):
                data += more
        words = data.split(b" ", 2)
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


# Good requests


def good_request(kind: str, image: bytes) -> tuple[str, bytes, str]:
    """Path, body and content type."""
    text = base64.b64encode(image).decode()
    if kind == "form":
        parts = [("image", image, True), ("tasks", b"a,b,seg,base", False)]
        return "/v1/predict", form(*parts, ("top_k", b"1000", False)), FORM
    if kind == "json":
        document: dict[str, Any] = {"images": [text, text], "tasks": ["b", "a"], "top_k": 3}
        return "/v1/predict", json.dumps(document).encode(), JSON
    if kind == "embed":
        return "/v1/embed", json.dumps({"images": [text], "tasks": ["a", "b"]}).encode(), JSON
    part = {"name": "image", "shape": [1], "datatype": "BYTES", "data": [text]}
    task = "seg" if kind == "v2 masks" else "a"
    return f"/v2/models/{task}/infer", json.dumps({"inputs": [part]}).encode(), JSON


def patient_answer(
    connection: Connection, kind: str, image: bytes, tell: Tell | None = None
) -> Any:
    """The answer to a good request; None if there is none after many tries."""
    path, body, content = good_request(kind, image)
    for attempt in range(TRIES):
        status, data, seconds = connection.ask("POST", path, body, **{"Content-Type": content})
        if tell is not None:
            problem = None if status in (0, 200, 429, 503) else f"{status}: {data[:200]!r}"
            tell(Event(kind, str(status), problem, seconds))
        if status == 200:
            return json.loads(data)
        time.sleep(min(2.0, 0.1 * 2**attempt))
    return None


def differs(expected: Any, got: Any) -> bool:
    """Whether an answer is another one than before, but for the last bits of numbers."""
    if isinstance(expected, float) and isinstance(got, (int, float)):
        return abs(expected - got) > TOLERANCE
    if type(expected) is not type(got):
        return True
    if isinstance(expected, dict):
        other = expected.keys() != got.keys()
        return other or any(differs(value, got[key]) for key, value in expected.items())
    if isinstance(expected, list):
        other = len(expected) != len(got)
        return other or any(differs(a, b) for a, b in zip(expected, got, strict=False))
    return bool(expected != got)


def ask_well(target: Target, number: int, tell: Tell, stopped: Stopped) -> None:
    """Send good requests, and compare every answer with the one that was recorded before."""
    rng, connection = random.Random(number), Connection(target.url, number)
    while not stopped():
        kind, image = rng.choice(list(target.expected))
        answer = patient_answer(connection, kind, target.images[image], tell)
        if answer is None:
            tell(Event("answers", "lost", f"{kind}: no answer after {TRIES} tries"))
        elif differs(target.expected[kind, image], answer):
            tell(Event("answers", "different", f"{kind}, image {image}: {str(answer)[:200]}"))
        else:
            tell(Event("answers", "equal"))


# Hostile requests


def _infer(task: str, shape: list[int], outputs: int = 0, images: int = 1) -> bytes:
    text = base64.b64encode(good_picture()).decode()
    part = {"name": "image", "shape": shape, "datatype": "BYTES", "data": [text] * images}
    document: dict[str, Any] = {"inputs": [part]}
    if outputs:
        document["outputs"] = [{"name": task}] * outputs
    return request("POST", f"/v2/models/{task}/infer", json.dumps(document).encode(), JSON)


def _pixels(connection: Connection) -> int:
    """A thousand gigabytes are declared, and a few bytes sent."""
    part = {"name": "pixel_values", "shape": [10**6, 3, 10**4, 10**4], "datatype": "FP32"}
    binary = {**part, "parameters": {"binary_data_size": 8}}
    head = json.dumps({"inputs": [binary]}).encode()
    length = f"Inference-Header-Content-Length: {len(head)}\r\n"
    body = head + struct.pack("<2f", 0, 0)
    return connection.send(request("POST", "/v2/models/a/infer", body, JSON, length))


def _idle(connection: Connection) -> int:
    """Forty connections that send half a head and nothing more."""
    held = []
    with suppress(OSError):
        for _ in range(40):
            held.append(connection.open())
            held[-1].sendall(b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\n")
    time.sleep(1)
    for one in held:
        one.close()
    return 0


def _cut(connection: Connection) -> int:
    """Half an upload; then the client is gone."""
    whole = predict(("image", good_picture(), True))
    with suppress(OSError), connection.open() as one:
        one.sendall(whole[: len(whole) // 2])
    return 0


def _gone(connection: Connection) -> int:
    """A whole request, and nobody who waits for the answer."""
    with suppress(OSError), connection.open() as one:
        one.sendall(predict(("image", good_picture(), True)))
    return 0


HOSTILE: dict[str, Callable[[Connection], int]] = {
    "cut upload": _cut,
    "client gone": _gone,
    "idle connections": _idle,
    "declared shape": lambda c: c.send(_infer("a", [10**9])),
    "declared pixels": _pixels,
    "shape of 4,000 digits": lambda c: c.send(_infer("a", [10**4000])),
    "duplicate outputs": lambda c: c.send(_infer("seg", [4], 64, 4)),
    "nested": lambda c: c.send(request("POST", "/v1/predict", b"[" * 100_000, JSON)),
    "empty values": lambda c: c.send(
        request("POST", "/v2/models/a/infer", b'{"inputs":[' + b"[]," * 50_000, JSON)
    ),
}


def attack(target: Target, number: int, tell: Tell, stopped: Stopped) -> None:
    """Send what no service should be sent: it may be refused, and nothing else may happen."""
    rng, connection = random.Random(number), Connection(target.url, number)
    odd = malformed(10**9, seed=number)
    while not stopped():
        began = time.perf_counter()
        if rng.random() < 0.5:
            case = next(odd)
            kind, status = "odd bodies", connection.send(*case.pieces, pause=case.pause)
        else:
            kind = rng.choice(list(HOSTILE))
            status = HOSTILE[kind](connection)
        bad = status >= 500 and status != 503
        seconds = time.perf_counter() - began
        tell(Event(kind, str(status), f"status {status}" if bad else None, seconds))


def change_tasks(target: Target, number: int, tell: Tell, stopped: Stopped) -> None:
    """Attach and remove tasks, and try to attach damaged ones."""
    rng, connection = random.Random(number), Connection(target.url, number)
    token = {"Authorization": f"Bearer {target.token}"}
    while not stopped():
        name = rng.choice(list(target.engrams))
        data, kind = target.engrams[name], "attach"
        good: tuple[int, ...] = (200, 201, 409)
        if rng.random() < 0.3:
            spot = rng.randrange(len(data))
            data = data[:spot] + bytes([data[spot] ^ 0xFF]) + data[spot + 1 :]
            data, kind, good = data[: rng.choice((spot, None))], "attach damaged", (400, 409, 422)
        status, body, seconds = connection.ask("PUT", f"/v1/tasks/{name}", data, **token)
        problem = None if status in (*good, 0, 429, 503) else f"{status}: {body[:200]!r}"
        tell(Event(kind, str(status), problem, seconds))
        status, body, seconds = connection.ask("DELETE", f"/v1/tasks/{name}", b"", **token)
        problem = None if status in (204, 404, 409, 0, 429, 503) else f"{status}: {body[:200]!r}"
        tell(Event("detach", str(status), problem, seconds))
        time.sleep(0.5)


def sample_health(target: Target, number: int, tell: Tell, stopped: Stopped) -> None:
    """Ask /healthz ten times a second; what counts is how long an answer takes in the end.

    A worker that is killed takes its connections with it, and a client asks again.
    """
    connection, began = Connection(target.url, number), time.perf_counter()
    while not stopped():
        status, _, _ = connection.ask("GET", "/healthz")
        waited = time.perf_counter() - began
        if status == 200 or waited > 60:
            tell(Event("healthz", str(status), None if status == 200 else "no answer", waited))
            time.sleep(0.1)
            began = time.perf_counter()


# Jobs in bulk


def run_jobs(target: Target, number: int, tell: Tell, stopped: Stopped) -> None:
    """`predict --out`, killed and resumed; every table is compared with an undisturbed one.

    A job that was killed after its table was in place is not done again: it says that it exists.
    """
    rng, folder = random.Random(number), target.folder
    photos = folder / "photos"
    photos.mkdir()
    for i in range(FILES):
        (photos / f"{i:04}.png").write_bytes(good_picture(i))
    command = [sys.executable, "-m", "engram", "predict", "--batch", "4", "--rows", "16"]
    command += [str(folder / f"{name}.safetensors") for name in ("a", "seg")] + [str(photos)]

    def started(out: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip

    def finished(job: subprocess.Popen[bytes], seconds: float) -> bool:
        """Whether it ended in this time; else it is killed with its decoders."""
        until = time.monotonic() + seconds
        while job.poll() is None and time.monotonic() < until and not stopped():
            time.sleep(0.05)
        if job.poll() is not None:
            return True
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        return False

    whole = b""
    for count in range(10**9):
        out, kills = folder / f"table-{count}.jsonl", 0
        while not finished(job := started(out), 600 if not whole else rng.uniform(2, 20)):
            if stopped():
                return
            kills += 1
            tell(Event("bulk kills", "killed"))
        if job.returncode != 0 and not (kills and job.returncode == 2 and out.exists()):
            tell(Event("bulk", f"exit {job.returncode}", f"after {kills} kills"))
            time.sleep(1)
            continue
        table = out.read_bytes()
        whole = whole or table
        same = table == whole and table.count(b"\n") == FILES
        problem = None if same else f"another table after {kills} kills: {len(table)} bytes"
        tell(Event("bulk", "equal" if same else "different", problem))
        out.unlink()
        if stopped():
            return
