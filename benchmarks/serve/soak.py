"""Load test of the service: correct answers while tasks change, then malformed requests.

    OMP_NUM_THREADS=1 python -m benchmarks.serve.soak [--requests 10000] [--clients 32]

`engram serve` runs in its own process. Clients send images without a pause while tasks are attached
and removed, and every answer is compared with the model called directly. Then the service gets
malformed requests. It takes about three minutes and writes benchmarks/results/soak.md; the exit
code is 1 if anything was not as promised.
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
from functools import partial
from pathlib import Path
from resource import RLIMIT_NOFILE, setrlimit
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image

import engram
from benchmarks.paths import RESULTS
from benchmarks.report import markdown_table
from benchmarks.serve.malformed import Answered, Malformed, form, malformed
from engram.experiments.timing import describe_machine, machine
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.model import MemoryViT
from engram.store.bundles import read_bundle
from engram.store.compose import compose

TOKEN = "soak"
STAY, COME_AND_GO = ("a", "b"), ("c", "d", "e", "f")
IMAGES = 64
TOLERANCE = 2e-5  # of a probability; the service rounds to 1e-6
Expected = list[dict[str, dict[str, float]]]  # probability by image, task and class


@dataclass
class World:
    """What the service is given, and the answers that it should return."""

    bundle: Path
    engrams: dict[str, bytes]
    images: list[bytes]
    expected: Expected


def make_world(folder: Path) -> World:
    """pico with six tasks of random weights, two of them in the bundle."""
    torch.manual_seed(0)
    model = MemoryViT(engram.load_backbone("pico")).eval()
    engrams = {}
    for i, name in enumerate(STAY + COME_AND_GO):
        extends = {"b": ["a"], "d": ["a"], "f": ["a", "b"]}.get(name, [])
        task = model.add_task(name, [f"{name}{j}" for j in range(4 + i)], extends=extends)
        torch.nn.init.normal_(task.head.weight, std=0.1)
        engrams[name] = model.save(name, folder / f"{name}.safetensors").read_bytes()
    compose([folder / f"{name}.safetensors" for name in STAY], folder / "bundle")
    images = random_images()
    return World(folder / "bundle", engrams, images, [answers(model, image) for image in images])


def random_images() -> list[bytes]:
    """Image files of several sizes and formats."""
    rng = np.random.default_rng(0)
    images = []
    for i in range(IMAGES):
        file = io.BytesIO()
        size = rng.integers(20, 90, 2)
        coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8))
        coarse.resize((int(size[0]), int(size[1]))).save(file, ("PNG", "JPEG", "WEBP")[i % 3])
        images.append(file.getvalue())
    return images


def answers(model: MemoryViT, image: bytes) -> dict[str, dict[str, float]]:
    """The probability of every class of every task, from the model called directly."""
    preprocessing = model.backbone.preprocessing
    assert preprocessing is not None
    view = torch.from_numpy(evaluation_view(image, preprocessing))
    with torch.inference_mode():
        logits = model(normalise(view[None], preprocessing))
    return {name: _probabilities(model, name, values[0]) for name, values in logits.items()}


def _probabilities(model: MemoryViT, name: str, logits: torch.Tensor) -> dict[str, float]:
    labels = model.backbone.labels if name == "base" else model.task(name).spec.classes
    assert labels is not None
    return dict(zip(labels, logits.softmax(-1).tolist(), strict=True))


class Service:
    """`engram serve` in its own process."""

    def __init__(self, bundle: Path, folder: Path, *flags: str, files: int | None = None) -> None:
        """Start it; `files` is how many files it may open."""
        self.log = folder / f"stderr-{len(list(folder.glob('stderr-*')))}"
        command = [sys.executable, "-m", "engram", "serve", str(bundle), "--port", "0", "--json"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *flags],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "ENGRAM_TOKEN": TOKEN},
                preexec_fn=None
                if files is None
                else partial(setrlimit, RLIMIT_NOFILE, (files,) * 2),
            )
        assert self.process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            line = self.process.stdout.readline()
            assert line, self.log.read_text()
            text += line
        self.url = str(json.loads(text)["url"])

    def resident(self) -> float:
        """Resident memory in MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1000

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


class Client:
    """One connection to the service, which stays open."""

    def __init__(self, url: str) -> None:
        self.address = urlsplit(url)
        self.connection = self._connect()

    def _connect(self) -> http.client.HTTPConnection:
        host = str(self.address.hostname)
        return http.client.HTTPConnection(host, self.address.port, timeout=300)

    def send(self, method: str, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
        try:
            self.connection.request(method, path, body, headers)
            response = self.connection.getresponse()
        except (http.client.RemoteDisconnected, BrokenPipeError):  # open for too long: reconnect
            self.connection = self._connect()
            self.connection.request(method, path, body, headers)
            response = self.connection.getresponse()
        data = response.read()
        return response.status, json.loads(data) if data else None


@dataclass
class Tally:
    """What happened, counted by all threads."""

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


def send_images(world: World, service: Service, tally: Tally, requests: int, seed: int) -> None:
    """Request random tasks of random images, and compare every number of every answer."""
    rng, client = random.Random(seed), Client(service.url)
    while True:
        with tally.lock:
            if tally.done >= requests or len(tally.faults) > 20:
                return
        chosen = [rng.randrange(IMAGES) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
        tasks = rng.choice([None, None, ["a"], ["b", "base"], ["a", "b", rng.choice(COME_AND_GO)]])
        body, kind = _request_body(world, chosen, tasks, rng.random() < 0.5)
        try:
            status, answer = client.send("POST", "/v1/predict", body, **{"Content-Type": kind})
        except OSError as error:
            tally.fault(f"no answer: {error!r}")
            continue
        with tally.lock:
            tally.statuses[str(status)] += 1
        if status == 200:
            compare(world, tally, chosen, tasks, answer)
        elif status == 404 and tasks is not None and tasks[-1] in COME_AND_GO:
            pass  # the task is not attached at the moment
        elif status == 503:
            time.sleep(0.5)
        else:
            tally.fault(f"{status}: {answer}")


def _request_body(
    world: World, chosen: Sequence[int], tasks: Sequence[str] | None, as_form: bool
) -> tuple[bytes, str]:
    if as_form:
        parts = [("image", world.images[i], True) for i in chosen]
        parts.append(("top_k", b"1000", False))
        if tasks is not None:
            parts.append(("tasks", ",".join(tasks).encode(), False))
        return form(*parts), "multipart/form-data; boundary=----boundary"
    document: dict[str, Any] = {"top_k": 1000}
    document["images"] = [base64.b64encode(world.images[i]).decode() for i in chosen]
    if tasks is not None:
        document["tasks"] = tasks
    return json.dumps(document).encode(), "application/json"


def compare(
    world: World, tally: Tally, chosen: Sequence[int], tasks: Sequence[str] | None, answer: Any
) -> None:
    """Compare every number of an answer about these images."""
    for i, image in zip(chosen, answer["images"], strict=True):
        found = image["tasks"]
        right = set(found) == set(tasks) if tasks is not None else {"base", *STAY} <= set(found)
        if not right:
            tally.fault(f"requested {tasks}, answered {list(found)}")
        for name, answered in found.items():
            expected = world.expected[i][name]
            got = {one["class"]: one["probability"] for one in answered["answer"]}
            error = max(abs(got.get(key, 9.0) - value) for key, value in expected.items())
            with tally.lock:
                tally.answers += 1
                tally.worst = max(tally.worst, error)
            if error > TOLERANCE or len(got) != len(expected):
                tally.fault(f"image {i}, task {name}: wrong by {error}")


def change_tasks(world: World, service: Service, tally: Tally, stop: threading.Event) -> None:
    """Attach and remove tasks, one after the other, until `stop` is set."""
    rng, client, attached = random.Random(7), Client(service.url), set[str]()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    while not stop.wait(0.5):
        name = rng.choice(COME_AND_GO)
        if name in attached:
            status, answer = client.send("DELETE", f"/v1/tasks/{name}", b"", **headers)
            attached.discard(name)
        else:
            status, answer = client.send("PUT", f"/v1/tasks/{name}", world.engrams[name], **headers)
            attached.add(name)
        tally.changes += 1
        if status != (201 if name in attached else 204):
            tally.fault(f"changing {name}: {status} {answer}")


def load(world: World, service: Service, requests: int, clients: int) -> tuple[Tally, float]:
    tally, stop = Tally(), threading.Event()
    changer = threading.Thread(target=change_tasks, args=(world, service, tally, stop))
    senders = [
        threading.Thread(target=send_images, args=(world, service, tally, requests, seed))
        for seed in range(clients)
    ]
    began = time.monotonic()
    for thread in (changer, *senders):
        thread.start()
    reported = 0
    while any(thread.is_alive() for thread in senders):
        time.sleep(1)
        tally.resident.append(service.resident())
        if tally.done >= reported + requests // 20:
            reported, memory = tally.done, tally.resident[-1]
            print(f"{reported} requests, {tally.changes} changes, {memory:.0f} MB", flush=True)
    seconds = time.monotonic() - began
    stop.set()
    changer.join()
    return tally, seconds


def send_malformed(service: Service, count: int) -> tuple[Counter[str], list[str]]:
    """The statuses of malformed requests, and those that were not refused as promised."""
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


def check_load(world: World, folder: Path, requests: int, clients: int) -> tuple[Tally, float]:
    """The service under load, and its bundle after it has stopped; the seconds it took."""
    service = Service(world.bundle, folder, "--timeout", "120")
    tally, seconds = load(world, service, requests, clients)
    code = service.stop()
    stored = [e.spec.name for e in read_bundle(world.bundle).engrams]
    if code != 0 or not set(STAY) <= set(stored):
        tally.fault(f"stopped with {code}, the bundle holds {stored}")
    early, late = memory_use(tally)
    if late > early * 1.05 + 10:
        tally.fault(f"memory grew from {early:.0f} to {late:.0f} MB")
    _check_log(service, tally.faults)
    return tally, seconds


def check_malformed(bundle: Path, folder: Path, count: int) -> tuple[Counter[str], list[str]]:
    """The statuses of malformed requests, and what was not as promised."""
    service = Service(bundle, folder, "--timeout", "2.5")
    statuses, faults = send_malformed(service, count)
    alive = Malformed("", (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",)).send(service.url)
    if alive.status != 200 or service.stop() != 0:
        faults.append("it did not survive the malformed requests")
    _check_log(service, faults)
    return statuses, faults


def _check_log(service: Service, faults: list[str]) -> None:
    log = service.log.read_text()
    if "Traceback" in log:
        faults.append(f"its log has a traceback: {log[:2000]}")


def memory_use(tally: Tally) -> tuple[float, float]:
    """Median resident memory in the second and in the last quarter of the run, in MB."""
    quarter = max(1, len(tally.resident) // 4)
    early = float(np.median(tally.resident[quarter : 2 * quarter]))
    return early, float(np.median(tally.resident[-quarter:]))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve.soak", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--requests", type=int, default=10_000, help="number of valid requests")
    parser.add_argument("--clients", type=int, default=32, help="number of concurrent clients")
    parser.add_argument("--malformed", type=int, default=500, help="number of malformed requests")
    parser.add_argument("--out", type=Path, default=RESULTS / "soak.md", help="page to write")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        world = make_world(folder)
        tally, seconds = check_load(world, folder, given.requests, given.clients)
        statuses, faults = check_malformed(world.bundle, folder, given.malformed)
    page = _page(given.clients, tally, seconds, statuses, faults)
    given.out.write_text(page, encoding="utf-8")
    print(page)
    return int(bool(tally.faults or faults))


def _page(
    clients: int, tally: Tally, seconds: float, statuses: Counter[str], faults: Sequence[str]
) -> str:
    def counted(counter: Counter[str]) -> str:
        return ", ".join(f"{count:,} × {status}" for status, count in sorted(counter.items()))

    failed = [*tally.faults, *faults]
    early, late = memory_use(tally)
    rows = [
        ("requests", f"{tally.done:,} from {clients} clients: {counted(tally.statuses)}"),
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
        "# Load test of the service",
        "",
        "Written by `OMP_NUM_THREADS=1 python -m benchmarks.serve.soak`: pico with two tasks that",
        "stay and four that are attached and removed, over loopback. A 404 is the answer to a",
        "request for a task that was not attached at that moment. Clients and service ran on the",
        f"same machine: {describe_machine(machine())}.",
        "",
        *markdown_table(("", ""), rows),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
