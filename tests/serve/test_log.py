"""What happened is one line each on stderr; tokens and images are in none of them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.serving import AUTH, TOKEN, Launch, Server, World, flat_png, picture

from engram.serve.log import Log


def events(server: Server, count: int) -> list[dict[str, Any]]:
    """The lines of a log in JSON, when there are so many that are about no probe."""
    deadline = time.monotonic() + 20
    while True:
        lines = [json.loads(line) for line in server.running.stderr.splitlines()]
        found = [line for line in lines if line.get("path") not in ("/healthz", "/metrics")]
        if len(found) >= count:
            return found
        assert time.monotonic() < deadline, server.running.stderr
        time.sleep(0.02)


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
    began = time.perf_counter()
    for _ in range(12_000):  # more than the pipe and the queue hold
        log.event("attached", task="x" * 100)
    assert time.perf_counter() - began < 5
    log.stop()
    os.close(reader)
