"""Several processes behind one port: they share it, follow each other, and are replaced."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest
from tests.support.serving import AUTH, Launch, Server, World, other_version, picture
from tests.support.waiting import FUSE, wait_until

from engram.store.compose import roll_back
from engram.store.format import read_engram, serialise_engram


def workers_of(server: Server) -> list[psutil.Process]:
    """The processes that listen on the port, other than the parent."""
    port = int(server.url.rpartition(":")[2])
    children = psutil.Process(server.running.pid).children()
    return [
        child
        for child in children
        if any(c.laddr and c.laddr.port == port for c in child.net_connections())
    ]


def ask(server: Server, task: str) -> httpx.Response:
    """Ask for one task, in a connection of its own."""
    files = {"image": ("a.png", picture(1))}
    return httpx.post(server.url + "/v1/predict", files=files, data={"tasks": task}, timeout=60)


def answers(server: Server, task: str) -> bool:
    """Whether the task answers; nothing but a missing task is wrong."""
    response = ask(server, task)
    assert response.status_code in (200, 404), response.text
    return response.status_code == 200


def test_workers_share_the_port_are_replaced_and_follow_each_other(
    bundle: Path, world: World, launch: Launch
) -> None:
    server = launch(bundle, "--workers", "2", "--follow", "0.2", "--decoders", "1")
    try:
        wait_until(lambda: len(workers_of(server)) == 2)
        first, second = workers_of(server)
        assert server.document["workers"] == 2
        # What one attaches, both answer.
        data = world.engrams["third"].read_bytes()
        response = httpx.put(server.url + "/v1/tasks/third", content=data, headers=AUTH, timeout=60)
        assert response.status_code == 201
        wait_until(lambda: all(answers(server, "third") for _ in range(12)))

        # What one replaces, all answer with, and so with what is rolled back in the folder.
        def contents() -> set[str]:
            found = (ask(server, "third").json()["contents"]["third"] for _ in range(12))
            return set(found)

        old, new = read_engram(world.engrams["third"]), other_version(world, "third")
        data = serialise_engram(new)
        response = httpx.put(server.url + "/v1/tasks/third", content=data, headers=AUTH, timeout=60)
        assert response.status_code == 200
        wait_until(lambda: contents() == {new.content})
        roll_back(bundle, "third")
        wait_until(lambda: contents() == {old.content})
        # Metrics are those of all of them.
        text = server.get("/metrics").text
        assert (
            'engram_requests_total{method="PUT",path="/v1/tasks/{name}",status="201"} 1.0' in text
        )
        assert "engram_tasks 3.0" in text
        # One is killed: the other answers, and another one takes its place.
        first.send_signal(signal.SIGKILL)
        wait_until(lambda: not first.is_running() or first.status() == psutil.STATUS_ZOMBIE)
        assert all(answers(server, "third") for _ in range(6))
        wait_until(lambda: len(workers_of(server)) == 2)
        assert second.is_running()
    finally:
        family = psutil.Process(server.running.pid).children(recursive=True)
        code = server.stop()
    assert code == 0
    _, alive = psutil.wait_procs(family, FUSE)
    assert not alive


def test_workers_end_with_a_parent_that_is_killed(bundle: Path, launch: Launch) -> None:
    server = launch(bundle, "--workers", "2", "--decoders", "1")
    wait_until(lambda: len(workers_of(server)) == 2)
    family = psutil.Process(server.running.pid).children(recursive=True)
    os.kill(server.running.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, FUSE)
    assert not alive


def test_a_worker_that_cannot_load_ends_the_service_with_its_sentence(
    bundle: Path, nursery: pytest.FixtureRequest
) -> None:
    damaged = bundle / "first.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-8])
    running = nursery.start("serve", bundle, "--workers", "2", "--port", "0")  # type: ignore[attr-defined]
    assert running.wait().code == 2
    assert "first.safetensors" in running.stderr
    assert "Traceback" not in running.stderr
