"""What benchmarks start as a process, forked from one that has torch loaded already."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.nursery import Nursery, Running
from tests.support.waiting import wait_until

from benchmarks.serve.soak import TOKEN, Service


class _Process:
    """A command of the nursery with the methods of `subprocess.Popen` that benchmarks use."""

    def __init__(self, running: Running) -> None:
        self.running, self.pid = running, running.pid

    def poll(self) -> int | None:
        return self.wait() if self.running.ended else None

    def wait(self, timeout: float | None = None) -> int:
        code = self.running.wait().code
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def forked_commands(nursery: Nursery) -> Any:
    """Stands for the module `subprocess`: `python -m engram …` becomes a fork of the nursery."""

    def popen(command: list[str], env: dict[str, str], **_: object) -> _Process:
        _python, _m, engram, *arguments = command
        assert engram == "engram"
        return _Process(nursery.start(*arguments, ENGRAM_CACHE=env["ENGRAM_CACHE"]))

    return SimpleNamespace(Popen=popen, DEVNULL=None)


def forked_services(nursery: Nursery) -> Callable[..., Service]:
    """Stands for the class `Service`: a service that is a fork of the nursery."""

    class Forked(Service):
        def __init__(
            self, bundle: Path, folder: Path, *flags: str, files: int | None = None
        ) -> None:
            self.log = folder / f"stderr-{len(list(folder.glob('stderr-*')))}"
            running = nursery.start(
                *("serve", bundle, "--port", "0", "--json", *flags),
                stderr=self.log,
                nofile=None if files is None else (files, files),
                ENGRAM_TOKEN=TOKEN,
            )
            self.process = _Process(running)

            def said() -> bool:
                return running.files[0].exists() and running.stdout.endswith("}\n")

            wait_until(lambda: said() or running.ended, lambda: running.stderr)
            assert said(), running.stderr
            self.url = str(json.loads(running.stdout)["url"])

        def stop(self) -> int:
            self.process.send_signal(signal.SIGTERM)
            return self.process.wait()

    return Forked
