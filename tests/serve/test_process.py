"""Real processes, really killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from engram.bundles import read_bundle

from .conftest import AUTH, Server, World, picture, start


def test_it_listens_on_this_machine_alone(server: Server) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    assert server.document["tasks"] == ["base", "first", "second"]
    assert server.get("/readyz").json() == {"status": "ready"}


def test_sigterm_finishes_what_was_accepted(bundle: Path) -> None:
    server = start(bundle, "--wait-ms", "1500")  # so that a request is under way for a while
    got: list[int] = []

    def ask() -> None:
        response = httpx.post(f"{server.url}/v1/predict", files={"image": picture()}, timeout=60)
        got.append(response.status_code)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    while "engram_waiting_images 4.0" not in server.get("/metrics").text:
        time.sleep(0.01)
        assert not got
    server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert got == [200] * 4
    assert server.process.wait(60) == 0
    with pytest.raises(httpx.ConnectError):
        server.get("/healthz")


def test_ctrl_c_stops_it(server: Server) -> None:
    assert server.stop(signal.SIGINT) == 130


def test_what_is_attached_survives_a_restart(bundle: Path, world: World) -> None:
    server = start(bundle)
    data = world.engrams["third"].read_bytes()
    url = f"{server.url}/v1/tasks/third"
    assert httpx.put(url, content=data, headers=AUTH, timeout=60).status_code == 201
    server.stop(signal.SIGKILL)
    again = start(bundle)
    assert again.document["tasks"] == ["base", "first", "second", "third"]
    assert again.stop() == 0


_DIE = """
import os, sys
import engram.files
from engram.cli import main
moment, real, calls = int(sys.argv[1]), {}, [0]

def dying(name):
    real[name] = getattr(os, name)
    def call(*arguments, **settings):
        if attaching():
            calls[0] += 1
            if calls[0] == moment:
                os.kill(os.getpid(), 9)
        return real[name](*arguments, **settings)
    return call

def attaching():
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "update_bundle":
            return True
        frame = frame.f_back
    return False

for name in ("fsync", "replace", "open", "unlink"):
    setattr(os, name, dying(name))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("moment", range(1, 9))
@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_kill_9_at_any_step_of_a_change_leaves_a_whole_bundle(
    bundle: Path, world: World, method: str, moment: int, tmp_path: Path
) -> None:
    """The process kills itself before the nth call that touches the disk."""
    command = [sys.executable, "-c", _DIE, str(moment), "serve", str(bundle), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "ENGRAM_TOKEN": "a-secret", "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    text = process.stdout.readline() + process.stdout.readline()
    url = text.split('"')[3]
    old, new = ["first", "second"], ["first", "second", "third"]
    finished = False
    try:
        if method == "PUT":
            data = world.engrams["third"].read_bytes()
            httpx.put(f"{url}/v1/tasks/third", content=data, headers=AUTH, timeout=60)
        else:
            new = ["first"]
            httpx.delete(f"{url}/v1/tasks/second", headers=AUTH, timeout=60)
        finished = True
        process.kill()
    except httpx.TransportError:
        pass
    code = process.wait(60)
    assert code == -signal.SIGKILL
    names = [engram.spec.name for engram in read_bundle(bundle).engrams]
    assert names == new if finished else names in (old, new)


def test_kill_9_at_random_moments_of_attaching(bundle: Path, world: World) -> None:
    data = world.engrams["third"].read_bytes()
    for wait in (0.005, 0.02, 0.05):
        server = start(bundle)

        def put(server: Server = server) -> None:
            with contextlib.suppress(httpx.TransportError):
                httpx.put(f"{server.url}/v1/tasks/third", content=data, headers=AUTH, timeout=60)

        thread = threading.Thread(target=put)
        thread.start()
        time.sleep(wait)
        server.stop(signal.SIGKILL)
        thread.join()
        names = [engram.spec.name for engram in read_bundle(bundle).engrams]
        assert names in (["first", "second"], ["first", "second", "third"])
        if "third" in names:
            break


def test_mistakes_are_sentences(bundle: Path, world: World, tmp_path: Path) -> None:
    def refusal(*arguments: object) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "engram", "serve", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.splitlines()) == 1
        return done.stderr

    assert "is not a bundle; `engram compose" in refusal(tmp_path)
    assert "batch is 0; it must be a number, at least 1" in refusal(bundle, "--batch", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "cannot listen on 127.0.0.1" in refusal(bundle, "--port", port)
    assert "The token is blank" in refusal(bundle, "--token", " ")
    shutil.rmtree(bundle)
    assert "is not a bundle" in refusal(bundle)
