"""Real processes, really killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from engram.store.bundles import read_bundle, update_bundle
from engram.store.format import read_engram

from .conftest import AUTH, Launch, Server, World, picture

if TYPE_CHECKING:
    from tests.support.nursery import Nursery


def test_it_listens_on_this_machine_alone(server: Server) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    assert server.document["tasks"] == ["base", "first", "second"]
    assert server.get("/readyz").json() == {"status": "ready"}


def test_sigterm_finishes_what_was_accepted(bundle: Path, launch: Launch) -> None:
    server = launch(bundle, "--wait-ms", "1500")  # so that a request is under way for a while
    got: list[int] = []

    def ask() -> None:
        files = {"image": picture()}
        with contextlib.suppress(httpx.ConnectError):  # it came too late to be accepted
            got.append(httpx.post(f"{server.url}/v1/predict", files=files, timeout=60).status_code)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    while "engram_waiting_images 0.0" in server.get("/metrics").text and not got:
        time.sleep(0.01)
    assert server.stop(signal.SIGTERM) == 0
    for thread in threads:
        thread.join()
    assert set(got) == {200}
    with pytest.raises(httpx.ConnectError):
        server.get("/healthz")


def test_ctrl_c_stops_it(bundle: Path, launch: Launch) -> None:
    assert launch(bundle).stop(signal.SIGINT) == 130


def test_what_is_attached_survives_a_restart(bundle: Path, world: World, launch: Launch) -> None:
    server = launch(bundle)
    data = world.engrams["third"].read_bytes()
    url = f"{server.url}/v1/tasks/third"
    assert httpx.put(url, content=data, headers=AUTH, timeout=60).status_code == 201
    server.stop(signal.SIGKILL)
    again = launch(bundle)
    assert again.document["tasks"] == ["base", "first", "second", "third"]
    assert again.stop() == 0


def test_kill_9_while_attaching_leaves_a_bundle_that_serves(
    bundle: Path, world: World, launch: Launch
) -> None:
    data = world.engrams["third"].read_bytes()
    for wait in (0.002, 0.01, 0.03):
        server = launch(bundle)

        def put(url: str = f"{server.url}/v1/tasks/third") -> None:
            with contextlib.suppress(httpx.TransportError):
                httpx.put(url, content=data, headers=AUTH, timeout=60)

        thread = threading.Thread(target=put)
        thread.start()
        time.sleep(wait)
        server.stop(signal.SIGKILL)
        thread.join()
        assert server.document["tasks"][:3] == ["base", "first", "second"]
        read_bundle(bundle)
    assert launch(bundle).stop() == 0


@pytest.mark.parametrize("change", ["attach", "remove"])
def test_kill_9_at_any_step_of_a_change_leaves_a_whole_bundle(
    bundle: Path, world: World, change: str
) -> None:
    """A process kills itself before the nth call that touches the disk, for every n."""
    old = read_bundle(bundle)
    new = (
        old.plus(read_engram(world.engrams["third"])) if change == "attach" else old.minus("second")
    )
    before, after = ([engram.spec.name for engram in one.engrams] for one in (old, new))
    found = []
    for step in range(1, 30):
        child = os.fork()
        if child == 0:
            _kill_before(step)
            with contextlib.suppress(BaseException):
                update_bundle(old, new)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found.append([engram.spec.name for engram in read_bundle(bundle).engrams])
        if code == 0:
            break
        assert code == -signal.SIGKILL
        if found[-1] == after:
            update_bundle(new, old)
    else:
        raise AssertionError("it never came to an end")
    assert len(found) > 4
    assert before in found
    assert found[-1] == after
    assert all(names in (before, after) for names in found)


def _kill_before(step: int) -> None:
    """Make the nth call to the system that changes files the last of this process."""
    count = 0

    def dying(real):  # type: ignore[no-untyped-def]
        def call(*arguments, **settings):  # type: ignore[no-untyped-def]
            nonlocal count
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **settings)

        return call

    for name in ("fsync", "replace", "open", "unlink"):
        setattr(os, name, dying(getattr(os, name)))


def test_mistakes_are_sentences(bundle: Path, nursery: Nursery, tmp_path: Path) -> None:
    def refusal(*arguments: object) -> str:
        done = nursery.run("serve", *arguments)
        assert done.code == 2, done.stderr
        assert len(done.stderr.splitlines()) == 1
        return done.stderr

    (tmp_path / "empty").mkdir()
    assert "is not a bundle; `engram compose" in refusal(tmp_path / "empty")
    assert "then serve the folder" in refusal(Path("hf:you/garden"))
    assert "batch is 0; it must be a whole number, at least 1" in refusal(bundle, "--batch", 0)
    assert "make max_bodies at least as large" in refusal(bundle, "--max-bodies", 1000)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1, port {port} (Address already in use); choose others" in refusal(
            bundle, "--port", port
        )
    assert "missing does not exist" in refusal(tmp_path / "missing")
    alone = bundle / "first.safetensors"
    assert f"is not a bundle; `engram compose {alone} -o FOLDER` makes" in refusal(alone)
    assert "The token is blank" in refusal(bundle, "--token", " ")
