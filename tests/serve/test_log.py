"""What happened is one line each on stderr; tokens and images are in none of them."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.serving import AUTH, TOKEN, Launch, Server, World, flat_png, picture
from tests.support.waiting import FUSE, wait_until

from engram.serve.log import Log, Seldom


def events(server: Server, count: int) -> list[dict[str, Any]]:
    """The lines of a log in JSON, when there are so many that are about no probe."""

    def found() -> list[dict[str, Any]]:
        whole = server.running.stderr.rpartition("\n")[0].splitlines()
        lines = [json.loads(line) for line in whole]
        return [line for line in lines if line.get("path") not in ("/healthz", "/metrics")]

    wait_until(lambda: len(found()) >= count, lambda: server.running.stderr)
    return found()


def test_everything_that_matters_is_a_line(bundle: Path, world: World, launch: Launch) -> None:
    server = launch(bundle, "--log", "json", "--decode-timeout", "0.1")
    url, data = f"{server.url}/v1/tasks/third", world.engrams["third"].read_bytes()
    with httpx.Client(timeout=60) as client:
        wrong = {"Authorization": "Bearer wrong-one"}
        assert client.put(url, content=data, headers=wrong).status_code == 401
        assert client.put(url, content=data, headers=AUTH).status_code == 201
        assert client.delete(url, headers=AUTH).status_code == 204
        assert client.get(f"{url}?token={TOKEN}").status_code == 404
        files = {"image": ("a-name.png", flat_png(7000))}
        assert client.post(f"{server.url}/v1/predict", files=files).status_code == 422
    found = events(server, 9)
    assert [one["event"] for one in found] == [
        "refused token", "request", "attached", "request", "detached", "request", "request",
        "killed decoder", "request",
    ]  # fmt: skip
    assert found[0]["client"] == "127.0.0.1"
    assert (found[1]["method"], found[1]["path"], found[1]["status"]) == (
        "PUT", "/v1/tasks/third", 401
    )  # fmt: skip
    assert found[2]["task"] == found[4]["task"] == "third"
    assert found[7]["reason"] == "0.1 seconds were over"
    for secret in (TOKEN, "wrong-one", "a-name"):
        assert secret not in server.running.stderr
    server.stop(signal.SIGKILL)


def test_a_line_for_people(server: Server) -> None:
    httpx.get(f"{server.url}/v1/tasks/%1b[31m%0anobody", timeout=60)
    httpx.post(f"{server.url}/v1/predict", files={"image": picture()}, timeout=60)
    assert server.stop() == 0
    lines = [line for line in server.running.stderr.splitlines() if "/healthz" not in line]
    assert len(lines) == 2
    assert " 127.0.0.1 GET /v1/tasks/\N{REPLACEMENT CHARACTER}[31m" in lines[0]
    assert lines[0].split(" 404 ")[1].endswith(" ms")
    assert " 127.0.0.1 POST /v1/predict 200 " in lines[1]


def test_nothing_waits_for_somebody_who_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr("sys.stderr", os.fdopen(writer, "w"))
    log = Log("text")

    def write() -> None:
        for _ in range(12_000):  # more than the pipe and the queue hold
            log.event("attached", task="x" * 100)

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    writing.join(FUSE)
    assert not writing.is_alive()
    log.stop()
    os.close(reader)
    wait_until(log._lines.empty)  # its thread writes to stderr, which is another one after the test


def test_the_same_error_passes_once_in_an_interval_and_says_how_often_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, passed = 0.0, list[str]()
    monkeypatch.setattr("time.monotonic", lambda: now)
    logger = logging.Logger("uvicorn.error")
    logger.addFilter(Seldom())
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: passed.append(record.getMessage()))
    logger.addHandler(handler)

    def fail(error: Exception) -> None:
        try:
            raise error
        except type(error):
            logger.exception("It failed")

    for _ in range(100):
        fail(ValueError())
    fail(KeyError())
    assert passed == ["It failed"] * 2
    now = 61.0
    fail(ValueError())
    assert "99 more" in passed[2]
