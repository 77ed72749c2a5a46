"""Decoders are forked from a small process, killed at once, and end with whoever started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.support.waiting import running, wait_until

from engram.serve.decoding.launcher import Child, Launcher
from engram.serve.decoding.messages import receive, send

MEMORY = 10**9


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.stop()


def works(child: Child) -> bool:
    """Whether a decoder answers."""
    limits = {"max_images": 1, "max_body": 10}
    what = {"do": "read", "options": "PredictOptions", "kind": "application/json", "limits": limits}
    send(child.connection, what, b"{}")
    return receive(child.connection)[0]["status"] == 422


def test_a_decoder_is_started_and_killed_while_others_go_on(launcher: Launcher) -> None:
    one, other = launcher.fork(MEMORY), launcher.fork(MEMORY)
    assert works(one)
    os.kill(one.pid, signal.SIGSTOP)  # as one that decodes for ever
    launcher.kill(one)
    wait_until(lambda: not running(one.pid))
    assert works(other)
    assert works(launcher.fork(MEMORY))


def test_only_decoders_are_killed(launcher: Launcher) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ours, theirs = socket.socketpair()
    with theirs:
        launcher.kill(Child(sleeper.pid, ours))
        assert works(launcher.fork(MEMORY))
    assert sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()


def test_another_launcher_is_started_when_it_was_killed(launcher: Launcher) -> None:
    assert works(launcher.fork(MEMORY))
    process = launcher._process
    assert process is not None
    process.kill()
    process.wait()
    assert works(launcher.fork(MEMORY))


def test_signals_of_a_terminal_do_not_end_a_decoder(launcher: Launcher) -> None:
    child = launcher.fork(MEMORY)
    assert works(child)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child.pid, number)
    assert works(child)


def test_a_decoder_does_not_know_the_token(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGRAM_TOKEN", "a-secret")
    child = launcher.fork(MEMORY)
    assert works(child)
    with open(f"/proc/{child.pid}/environ") as file:
        assert "a-secret" not in file.read()


@pytest.mark.parametrize("end", ["close", "kill"])
def test_decoders_end_with_the_launcher(launcher: Launcher, end: str) -> None:
    child = launcher.fork(MEMORY)
    assert works(child)
    if end == "close":
        os.kill(child.pid, signal.SIGSTOP)
        launcher.stop()
    else:
        child.connection.close()
    wait_until(lambda: not running(child.pid))
