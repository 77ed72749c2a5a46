"""Three services on one bundle folder: tasks come and go, and one after another is killed.

    OMP_NUM_THREADS=1 python -m benchmarks.serve.replicas [--seconds 120] [--clients 32]

Clients ask all of them without a pause, and compare every answer with the model called directly.
Tasks are attached and removed through any of them, and the time until all answer is measured. Every
few seconds one is killed with SIGKILL and started again. It writes benchmarks/results/replicas.md;
the exit code is 1 if an answer was wrong, a task was lost, or a connection broke whose service had
not been killed.
"""

from __future__ import annotations

import argparse
import http.client
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import markdown_table, write_report
from benchmarks.serve.malformed import form
from benchmarks.serve.soak import (
    COME_AND_GO,
    IMAGES,
    STAY,
    TOKEN,
    Client,
    Service,
    Tally,
    World,
    compare,
    make_world,
)
from engram.store.bundles import read_bundle

REPLICAS = 3
LIMIT = 2.0  # seconds after which a change has to be everywhere
FLAGS = ("--decoders", "2", "--follow", "0.5", "--client-requests", "1000")
FORM = "multipart/form-data; boundary=----boundary"
BROKEN = (OSError, http.client.HTTPException)


@dataclass
class Replica:
    """One service; `life` counts its starts, so that a client knows whether it was killed."""

    world: World
    folder: Path
    service: Service = field(init=False)
    life: int = 0
    alive: bool = False

    def start(self) -> None:
        self.service = Service(self.world.bundle, self.folder, *FLAGS)
        self.life, self.alive = self.life + 1, True

    def kill(self) -> None:
        self.alive = False
        self.service.process.kill()
        self.service.process.wait()

    def tasks(self) -> set[str]:
        status, answer = Client(self.service.url).send("GET", "/v1/tasks", b"")
        assert status == 200, answer
        return {task["name"] for task in answer["tasks"]}


@dataclass
class Storm:
    """The replicas, and what all threads saw."""

    world: World
    replicas: list[Replica]
    until: float
    tally: Tally = field(default_factory=Tally)
    broken: int = 0  # connections to a service that was killed
    kills: int = 0
    delays: list[float] = field(default_factory=list)

    def any(self, rng: random.Random) -> Replica:
        while True:
            replica = rng.choice(self.replicas)
            if replica.alive:
                return replica
            time.sleep(0.05)

    @contextmanager
    def survives(self, replica: Replica) -> Iterator[None]:
        """A connection may break if its service was killed meanwhile, and only then."""
        life = replica.life
        try:
            yield
        except BROKEN as error:
            time.sleep(0.1)  # the thread that kills says so first
            if replica.alive and replica.life == life:
                self.tally.fault(f"no answer from a service that was not killed: {error!r}")
            with self.tally.lock:
                self.broken += 1

    def ask(self, seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < self.until and len(self.tally.faults) < 20:
            replica = self.any(rng)
            image, task = rng.randrange(IMAGES), rng.choice((*STAY, "base", *COME_AND_GO))
            parts = [("image", self.world.images[image], True), ("tasks", task.encode(), False)]
            body = form(*parts, ("top_k", b"1000", False))
            with self.survives(replica):
                client = Client(replica.service.url)
                status, answer = client.send("POST", "/v1/predict", body, **{"Content-Type": FORM})
                with self.tally.lock:
                    self.tally.statuses[str(status)] += 1
                if status == 200:
                    compare(self.world, self.tally, [image], [task], answer)
                elif not (status == 404 and task in COME_AND_GO) and status not in (429, 503):
                    self.tally.fault(f"{status}: {answer}")

    def change(self) -> None:
        """Attach and remove tasks through any replica, and wait until all have noticed."""
        rng, attached = random.Random(7), set[str]()
        while time.monotonic() < self.until:
            name, replica = rng.choice(COME_AND_GO), self.any(rng)
            status = self._send(replica, name, name not in attached)
            changed = attached ^ {name}
            if status in (200, 201, 204):
                attached = changed
                self.tally.changes += 1
                self._everywhere(attached)
            elif status is None:  # it was killed: the change was made, or it was not
                on_disk = {one.spec.name for one in read_bundle(self.world.bundle).engrams}
                found = on_disk - set(STAY)
                if found not in (attached, changed):
                    self.tally.fault(f"{found} are on disk instead of {attached} or {changed}")
                attached = found
            else:
                self.tally.fault(f"changing {name}: status {status}")
        on_disk = {one.spec.name for one in read_bundle(self.world.bundle).engrams}
        if on_disk != {*STAY, *attached}:
            self.tally.fault(f"{on_disk} are on disk at the end instead of {attached}")

    def _send(self, replica: Replica, name: str, attach: bool) -> int | None:
        headers, body = {"Authorization": f"Bearer {TOKEN}"}, self.world.engrams[name]
        method, data = ("PUT", body) if attach else ("DELETE", b"")
        with self.survives(replica):
            client = Client(replica.service.url)
            return client.send(method, f"/v1/tasks/{name}", data, **headers)[0]
        return None

    def _everywhere(self, attached: set[str]) -> None:
        began, expected = time.monotonic(), {*STAY, *attached}
        lives = {id(one): one.life for one in self.replicas if one.alive}
        for replica in self.replicas:
            while lives.get(id(replica)) == replica.life and replica.alive:
                with self.survives(replica):
                    if replica.tasks() == expected:
                        break
                if time.monotonic() - began > 10 * LIMIT:
                    self.tally.fault(f"a change was not followed in {10 * LIMIT:g} seconds")
                    return
                time.sleep(0.02)
        self.delays.append(time.monotonic() - began)

    def kill(self, pause: float) -> None:
        """Kill one after another, and start it again."""
        while time.monotonic() < self.until:
            time.sleep(pause)
            replica = self.replicas[self.kills % len(self.replicas)]
            replica.kill()
            self.kills += 1
            time.sleep(1)
            replica.start()


def storm(world: World, folder: Path, seconds: float, clients: int) -> Storm:
    replicas = [Replica(world, folder) for _ in range(REPLICAS)]
    for replica in replicas:
        replica.start()
    running = Storm(world, replicas, time.monotonic() + seconds)
    work: list[tuple[Any, tuple[Any, ...]]] = [(running.ask, (i,)) for i in range(clients)]
    work += [(running.change, ()), (running.kill, (seconds / 10,))]
    threads = [threading.Thread(target=target, args=given) for target, given in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    states = [replica.tasks() for replica in replicas]
    time.sleep(LIMIT)
    states = [replica.tasks() for replica in replicas]
    if any(state != states[0] for state in states):
        running.tally.fault(f"the services end with different tasks: {states}")
    for replica in replicas:
        replica.service.stop()
    return running


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve.replicas", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--clients", type=int, default=32)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        seen = storm(make_world(folder), folder, given.seconds, given.clients)
    delays = sorted(seen.delays)
    late = sum(delay > LIMIT for delay in delays)
    rows = [
        ["clients, services, seconds", f"{given.clients}, {REPLICAS}, {given.seconds:g}"],
        ["requests", ", ".join(f"{n:,} × {s}" for s, n in sorted(seen.tally.statuses.items()))],
        ["answers compared, largest error", f"{seen.tally.answers:,}, {seen.tally.worst:.1e}"],
        ["tasks attached or removed", f"{seen.tally.changes:,}"],
        [
            "until all services answer: median, slowest",
            f"{delays[len(delays) // 2]:.2f} s, {delays[-1]:.2f} s ({late} above {LIMIT:g} s)",
        ],
        ["services killed", str(seen.kills)],
        ["connections that broke with a killed service", str(seen.broken)],
        ["wrong answers, lost tasks, other broken connections", str(len(seen.tally.faults))],
    ]
    write_report("replicas", "Three services on one bundle", [
        *markdown_table(("", "measured"), rows), *(f"- {one}" for one in seen.tally.faults)
    ])  # fmt: skip
    sys.exit(bool(seen.tally.faults))


if __name__ == "__main__":
    main()
