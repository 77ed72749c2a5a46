"""A long load on one service: good requests compared, hostile ones, kills, bulk jobs beside it.

    OMP_NUM_THREADS=1 python -m benchmarks.attacks --only soak --minutes 60

What was seen is written every few seconds, so a run that was cut off goes on where it was, with a
new service. It records requests by kind, what became of good answers and tables, /healthz, and the
memory and descriptors of all processes of the service.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.synchronize import Event as Flag
from pathlib import Path
from typing import Any

import torch

import engram
from benchmarks.attacks import soak_clients
from benchmarks.attacks.http import TIMEOUT
from benchmarks.attacks.record import Record
from benchmarks.attacks.service import Attacked, attacked_service
from benchmarks.attacks.soak_clients import GOOD, Connection, Event, Target, patient_answer
from benchmarks.paths import BUILD
from benchmarks.serve.soak import COME_AND_GO, STAY, TOKEN
from engram.util.files import write_atomically

SECONDS = 3600
IMAGES = 12  # whose answers are recorded and compared
EVERY = 3.0  # seconds between two samples of memory, and between two checkpoints
KILL_EVERY = 30.0  # seconds between two kills of a process of the service
LONG = 300.0  # seconds from which on memory and descriptors have to be flat
PATIENCE = 60.0  # seconds for clients to end
MOST_PROBLEMS = 200  # that are kept; more are only counted
Client = Callable[[Target, int, Callable[[Event], None], Callable[[], bool]], None]
Sample = tuple[float, float, int, int]  # seconds; MB and descriptors of all processes; how many
CLIENTS: tuple[Client, ...] = (
    *(soak_clients.ask_well,) * 3,
    *(soak_clients.attack,) * 2,
    soak_clients.change_tasks,
    soak_clients.sample_health,
    soak_clients.run_jobs,
)


@dataclass
class Tally:
    """What was seen so far; JSON can hold it."""

    seconds: float = 0.0
    seen: dict[str, dict[str, int]] = field(default_factory=dict)  # kind -> outcome -> how often
    problems: list[str] = field(default_factory=list)
    health: dict[str, int] = field(default_factory=dict)  # milliseconds -> how often
    samples: list[list[Sample]] = field(default_factory=list)  # of each service that ran

    def add(self, event: Event) -> None:
        outcomes = self.seen.setdefault(event.kind, {})
        outcomes[event.outcome] = outcomes.get(event.outcome, 0) + 1
        if event.problem is not None and len(self.problems) < MOST_PROBLEMS:
            self.problems.append(f"{event.kind}: {event.problem}"[:300])
        if event.kind == "healthz":
            key = str(round(1000 * event.seconds)) if event.outcome == "200" else "inf"
            self.health[key] = self.health.get(key, 0) + 1

    def count(self, kind: str, outcome: str) -> int:
        return self.seen.get(kind, {}).get(outcome, 0)

    def health_at(self, share: float) -> float:
        """The time of /healthz in milliseconds that so many answers did not exceed."""
        total, passed = sum(self.health.values()), 0
        for value in sorted(map(float, self.health)):
            passed += self.health[f"{value:.0f}" if value < float("inf") else "inf"]
            if passed >= share * total:
                return value
        return 0.0


# The service


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that they started."""
    found = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def usage(pid: int) -> tuple[float, int, int]:
    """MB of memory and descriptors of a process and its descendants, and how many they are."""
    memory, open_files, processes = 0.0, 0, 0
    for one in (pid, *descendants(pid)):
        with suppress(OSError, ValueError, IndexError):  # it has ended
            pages = int(Path(f"/proc/{one}/statm").read_text().split()[1])
            open_files += len(os.listdir(f"/proc/{one}/fd"))
            memory += pages * os.sysconf("SC_PAGE_SIZE") / 1e6
            processes += 1
    return memory, open_files, processes


def kill_one(pid: int, rng: random.Random) -> Event:
    """End a process of the service; the others have to go on."""
    some = []
    for child in descendants(pid):
        with suppress(OSError):
            if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes():
                some.append(child)
    if some:
        with suppress(ProcessLookupError):
            os.kill(rng.choice(some), signal.SIGKILL)
    return Event("kills", "killed" if some else "none there")


def target_of(service: Attacked, folder: Path) -> Target:
    """The tasks in place, a segmentation among them, and the answers that good requests get."""
    torch.manual_seed(0)
    model = engram.MemoryViT(engram.load_backbone("pico"))
    task = model.add_task("seg", ["sky", "sea", "land"], kind="segmentation", regime="masked")
    torch.nn.init.normal_(task.head.weight, std=0.5)
    data = model.save("seg", folder / "seg.safetensors").read_bytes()
    world = service.world
    (folder / "a.safetensors").write_bytes(world.engrams[STAY[0]])
    connection = Connection(service.url, 0)
    token = {"Authorization": f"Bearer {TOKEN}"}
    status, said, _ = connection.ask("PUT", "/v1/tasks/seg", data, **token)
    assert status == 201, said
    loose = {name: world.engrams[name] for name in COME_AND_GO}
    target = Target(service.url, TOKEN, world.images[:IMAGES], loose, folder)
    ready = 0
    while ready < 20:  # times in a row: the other workers follow
        status, _, _ = connection.ask("GET", "/v2/models/seg/ready")
        ready = ready + 1 if status == 200 else 0
    for kind in GOOD:
        for i, image in enumerate(target.images):
            target.expected[kind, i] = patient_answer(connection, kind, image)
            assert target.expected[kind, i] is not None, f"{kind} is not answered"
    return target


# The run


def _run(
    client: Client, target: Target, number: int, events: Any, stop: Flag, service: int
) -> None:
    """In a process of its own: a client, until it is told to stop or nobody is left to tell it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which says so
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if client is not soak_clients.sample_health:
        os.nice(10)  # what is measured is the service
    parent = os.getppid()
    client(target, number, events.put, lambda: stop.is_set() or os.getppid() != parent)
    if os.getppid() != parent:  # it was killed, and nobody else ends the service
        with suppress(ProcessLookupError):
            os.kill(service, signal.SIGTERM)


@contextmanager
def running(target: Target, service: int) -> Iterator[Callable[[], Iterator[Event]]]:
    """All clients; what the block is given yields the events that came since."""
    context = multiprocessing.get_context("fork")
    events: Any = context.Queue()
    stop: Flag = context.Event()
    processes = [
        context.Process(target=_run, args=(client, target, number, events, stop, service))
        for number, client in enumerate(CLIENTS, start=1)
    ]

    def heard() -> Iterator[Event]:
        with suppress(queue.Empty):
            while True:
                yield events.get(timeout=0.05)

    for process in processes:
        process.start()
    try:
        yield heard
    finally:
        stop.set()
        until = time.monotonic() + PATIENCE
        while any(process.is_alive() for process in processes) and time.monotonic() < until:
            for _ in heard():  # a client ends when its events are read
                pass
        for process in processes:
            process.terminate()
            process.join()


def load(service: Attacked, tally: Tally, seconds: float, kept: Path) -> None:
    """Let the clients run until the tally has so many seconds."""
    pid, rng = service.service.process.pid, random.Random(len(tally.samples))
    with tempfile.TemporaryDirectory() as name:
        target = target_of(service, Path(name))
        tally.samples.append([(0.0, *usage(pid))])
        before, began, killed = tally.seconds, time.monotonic(), time.monotonic()
        with running(target, pid) as heard:
            while tally.seconds < seconds and service.service.process.poll() is None:
                until = time.monotonic() + EVERY
                while time.monotonic() < until:
                    for event in heard():
                        tally.add(event)
                now = time.monotonic()
                tally.seconds = before + now - began
                tally.samples[-1].append((now - began, *usage(pid)))
                if now - killed >= KILL_EVERY:
                    killed = now
                    tally.add(kill_one(pid, rng))
                write_atomically(kept, json.dumps(asdict(tally)).encode())


def between(samples: list[Sample], start: float, end: float) -> list[float]:
    """Medians of memory, descriptors and processes in a part of the run, from 0 to 1."""
    last = samples[-1][0]
    part = [one for one in samples if start * last <= one[0] <= end * last] or samples[-1:]
    return [statistics.median(one[i] for one in part) for i in (1, 2, 3)]


def judged(tally: Tally) -> Record:
    """What the tally says, as the record of a section."""
    record = Record(tried=sum(tally.seen.get("answers", {}).values()))
    record.survived = tally.count("answers", "equal")
    record.lost = [*tally.problems]
    samples = max(tally.samples, key=len)
    ten_minutes = min(600 / max(samples[-1][0], 1), 0.5)
    start, end = between(samples, 0, 0.02), between(samples, 0.9, 1)
    then = between(samples, ten_minutes - 0.05, ten_minutes + 0.05)
    if samples[-1][0] >= LONG:
        if end[0] > 1.1 * then[0] + 50:
            record.lost.append(f"memory grew from {then[0]:.0f} to {end[0]:.0f} MB")
        if end[1] > 1.1 * then[1] + 50:
            record.lost.append(f"descriptors grew from {then[1]:.0f} to {end[1]:.0f}")
    kinds = "; ".join(
        f"{kind} {sum(outcomes.values()):,} "
        f"({', '.join(f'{n:,} × {outcome}' for outcome, n in sorted(outcomes.items()))})"
        for kind, outcomes in sorted(tally.seen.items())
    )
    at = samples[-1][0] * ten_minutes / 60
    record.details = (
        f"{tally.seconds / 60:.1f} minutes with {len(tally.samples)} service(s); good answers: "
        f"{record.survived:,} equal, {tally.count('answers', 'different'):,} different, "
        f"{tally.count('answers', 'lost'):,} lost; tables: {tally.count('bulk', 'equal'):,} equal, "
        f"{tally.count('bulk', 'different'):,} different; /healthz: p99 "
        f"{tally.health_at(0.99):.0f} ms, slowest {tally.health_at(1):.0f} ms; memory "
        f"{start[0]:.0f} MB at the start, {then[0]:.0f} after {at:.0f} minutes, {end[0]:.0f} at "
        f"the end; descriptors {start[1]:.0f}, {then[1]:.0f}, {end[1]:.0f}; processes "
        f"{start[2]:.0f}, {then[2]:.0f}, {end[2]:.0f}. By kind: {kinds}"
    )
    return record


def checkpoint(seconds: float) -> Path:
    """Where a run of so many seconds keeps what it saw, until it is over."""
    return BUILD / "attacks" / f"soak-{seconds:g}-seconds.partial.json"


def forget() -> None:
    """Remove what interrupted runs kept."""
    for path in checkpoint(0).parent.glob("soak-*.partial.json"):
        path.unlink()


def run(seconds: float) -> Record:
    """The record of so many seconds, those before an interruption among them."""
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the service and clients
    kept = checkpoint(seconds)
    kept.parent.mkdir(parents=True, exist_ok=True)
    tally = Tally(**json.loads(kept.read_bytes())) if kept.exists() else Tally()
    ended = Record()
    if tally.seconds < seconds:
        flags = ("--timeout", str(TIMEOUT), "--workers", "2")
        with attacked_service(ended, *flags) as service:
            load(service, tally, seconds, kept)
    record = judged(tally)
    record.lost += ended.lost
    record.slowest_health = tally.health_at(1) / 1000
    kept.unlink(missing_ok=True)
    return record
