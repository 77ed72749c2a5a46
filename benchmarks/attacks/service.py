"""`engram serve` while it is attacked: /healthz is sampled, and good requests follow bad ones."""

from __future__ import annotations

import http.client
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.attacks.record import Record
from benchmarks.paths import ROOT
from benchmarks.serve.malformed import BOUNDARY, form, good_picture
from benchmarks.serve.soak import Service, World, make_world

FORM = f"multipart/form-data; boundary={BOUNDARY.decode()}"


@dataclass
class Attacked:
    """A running service, and what its clients see."""

    world: World
    service: Service

    @property
    def url(self) -> str:
        return self.service.url

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        address = urlsplit(self.url)
        return http.client.HTTPConnection(str(address.hostname), address.port, timeout=timeout)

    def send(self, picture: bytes, timeout: float = 60) -> tuple[int, bytes]:
        """The answer to one picture; status 0 if there is none."""
        connection = self.connect(timeout)
        try:
            body = form(("image", picture, True))
            connection.request("POST", "/v1/predict", body, {"Content-Type": FORM})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error).encode()
        finally:
            connection.close()

    def problem_of_good_request(self) -> str | None:
        """What is wrong with the answer to a good request, which should be quick.

        A service without time for it, as on a busy machine, says 503: then it is asked again.
        """
        began, status, body = time.monotonic(), 503, b""
        while status == 503 and time.monotonic() - began < 30:
            status, body = self.send(good_picture(), timeout=30)
        if status != 200:
            return f"a good request got {status} after it ({body[:100]!r})"
        seconds = time.monotonic() - began
        return f"a good request took {seconds:.0f} seconds after it" if seconds > 30 else None


@contextmanager
def attacked_service(
    record: Record,
    *flags: str,
    files: int | None = None,
    world: Callable[[Path], World] = make_world,
) -> Iterator[Attacked]:
    """A service on pico, or another world, watched until the block ends; it has to stop well.

    `files` is how many files it may open.
    """
    with tempfile.TemporaryDirectory() as name:
        made = world(Path(name))
        attacked = Attacked(made, Service(made.bundle, Path(name), *flags, files=files))
        command = [sys.executable, "-m", "benchmarks.attacks.health", attacked.url]
        pipe = subprocess.PIPE
        sampler = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
        try:
            yield attacked
        finally:
            sampled, _ = sampler.communicate()
            code = attacked.service.stop()
        log = attacked.service.log.read_text(errors="replace")
        if code != 0:
            record.lost.append(f"the service ended with {code}: {log[-300:]}")
        for word in ("Traceback", "panicked"):
            if word in log:
                record.lost.append(f"the log has a {word}: {log[log.index(word) :][:300]}")
        record.slowest_health = float(sampled)
