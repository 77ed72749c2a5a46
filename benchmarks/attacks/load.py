"""Many clients at once while tasks are attached and removed without a pause."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks.attacks.record import Record
from benchmarks.attacks.service import FORM, Attacked, attacked_service
from benchmarks.serve.malformed import form
from benchmarks.serve.soak import COME_AND_GO, IMAGES, STAY, TOKEN, TOLERANCE, Client, World

SECONDS, CLIENTS = 180, 64
BUSY = (429, 503)  # the service says that it has enough to do; the client waits


class AddressedClient(Client):
    """A client with a loopback address of its own, as clients of a real service have."""

    def __init__(self, url: str, number: int) -> None:
        self.own = f"127.0.1.{number + 1}"
        super().__init__(url)

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(
            str(self.address.hostname), self.address.port, timeout=60, source_address=(self.own, 0)
        )


@dataclass
class Storm:
    """What all clients share: when to stop, and what they saw."""

    world: World
    url: str
    record: Record
    until: float
    statuses: Counter[int] = field(default_factory=Counter)
    changes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str, status: int, problem: str | None) -> None:
        with self.lock:
            self.statuses[status] += 1
            self.record.add(name, problem)

    def ask(self, number: int) -> None:
        """Ask about random images until the time is over, and compare every answer."""
        rng, client = random.Random(number), AddressedClient(self.url, number)
        while time.monotonic() < self.until:
            image, task = rng.randrange(IMAGES), rng.choice((*STAY, "base", *COME_AND_GO))
            parts = [("image", self.world.images[image], True), ("tasks", task.encode(), False)]
            body = form(*parts, ("top_k", b"1000", False))
            try:
                status, answer = client.send("POST", "/v1/predict", body, **{"Content-Type": FORM})
            except (OSError, http.client.HTTPException) as error:
                self.count(f"client {number}", 0, repr(error))
                client = AddressedClient(self.url, number)
                continue
            self.count(f"client {number}", status, self.problem(status, answer, image, task))
            if status in BUSY:
                time.sleep(0.2)

    def problem(self, status: int, answer: Any, image: int, task: str) -> str | None:
        if status == 404 and task in COME_AND_GO:  # it is not attached at this moment
            return None
        if status != 200:
            return None if status in BUSY else f"status {status}: {answer}"
        (found,) = answer["images"]
        got = {part["class"]: part["probability"] for part in found["tasks"][task]["answer"]}
        expected = self.world.expected[image][task]
        if got.keys() != expected.keys():
            return f"{task} answered with other classes"
        error = max(abs(got[name] - value) for name, value in expected.items())
        return None if error <= TOLERANCE else f"{task} is wrong by {error:.1e}"

    def change(self, number: int, names: tuple[str, ...]) -> None:
        """Attach and remove tasks without a pause; in the end all are removed."""
        rng, client, attached = random.Random(number), AddressedClient(self.url, number), set[str]()
        headers = {"Authorization": f"Bearer {TOKEN}"}
        while attached or time.monotonic() < self.until:
            name = rng.choice(names)
            if name in attached:
                status, answer = client.send("DELETE", f"/v1/tasks/{name}", b"", **headers)
                good = status == 204
            elif time.monotonic() < self.until:
                body = self.world.engrams[name]
                status, answer = client.send("PUT", f"/v1/tasks/{name}", body, **headers)
                good = status == 201
            else:
                continue
            if good:
                attached ^= {name}
                self.changes += 1
            self.count("change", status, None if good or status in BUSY else str(answer))
            if not good:
                time.sleep(0.2)


def attack(service: Attacked, record: Record, seconds: float, clients: int) -> None:
    """Let so many clients ask for so long."""
    storm = Storm(service.world, service.url, record, time.monotonic() + seconds)
    half = len(COME_AND_GO) // 2
    threads = [threading.Thread(target=storm.ask, args=(i,)) for i in range(clients)]
    for i, names in enumerate((COME_AND_GO[:half], COME_AND_GO[half:])):
        threads.append(threading.Thread(target=storm.change, args=(clients + i, names)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted = sorted(storm.statuses.items())
    statuses = ", ".join(f"{count:,} × {status}" for status, count in counted)
    record.details = f"{clients} clients, {storm.changes:,} attaches and removals; {statuses}"


def run(seconds: int) -> Record:
    record = Record()
    with attacked_service(record) as service:
        attack(service, record, seconds, CLIENTS)
    return record
