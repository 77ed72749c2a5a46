"""Raw abuses of HTTP, each followed by a good request."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from urllib.parse import urlsplit

from benchmarks.attacks.record import Record
from benchmarks.attacks.service import Attacked, attacked_service
from benchmarks.serve.malformed import JSON, Malformed, good_picture, malformed, predict, request

TIMEOUT = 2.5  # of the service; `malformed` has a body that is slower than this

Abuse = Callable[[tuple[str, int]], str | None]


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, 60)


def status_of(connection: socket.socket) -> int:
    data = b""
    with suppress(OSError):
        while b"\r\n" not in data and (piece := connection.recv(65536)):
            data += piece
    words = data.split(b" ", 2)
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


def expect(address: tuple[str, int], data: bytes, *statuses: int) -> str | None:
    """Send bytes and expect one of these statuses; 0 is a closed connection."""
    with connect(address) as connection:
        with suppress(OSError):
            connection.sendall(data)
        status = status_of(connection)
    return None if status in statuses else f"status {status}, not {statuses}"


def both_lengths(address: tuple[str, int]) -> str | None:
    """Two ways to say where the body ends: a proxy and the service may read different requests."""
    headers = "Transfer-Encoding: chunked\r\n"
    return expect(address, request("POST", "/v1/predict", b"0\r\n\r\n", JSON, headers), 400)


def other_host(address: tuple[str, int]) -> str | None:
    """What a page of another site sends after its name was made to resolve to loopback."""
    data = b"GET /v1/tasks HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    return expect(address, data, 421)


def half_closed(address: tuple[str, int]) -> str | None:
    """A client may close its side after the request, and still gets its answer."""
    with connect(address) as connection:
        connection.sendall(predict(("image", good_picture(), True)))
        connection.shutdown(socket.SHUT_WR)
        status = status_of(connection)
    return None if status == 200 else f"status {status}, not 200"


def gone(address: tuple[str, int]) -> str | None:
    """The client leaves before the answer, twenty times."""
    for _ in range(20):
        with connect(address) as connection:
            connection.sendall(predict(("image", good_picture(), True)))
    return None


def idle(address: tuple[str, int]) -> str | None:
    """A hundred connections that send half a head and nothing more."""
    connections = [connect(address) for _ in range(100)]
    for connection in connections:
        connection.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\n")
    time.sleep(0.2)
    for connection in connections:
        connection.close()
    return None


def pipelined(address: tuple[str, int]) -> str | None:
    """Fifty requests in one piece."""
    return expect(address, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50, 200)


def long_path(address: tuple[str, int]) -> str | None:
    return expect(address, request("GET", "/" + "x" * 200_000), 0, 400, 404, 414, 431)


def list_of_ones(address: tuple[str, int]) -> str | None:
    """A megabyte of numbers where images should be."""
    body = b'{"images":[1' + b",1" * 500_000 + b"]}"
    return expect(address, request("POST", "/v1/predict", body, JSON), 400, 413, 422)


ABUSES: tuple[Abuse, ...] = (
    both_lengths, other_host, half_closed, gone, idle, pipelined, long_path, list_of_ones,
)  # fmt: skip


def problem_of(case: Malformed, url: str) -> str | None:
    """A malformed request has to get a 4xx status and a sentence."""
    answered = case.send(url)
    if not 400 <= answered.status < 500 or b"Traceback" in answered.body:
        return f"status {answered.status}: {answered.body[:100]!r}"
    return None if case.plain or answered.sentence.endswith(".") else "no sentence"


def cases(count: int, url: str) -> Iterator[tuple[str, str | None]]:
    """Name and problem of each abuse: an abuse of this module, then three malformed requests."""
    address, rest = urlsplit(url), iter(malformed(count, seed=random.Random(3).randrange(99)))
    for i in range(count):
        if i % 4 == 0:
            abuse = ABUSES[i // 4 % len(ABUSES)]
            yield abuse.__name__, abuse((str(address.hostname), int(address.port or 80)))
        else:
            case = next(rest)
            yield case.name, problem_of(case, url)


def attack(service: Attacked, record: Record, count: int) -> None:
    """Send so many abuses; the service has to have the timeout of this module."""
    for name, problem in cases(count, service.url):
        record.add(name, problem or service.problem_of_good_request())


def run(count: int) -> Record:
    record = Record()
    with attacked_service(record, "--timeout", str(TIMEOUT)) as service:
        attack(service, record, count)
    return record
