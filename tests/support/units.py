"""A unit of systemd as its settings, and the service that it starts."""

import re
import shlex
import socket
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.support.nursery import Nursery, Running
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.waiting import wait_until

UNIT = ROOT / "deploy" / "engram.service"


def settings_of_unit(path: Path = UNIT) -> dict[str, list[str]]:
    """All values of every setting, in order."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found[name].append(value)
    return found


def program_and_arguments(site: str, bundle: Path, port: int) -> tuple[str, list[str]]:
    """What ExecStart runs, for another bundle and port."""
    (text,) = settings_of_unit()["ExecStart"]
    text = text.replace("${SITE}", site).replace("--port 8000", f"--port {port}")
    program, *arguments = shlex.split(re.sub(r"/var/lib/engram/bundle", str(bundle), text))
    return program, arguments


@dataclass
class Started:
    """A service that answers, as the unit starts it."""

    running: Running
    port: int

    def stop(self, number: int) -> int:
        return self.running.signal_when(number, lambda: True).code or 0


def start_unit(nursery: Nursery, site: str, bundle: Path, **env: str) -> Started:
    port = free_port()
    _, arguments = program_and_arguments(site, bundle, port)
    running = nursery.start(*arguments, **env)
    wait_until(lambda: answers(port) or running.ended, lambda: running.stderr)
    assert not running.ended, running.stderr
    return Started(running, port)


def answers(port: int) -> bool:
    """Whether somebody answers on a port of this machine."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True
