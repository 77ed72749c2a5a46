"""Real processes, really killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from tests.support.serving import AUTH, TOKEN, Launch, Server, World, picture
from tests.support.waiting import FUSE, wait_until

from engram.cli import main as cli
from engram.serve.launch import Job
from engram.serve.service import Service
from engram.serve.service_settings import Settings
from engram.store.bundles import read_bundle


def test_it_listens_on_this_machine_alone(server: Server) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    assert server.document["tasks"] == ["base", "first", "second"]
    assert server.get("/readyz").json() == {"status": "ready"}


def test_sigterm_finishes_what_was_accepted(bundle: Path, launch: Launch) -> None:
    server = launch(bundle, "--wait-ms", "1500")  # so that a request is under way for a while
    got: list[int] = []

    def ask() -> None:
        files = {"image": picture()}
        got.append(httpx.post(f"{server.url}/v1/predict", files=files, timeout=FUSE).status_code)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()

    def accepted() -> int:
        (waiting,) = re.findall(r"^engram_waiting_images (\d+)", server.get("/metrics").text, re.M)
        return int(waiting) + len(got)

    wait_until(lambda: accepted() == 4)
    assert server.stop(signal.SIGTERM) == 0
    for thread in threads:
        thread.join()
    assert got == [200] * 4
    with pytest.raises(httpx.ConnectError):
        server.get("/healthz")


def test_ctrl_c_stops_it(bundle: Path, launch: Launch) -> None:
    assert launch(bundle).stop(signal.SIGINT) == 130


def test_only_a_trusted_proxy_says_who_the_client_is(bundle: Path, launch: Launch) -> None:
    server = launch(bundle, "--trust-proxy", "127.0.0.2/31")
    for address in ("127.0.0.1", "127.0.0.2", "127.0.0.4"):  # this machine, a proxy, anybody
        transport = httpx.HTTPTransport(local_address=address)
        with httpx.Client(transport=transport, timeout=60) as client:
            headers = {"X-Forwarded-For": f"198.51.100.7, 203.0.113.{address[-1]}, 127.0.0.3"}
            assert client.get(f"{server.url}/v1/tasks", headers=headers).status_code == 200
    server.stop()
    asked = [line for line in server.running.stderr.splitlines() if "/v1/tasks" in line]
    clients = ("203.0.113.1", "203.0.113.2", "127.0.0.4")
    assert [name for line in asked for name in clients if name in line] == list(clients)
    assert "198.51.100.7" not in server.running.stderr  # what a client itself sent


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_decoders_end_with_the_service(bundle: Path, launch: Launch, number: int) -> None:
    server = launch(bundle)
    count = 2 + Settings().decoders  # the fork server and its resource tracker, too
    wait_until(lambda: len(children(server.running.pid)) == count)
    started = children(server.running.pid)
    os.kill(started[-1], signal.SIGSTOP)  # as one that decodes for long
    server.stop(number)
    if number == signal.SIGKILL:  # nobody is left to kill it
        os.kill(started[-1], signal.SIGCONT)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))


def children(pid: int) -> list[int]:
    """All processes that a process has started, and theirs."""
    lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    own = [int(child) for one in lists for child in one]
    return [*own, *(grandchild for child in own for grandchild in children(child))]


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


def test_a_token_from_a_file_ends_in_a_newline(bundle: Path) -> None:
    job = Job(bundle, Settings(port=0), token=f"{TOKEN}\n")
    service = Service(job, job.open())
    with service.listener, TestClient(service.app, "http://localhost") as client:
        assert client.delete("/v1/tasks/second", headers=AUTH).status_code == 204


def test_engrams_are_served_as_if_composed(bundle: Path, world: World, launch: Launch) -> None:
    before = sorted(bundle.iterdir())
    server = launch(bundle / "first.safetensors", str(bundle / "second.safetensors"))
    assert server.document["tasks"] == ["base", "first", "second"]
    url, data = f"{server.url}/v1/tasks/third", world.engrams["third"].read_bytes()
    assert httpx.put(url, content=data, headers=AUTH, timeout=60).status_code == 201
    scratch = Path(server.document["bundle"])
    assert (scratch / "third.safetensors").is_file()
    assert server.stop() == 0
    assert sorted(bundle.iterdir()) == before
    assert not scratch.exists()


def test_mistakes_are_sentences(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*arguments: object) -> str:
        assert cli.main(["serve", *map(str, arguments)]) == 2
        sentence = capsys.readouterr().err
        assert len(sentence.splitlines()) == 1
        return sentence

    (tmp_path / "empty").mkdir()
    assert "is not a bundle" in refusal(tmp_path / "empty")
    assert "then serve the folder" in refusal(Path("hf:you/garden"))
    assert "--batch is 0" in refusal(bundle, "--batch", 0)
    assert "--max-bodies" in refusal(bundle, "--max-bodies", 1000)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1, port {port} (Address already in use); choose others" in refusal(
            bundle, "--port", port
        )
    assert "missing does not exist" in refusal(tmp_path / "missing")
    assert "then serve the folder" in refusal(bundle / "first.safetensors", "hf:you/garden")
    assert "cannot be read" in refusal(bundle / "first.safetensors", tmp_path / "missing")
    assert "The token is blank" in refusal(bundle, "--token", " ")
    outside = ("--host", "0.0.0.0", "--port", "0")
    assert "set a token for them in ENGRAM_ASK_TOKEN" in refusal(bundle, *outside)
    assert "give one of the two" in refusal(bundle, *outside, "--open", "--ask-token", "x")
    assert "choose two different ones" in refusal(bundle, "--token", "x", "--ask-token", "x")


@pytest.mark.parametrize("way", ["open", "token"])
def test_beyond_this_machine_with_a_token_or_openly(bundle: Path, way: str) -> None:
    settings = Settings(host="0.0.0.0", port=0, open=way == "open")
    job = Job(bundle, settings, ask_token=None if way == "open" else "x")
    service = Service(job, job.open())
    with service.listener:
        description = service.description
    rows = dict(description.rows)
    if way == "open":
        assert rows["open"] == "anyone who can reach this address can send requests"
    else:
        assert rows["asking"] == "needs the token of ENGRAM_ASK_TOKEN"
    assert description.document["asking"] == way
    assert "'x'" not in repr(job)
