"""Requests of the Open Inference Protocol that cost more to read or to answer than to send.

The service has a segmentation of 150 classes at 224 pixels, whose logits for 32 images would be a
gigabyte. Each request is followed by a good one. The memory of the service and its decoders may
grow by four times the largest request, what an answer may have, and what they take to start.
"""

from __future__ import annotations

import base64
import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import engram
from benchmarks.attacks.odd import oddly_changed
from benchmarks.attacks.record import Record
from benchmarks.attacks.service import FORM, Attacked, attacked_service
from benchmarks.serve.bodies import MEGABYTE, MOST_BASE, MOST_GROWTH, memory
from benchmarks.serve.malformed import form, good_picture
from benchmarks.serve.soak import World
from engram.images.preprocessing import Preprocessing
from engram.model import MemoryViT
from engram.serve.outputs import logits_name
from engram.serve.routes.infer import JSON_BYTES
from engram.serve.service_settings import Settings
from engram.store.compose import compose

SIDE, CLASSES, IMAGES = 224, 150, 32
BODY = 60 * MEGABYTE
VALUE_BYTES = 4  # of a value in memory, at most
SEGMENT, LOGITS = "/v2/models/seg/infer", logits_name("seg")
REFUSED = (400, 413, 422)
JSON = "application/json"


@dataclass(frozen=True)
class Case:
    """A request, and the statuses that it may get."""

    name: str
    body: bytes
    statuses: tuple[int, ...] = REFUSED
    path: str = SEGMENT
    kind: str = JSON
    headers: dict[str, str] = field(default_factory=dict)
    leaves: int = 0  # clients that read nothing of the answer, and leave


def make_world(folder: Path) -> World:
    """A small random backbone for large images, with a segmentation of many classes."""
    torch.manual_seed(0)
    backbone = engram.random_backbone(
        image_size=SIDE, patch=32, width=32, depth=1, heads=2, classes=10
    )
    backbone.preprocessing = Preprocessing((SIDE, SIDE), None)
    model = MemoryViT(
        engram.load_backbone(engram.save_backbone(backbone, folder / "backbone"))
    ).eval()
    task = model.add_task("seg", [f"c{i}" for i in range(CLASSES)], kind="segmentation")
    torch.nn.init.normal_(task.head.weight, std=0.3)
    compose([model.save("seg", folder / "seg.safetensors")], folder / "bundle")
    return World(folder / "bundle", {}, [], [])


# Requests


def asked(images: int, *outputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A good document about so many pictures."""
    text = base64.b64encode(good_picture()).decode()
    tensor = {"name": "image", "shape": [images], "datatype": "BYTES", "data": [text] * images}
    return {"inputs": [tensor], **({"outputs": list(outputs)} if outputs else {}), **more}


def output(name: str, binary: bool) -> dict[str, Any]:
    return {"name": name, "parameters": {"binary_data": binary}}


def pixels(data: bytes, shape: str = "[1,3,224,224]") -> bytes:
    about = b'"name":"pixel_values","datatype":"FP32","shape":' + shape.encode()
    return b'{"inputs":[{%s,"data":%s}]}' % (about, data)


def elements(data: bytes, size: str = "", shape: int = IMAGES) -> tuple[bytes, dict[str, str]]:
    """Pictures as bytes after the JSON: a body, and its headers."""
    parameters = '{"binary_data_size":%s}' % (size or len(data))
    about = f'"name":"image","datatype":"BYTES","shape":[{shape}],"parameters":{parameters}'
    head = f'{{"inputs":[{{{about}}}]}}'.encode()
    return head + data, {JSON_BYTES: str(len(head))}


def costly_answers() -> Iterator[Case]:
    """Outputs named many times, all logits, and large answers that are allowed."""

    def dumped(document: object) -> bytes:
        return json.dumps(document).encode()

    for times in (2, 200, 1000):
        outputs = [output("seg", False)] * times
        yield Case(f"an output {times} times", dumped(asked(IMAGES, *outputs)))
    for binary in (False, True):
        form_of = "as bytes" if binary else "in JSON"
        logits = output(LOGITS, binary)
        yield Case(f"logits of 32 images {form_of}", dumped(asked(IMAGES, logits)))
        masks = dumped(asked(IMAGES, output("seg", binary)))
        yield Case(f"masks of 32 images {form_of}", masks, (200,))
        largest = Settings().max_values // (CLASSES * SIDE * SIDE)
        most = dumped(asked(largest, logits))
        yield Case(f"the most logits {form_of}", most, (200,))
        yield Case(f"the most logits {form_of}, by clients who leave", most, leaves=8)
    parts = form(*[("image", good_picture(), True)] * IMAGES)
    yield Case("32 masks of /v1/predict", parts, (200,), "/v1/predict", FORM)
    yield Case("32 vectors of /v1/embed", parts, (200,), "/v1/embed", FORM)
    unknown = [{"name": f"x{i}"} for i in range(1000)]
    yield Case("a thousand unknown outputs", dumped(asked(1, *unknown)))
    yield Case("two thousand outputs", dumped(asked(1, *unknown, *unknown)))


def costly_bodies(size: int) -> Iterator[Case]:
    """What takes a parser far more time or memory than it has bytes."""

    def filled(part: bytes) -> bytes:
        return part * (size // len(part))

    for name, part, end in (
        ("empty lists", b"[],", b"[]"), ("empty objects", b"{},", b"{}"), ("ones", b"1,", b"1"),
        ("texts", b'"ab",', b'""'), ("nulls", b"null,", b"null"), ("lists of one", b"[1],", b"[1]"),
    ):  # fmt: skip
        yield Case(name, pixels(b"[" + filled(part) + end + b"]"))
    half = size // 2
    yield Case("nested lists", pixels(b"[" * half + b"]" * half))
    yield Case("nested objects", filled(b'{"a":'))
    yield Case("digits", pixels(b"[" + b"1" * size + b"]"))
    yield Case("decimals", pixels(b"[0." + b"1" * size + b"]"))
    yield Case("spaces", pixels(b"[" + b" " * size + b"]"))
    yield Case("an unknown list", b'{"x":[1' + filled(b",1") + b"]}")
    yield Case("a text beyond ASCII", b'{"id":"%s"}' % filled("\N{GRINNING FACE}".encode()))
    yield Case("an id of escapes", b'{"id":"%s"}' % filled(b"\\u0041"))
    zeros = b",0" * (3 * SIDE * SIDE - 1)
    for digits in (400, 5000):
        yield Case(f"an integer of {digits} digits", pixels(b"[" + b"1" * digits + zeros + b"]"))
    for digits in (19, 400, 4299, 9999):
        number = "1" + "0" * digits
        yield Case(f"a shape of {digits} zeros", pixels(b"[1]", f"[{number},3,224,224]"))
        body, headers = elements(b"", number)
        yield Case(f"a binary_data_size of {digits} zeros", body, headers=headers)
        classes = f'{{"name":"base","parameters":{{"classification":{number}}}}}'
        document = json.dumps(asked(1))[:-1] + f', "outputs": [{classes}]}}'
        yield Case(f"{digits} zeros of classes", document.encode(), path="/v2/models/bundle/infer")
    body, headers = elements(bytes(size))
    yield Case("empty elements", body, headers=headers)
    yield Case("elements without an end", elements(b"\xff" * size)[0], headers=headers)
    for text in ("-1", "0x10", "1e3", "9" * 4000, "9" * 15, "0"):
        yield Case(f"the JSON ends at {text[:8]}", body[:200], headers={JSON_BYTES: text})


def odd_documents(seed: int = 0) -> Iterator[Case]:
    """Good documents in which a value or two are odd; some are still good."""
    rng = random.Random(seed)
    while True:
        start = asked(1, output("seg", False), id="a", parameters={"binary_data_output": False})
        name, changed = oddly_changed(start, rng)
        body = json.dumps(changed, default=str).encode()
        yield Case(f"odd {name}", body, (200, *REFUSED))


def cases(count: int) -> Iterator[Case]:
    """So many: those with names, or an even share of them, and then odd documents."""
    named = len([*costly_bodies(1000), *costly_answers()])
    step, odd = max(1, -(-named // count)), odd_documents()
    for i, case in enumerate(chain(costly_bodies(BODY), costly_answers())):
        if i % step == 0:
            yield case
    yield from (next(odd) for _ in range(count - -(-named // step)))


# Attack


def send(service: Attacked, case: Case) -> tuple[int, bytes]:
    """The status and the body of the answer; status 0 if there is none."""
    connection = service.connect(120)
    try:
        headers = {"Content-Type": case.kind, **case.headers}
        connection.request("POST", case.path, case.body, headers)
        answer = connection.getresponse()
        if case.leaves:
            return answer.status, b""
        size, first = 0, b""
        while piece := answer.read(MEGABYTE):
            size, first = size + len(piece), first or piece[:300]
        return answer.status, first
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error).encode()
    finally:
        connection.close()


def problem_of(service: Attacked, case: Case) -> str | None:
    if case.leaves:
        clients = [threading.Thread(target=send, args=(service, case)) for _ in range(case.leaves)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        return None
    status, body = send(service, case)
    if status not in case.statuses:
        return f"status {status}, not {case.statuses}: {body[:200]!r}"
    return None if status == 200 or b'{"error":' in body else "no sentence"


@contextmanager
def watched(pid: int) -> Iterator[Callable[[], int]]:
    """Gives by how many bytes the memory of a process and its children grew at most."""
    before, most, stop = memory(pid), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.05):
            most = max(most, memory(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: max(0, most - before)
    finally:
        stop.set()
        thread.join()


def attack(service: Attacked, record: Record, count: int) -> None:
    """Send so many requests; the memory that they take is one more case."""
    largest, slowest = 0, 0.0
    record.add("a good request", service.problem_of_good_request())
    with watched(service.service.process.pid) as grown:
        for case in cases(count):
            began, largest = time.monotonic(), max(largest, len(case.body))
            problem = problem_of(service, case)
            slowest = max(slowest, time.monotonic() - began)
            record.add(case.name, problem or service.problem_of_good_request())
    most = MOST_GROWTH * largest + VALUE_BYTES * Settings().max_values + MOST_BASE
    much = f"memory grew by {grown() / MEGABYTE:.0f} MB, of {most / MEGABYTE:.0f} MB at most"
    record.add("memory", None if grown() <= most else much)
    record.details = (
        f"{much}; the largest request had {largest / MEGABYTE:.0f} MB, and the slowest answer took "
        f"{slowest:.1f} s"
    )


def run(count: int) -> Record:
    record = Record()
    with attacked_service(record, "--timeout", "120", world=make_world) as service:
        attack(service, record, count)
    return record
