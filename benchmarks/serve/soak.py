"""A service under load and under fire, on this machine alone; writes SOAK.md beside this file.

    python benchmarks/serve/soak.py [--requests 10000] [--clients 32] [--malformed 500]

`engram serve` runs as a process of its own. Clients ask about pictures without a pause while tasks
are attached and removed; every answer is compared with the model called directly. Then the service
gets requests that no well-meaning client sends. Anything that is not as promised ends the run with
exit code 1.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from malformed import Answered, Malformed, form, malformed
from PIL import Image

import engram
from engram.experiments.timing import machine, machine_words
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.model import MemoryViT
from engram.store.bundles import compose, read_bundle

HERE = Path(__file__).resolve().parent
TOKEN = "soak"
STAY, COME_AND_GO = ("a", "b"), ("c", "d", "e", "f")
PICTURES = 64
TOLERANCE = 2e-5  # of a probability; the service rounds to 1e-6
Expected = list[dict[str, dict[str, float]]]  # picture, task, class


@dataclass
class World:
    bundle: Path
    engrams: dict[str, bytes]
    pictures: list[bytes]
    expected: Expected


def make_world(folder: Path) -> World:
    """pico with six tasks of random weights, two of them in the bundle, and what they answer."""
    torch.manual_seed(0)
    model = MemoryViT(engram.load_trunk("pico")).eval()
    engrams = {}
    for i, name in enumerate(STAY + COME_AND_GO):
        extends = {"b": ["a"], "d": ["a"], "f": ["a", "b"]}.get(name, [])
        task = model.add_task(name, [f"{name}{j}" for j in range(4 + i)], extends=extends)
        torch.nn.init.normal_(task.head.weight, std=0.1)
        engrams[name] = model.save(name, folder / f"{name}.safetensors").read_bytes()
    compose([folder / f"{name}.safetensors" for name in STAY], folder / "bundle")
    rng = np.random.default_rng(0)
    pictures = []
    for i in range(PICTURES):
        file = io.BytesIO()
        size = rng.integers(20, 90, 2)
        coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8))
        coarse.resize((int(size[0]), int(size[1]))).save(file, ("PNG", "JPEG", "WEBP")[i % 3])
        pictures.append(file.getvalue())
    preprocessing = model.trunk.preprocessing
    assert preprocessing is not None
    expected: Expected = []
    for picture in pictures:
        view = torch.from_numpy(evaluation_view(picture, preprocessing))
        with torch.inference_mode():
            logits = model(normalise(view[None], preprocessing))
        expected.append({n: _probabilities(model, n, v[0]) for n, v in logits.items()})
    return World(folder / "bundle", engrams, pictures, expected)


def _probabilities(model: MemoryViT, name: str, logits: torch.Tensor) -> dict[str, float]:
    labels = model.trunk.labels if name == "base" else model.task(name).spec.classes
    assert labels is not None
    return dict(zip(labels, logits.softmax(-1).tolist(), strict=True))


class Service:
    """`engram serve` in a process of its own."""

    def __init__(self, bundle: Path, folder: Path, *flags: str) -> None:
        self.log = folder / f"stderr-{len(list(folder.glob('stderr-*')))}"
        command = [sys.executable, "-m", "engram", "serve", str(bundle), "--port", "0", "--json"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *flags],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "ENGRAM_TOKEN": TOKEN},
            )
        assert self.process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            line = self.process.stdout.readline()
            assert line, self.log.read_text()
            text += line
        self.url = str(json.loads(text)["url"])

    def resident(self) -> float:
        """MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1000

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


class Wire:
    """One client's connection, which it keeps."""

    def __init__(self, url: str) -> None:
        self.place = urlsplit(url)
        self.connection = self._connect()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(str(self.place.hostname), self.place.port, timeout=300)

    def send(self, method: str, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
        try:
            self.connection.request(method, path, body, headers)
            response = self.connection.getresponse()
        except (http.client.RemoteDisconnected, BrokenPipeError):  # kept for too long: a new one
            self.connection = self._connect()
            self.connection.request(method, path, body, headers)
            response = self.connection.getresponse()
        data = response.read()
        return response.status, json.loads(data) if data else None


@dataclass
class Tally:
    statuses: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    changes: int = 0
    worst: float = 0.0
    faults: list[str] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault(self, sentence: str) -> None:
        with self.lock:
            self.faults.append(sentence[:300])

    @property
    def done(self) -> int:
        return sum(self.statuses.values())


def client(world: World, service: Service, tally: Tally, requests: int, seed: int) -> None:
    """Ask about random pictures for random tasks, and compare every number of every answer."""
    rng, wire = random.Random(seed), Wire(service.url)
    while True:
        with tally.lock:
            if tally.done >= requests or len(tally.faults) > 20:
                return
        chosen = [rng.randrange(PICTURES) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
        tasks = rng.choice([None, None, ["a"], ["b", "base"], ["a", "b", rng.choice(COME_AND_GO)]])
        body, kind = _asked(world, chosen, tasks, rng.random() < 0.5)
        try:
            status, answer = wire.send("POST", "/v1/predict", body, **{"Content-Type": kind})
        except OSError as error:
            tally.fault(f"no answer: {error!r}")
            continue
        with tally.lock:
            tally.statuses[str(status)] += 1
        if status == 200:
            _compare(world, tally, chosen, tasks, answer)
        elif status == 404 and tasks is not None and tasks[-1] in COME_AND_GO:
            pass  # it is not attached at the moment
        elif status == 503:
            time.sleep(0.5)
        else:
            tally.fault(f"{status}: {answer}")


def _asked(
    world: World, chosen: Sequence[int], tasks: Sequence[str] | None, as_form: bool
) -> tuple[bytes, str]:
    if as_form:
        parts = [("image", world.pictures[i], True) for i in chosen]
        parts.append(("top_k", b"1000", False))
        if tasks is not None:
            parts.append(("tasks", ",".join(tasks).encode(), False))
        return form(*parts), "multipart/form-data; boundary=----boundary"
    document: dict[str, Any] = {"top_k": 1000}
    document["images"] = [base64.b64encode(world.pictures[i]).decode() for i in chosen]
    if tasks is not None:
        document["tasks"] = tasks
    return json.dumps(document).encode(), "application/json"


def _compare(
    world: World, tally: Tally, chosen: Sequence[int], tasks: Sequence[str] | None, answer: Any
) -> None:
    for i, image in zip(chosen, answer["images"], strict=True):
        told = image["tasks"]
        right = set(told) == set(tasks) if tasks is not None else {"base", *STAY} <= set(told)
        if not right:
            tally.fault(f"asked {tasks}, answered {list(told)}")
        for name, said in told.items():
            expected = world.expected[i][name]
            got = {one["class"]: one["probability"] for one in said["answer"]}
            wrong = max(abs(got.get(key, 9.0) - value) for key, value in expected.items())
            with tally.lock:
                tally.answers += 1
                tally.worst = max(tally.worst, wrong)
            if wrong > TOLERANCE or len(got) != len(expected):
                tally.fault(f"picture {i}, task {name}: off by {wrong}")


def change(world: World, service: Service, tally: Tally, stop: threading.Event) -> None:
    """Attach and remove tasks, one after the other, until told to stop."""
    rng, wire, there = random.Random(7), Wire(service.url), set[str]()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    while not stop.wait(0.5):
        name = rng.choice(COME_AND_GO)
        if name in there:
            status, answer = wire.send("DELETE", f"/v1/tasks/{name}", b"", **headers)
            there.discard(name)
        else:
            status, answer = wire.send("PUT", f"/v1/tasks/{name}", world.engrams[name], **headers)
            there.add(name)
        tally.changes += 1
        if status != (201 if name in there else 204):
            tally.fault(f"changing {name}: {status} {answer}")


def load(world: World, service: Service, requests: int, clients: int) -> tuple[Tally, float]:
    tally, stop = Tally(), threading.Event()
    changer = threading.Thread(target=change, args=(world, service, tally, stop))
    askers = [
        threading.Thread(target=client, args=(world, service, tally, requests, seed))
        for seed in range(clients)
    ]
    began = time.monotonic()
    for thread in (changer, *askers):
        thread.start()
    told = 0
    while any(thread.is_alive() for thread in askers):
        time.sleep(1)
        tally.resident.append(service.resident())
        if tally.done >= told + requests // 20:
            told = tally.done
            print(
                f"{told} requests, {tally.changes} changes, {tally.resident[-1]:.0f} MB", flush=True
            )
    seconds = time.monotonic() - began
    stop.set()
    changer.join()
    return tally, seconds


def fire(service: Service, count: int) -> tuple[Counter[str], list[str]]:
    """Statuses of malformed requests, and what was not refused as promised."""
    statuses: Counter[str] = Counter()
    faults: list[str] = []

    def one(case: Malformed) -> tuple[Malformed, Answered]:
        return case, case.send(service.url, timeout=300)

    with ThreadPoolExecutor(8) as pool:
        for case, answered in pool.map(one, malformed(count)):
            statuses[str(answered.status)] += 1
            good = 400 <= answered.status < 500 and b"Traceback" not in answered.body
            if not good or not (case.plain or answered.sentence.endswith(".")):
                faults.append(f"{case.name}: {answered}")
    return statuses, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--malformed", type=int, default=500)
    parser.add_argument("--out", type=Path, default=HERE / "SOAK.md")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        world = make_world(folder)
        service = Service(world.bundle, folder, "--timeout", "120")
        tally, seconds = load(world, service, given.requests, given.clients)
        code = service.stop()
        whole = [e.spec.name for e in read_bundle(world.bundle).engrams]
        if code != 0 or not set(STAY) <= set(whole):
            tally.fault(f"stopped with {code}, the bundle holds {whole}")
        rude = Service(world.bundle, folder, "--timeout", "2.5")
        statuses, faults = fire(rude, given.malformed)
        lives = Malformed("", (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",)).send(rude.url)
        if lives.status != 200 or rude.stop() != 0:
            faults.append("it did not outlive the malformed requests")
        logged = service.log.read_text() + rude.log.read_text()
        if "Traceback" in logged:
            faults.append(f"its log has a traceback: {logged[:2000]}")
    quarter = max(1, len(tally.resident) // 4)
    early = float(np.median(tally.resident[quarter : 2 * quarter]))
    late = float(np.median(tally.resident[-quarter:]))
    if late > early * 1.05 + 10:
        tally.fault(f"memory grew from {early:.0f} to {late:.0f} MB")
    report = _report(given, tally, seconds, early, late, statuses, faults)
    given.out.write_text(report, encoding="utf-8")
    print(report)
    return int(bool(tally.faults or faults))


def _report(
    given: argparse.Namespace,
    tally: Tally,
    seconds: float,
    early: float,
    late: float,
    statuses: Counter[str],
    faults: Sequence[str],
) -> str:
    def counted(counter: Counter[str]) -> str:
        return ", ".join(f"{count:,} × {status}" for status, count in sorted(counter.items()))

    failed = [*tally.faults, *faults]
    rows = [
        ("requests", f"{tally.done:,} from {given.clients} clients: {counted(tally.statuses)}"),
        ("tasks attached or removed meanwhile", f"{tally.changes:,}"),
        ("answers compared with the model called directly", f"{tally.answers:,}"),
        ("largest difference of a probability", f"{tally.worst:.1e}"),
        ("resident memory, second quarter of the run", f"{early:.0f} MB"),
        ("resident memory, last quarter", f"{late:.0f} MB"),
        ("time", f"{seconds:,.0f} s"),
        ("malformed requests", f"{sum(statuses.values()):,}: {counted(statuses)}"),
        ("faults", "none" if not failed else f"{len(failed)}, such as {failed[0]}"),
    ]
    lines = [
        "# Soak",
        "",
        "Written by `OMP_NUM_THREADS=1 python benchmarks/serve/soak.py`: pico, two tasks that",
        "stay, four that come and go, on loopback. A 404 answers a question for a task that was",
        "not attached at that moment. Clients and service shared one machine:",
        f"{machine_words(machine())}.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {label} | {text} |" for label, text in rows),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
