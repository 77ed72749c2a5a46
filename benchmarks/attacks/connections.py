"""Connections that one client opens and holds, more than the service may open files.

They say nothing, send half a head or a body that does not end, or do not read their answers. Good
requests of the same address and of others go on meanwhile.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import socket
import time
from urllib.parse import urlsplit

from benchmarks.attacks.record import Record
from benchmarks.attacks.service import FORM, Attacked, attacked_service
from benchmarks.serve.malformed import form, good_picture

FILES = 1024  # that the service may open
TIMEOUT = 5  # of the service, in seconds
WAVE = 1500  # connections that are held at a time
TIMES = 15  # that good requests are sent, while a wave is opened
QUIET = 10_000  # bytes of log that are about no request

HEAD = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\n"
UNREAD = 20 * b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
PROXY, CLIENT, OTHER = "127.0.0.1", "127.0.0.2", "127.0.0.3"  # the service trusts the first
#: What each connection of a wave sends, its address, and the share of the connections that do. A
#: client that reads no answer has work done, so it has as many as it may have at once.
WAVES = {
    "silent": (b"", PROXY, 1.0),
    "silent from elsewhere": (b"", CLIENT, 1.0),
    "half a head": (HEAD, PROXY, 1.0),
    "bodies that do not end": (HEAD + b"Content-Length: 1000\r\n\r\n{", CLIENT, 1.0),
    "answers that are not read": (UNREAD, CLIENT, 1 / 15),
}


def problem_of(service: Attacked, source: str, predict: bool) -> str | None:
    """What is wrong with the answer to a good request from an address."""
    address = urlsplit(service.url)
    connection = http.client.HTTPConnection(
        str(address.hostname), address.port, timeout=30, source_address=(source, 0)
    )
    try:
        if predict:
            body = form(("image", good_picture(), True))
            connection.request("POST", "/v1/predict", body, {"Content-Type": FORM})
        else:
            connection.request("GET", "/healthz")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"{source} got no answer ({error!r})"
    finally:
        connection.close()
    return None if status == 200 else f"{source} got the status {status}"


def hold(service: Attacked, record: Record, name: str, count: int) -> int:
    """Open so many connections, with good requests in between; gives the descriptors of then."""
    data, source, share = WAVES[name]
    count = int(count * share)
    address, held, most = urlsplit(service.url), list[socket.socket](), 0
    try:
        for i in range(count):
            connection = socket.socket()
            held.append(connection)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.bind((source, 0))
            connection.settimeout(10)
            with contextlib.suppress(OSError):  # it may be closed at once
                connection.connect((str(address.hostname), int(address.port or 80)))
                connection.sendall(data)
            if (i + 1) % max(1, count // TIMES) == 0:
                record.add(name, problem_of(service, PROXY, predict=False))
                if data != UNREAD:  # then its address has all that it may have
                    record.add(name, problem_of(service, CLIENT, predict=False))
                record.add(name, problem_of(service, OTHER, predict=True))
                most = max(most, descriptors(service))
    finally:
        for connection in held:
            connection.close()
    return most


def descriptors(service: Attacked) -> int:
    return len(os.listdir(f"/proc/{service.service.process.pid}/fd"))


def descriptors_after(service: Attacked, before: int) -> int:
    """How many there are when all connections should be closed."""
    deadline = time.monotonic() + 2 * TIMEOUT + 10
    while descriptors(service) > before + 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    return descriptors(service)


def attack(service: Attacked, record: Record, each: int, files: int) -> None:
    """Hold so many connections in each wave, of a service that may open so many files."""
    problem_of(service, OTHER, predict=True)  # the decoders have started
    before, most = descriptors(service), 0
    for name in WAVES:
        most = max(most, hold(service, record, name, each))
    after = descriptors_after(service, before)
    if after > before + 2:
        record.lost.append(f"{after} descriptors are open afterwards, {before} were before")
    lines = service.service.log.read_text(errors="replace").splitlines(keepends=True)
    log = sum(len(line) for line in lines if not line.endswith(" ms\n"))
    if log > QUIET:
        record.lost.append(f"the log has {log} bytes about no request")
    record.details = (
        f"{each:,} connections at a time, with {files:,} descriptors; open were {before} before, "
        f"{most} at most and {after} afterwards; {log} bytes of log about no request"
    )


def run(count: int) -> Record:
    record = Record()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WAVE + 500  # of this process
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(wanted, hard)), hard))
    each = min(WAVE, count // len(WAVES))
    files = min(FILES, 280 + each // 2)  # so that a small wave is too large, too
    flags = ("--timeout", str(TIMEOUT), "--client-connections", str(min(100, each // 3)))
    with attacked_service(record, *flags, files=files) as service:
        attack(service, record, each, files)
    return record
