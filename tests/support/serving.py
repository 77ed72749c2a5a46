"""Services to test: a small world on disk, requests to them, and real processes."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from fastapi.testclient import TestClient
from PIL import Image
from tests.support.nursery import Running

from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.model import MemoryViT
from engram.serve.app import create_app
from engram.serve.catalogue import Catalogue
from engram.serve.service_settings import Settings
from engram.store.engram import Engram
from engram.store.format import read_engram

TOKEN = "a-secret"
AUTH = {"Authorization": f"Bearer {TOKEN}"}
#: Tasks to attach that read the backbone with side network or by its layers: name, regime, extends.
NARROW: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("thin", "side", ()),
    ("thin-child", "side", ("thin",)),
    ("layers", "readout", ()),
    ("both", "side+readout", ()),
)


@dataclass
class World:
    """Everything on disk; `model` has all tasks, for answers to compare with."""

    backbone: Path
    bundle: Path  # first, second (extends first)
    engrams: dict[str, Path]
    model: MemoryViT

    def logits(self, picture: bytes, *names: str) -> dict[str, torch.Tensor]:
        preprocessing = self.model.backbone.preprocessing
        assert preprocessing is not None
        view = torch.from_numpy(evaluation_view(picture, preprocessing))
        with torch.inference_mode():
            answers = self.model(normalise(view[None], preprocessing), tasks=list(names))
        return {name: values[0] for name, values in answers.items()}


def picture(seed: int = 0, width: int = 24, height: int = 20, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def many_scans(count: int) -> bytes:
    """A small progressive JPEG with so many scans, most of them the same."""
    file = io.BytesIO()
    Image.new("L", (64, 64), 90).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last, end = data.rindex(b"\xff\xda"), len(data) - 2
    return data[:last] + data[last:end] * (count - data.count(b"\xff\xda") + 1) + data[end:]


def flat_png(side: int) -> bytes:
    """A small file with very many pixels."""
    file = io.BytesIO()
    Image.new("L", (side, side)).save(file, "PNG", compress_level=1)
    return file.getvalue()


@dataclass
class Opened:
    """Services in this process, closed at the end of the test."""

    bundle: Path
    clients: list[TestClient] = field(default_factory=list)

    def __call__(
        self, token: str | None = TOKEN, ask_token: str | None = None, **settings: Any
    ) -> TestClient:
        catalogue = Catalogue.load(self.bundle, Settings(**settings))
        app = create_app(catalogue, token, ask_token)
        client = TestClient(app, "http://localhost", raise_server_exceptions=False)
        client.__enter__()
        self.clients.append(client)
        return client


# Requests


def task_names(client: TestClient) -> list[str]:
    return [task["name"] for task in client.get("/v1/tasks").json()["tasks"]]


def put(client: TestClient, world: World, name: str) -> httpx.Response:
    """Attach one of the world's engrams."""
    data = world.engrams[name].read_bytes()
    return client.put(f"/v1/tasks/{name}", content=data, headers=AUTH)


def other_version(world: World, name: str, by: float = -1.0) -> Engram:
    """One of the world's engrams with another head: a task of the same name and other answers."""
    engram = read_engram(world.engrams[name])
    weight = by * engram.tensors["head.weight"]
    return replace(engram, tensors={**engram.tensors, "head.weight": weight})


def ask(client: TestClient, *pictures: bytes, **options: object) -> list[dict[str, Any]]:
    """What the service answers about each picture."""
    files = [("image", (f"{i}.png", data)) for i, data in enumerate(pictures)]
    response = client.post("/v1/predict", files=files, data=options)
    assert response.status_code == 200, response.text
    images: list[dict[str, Any]] = response.json()["images"]
    return images


# Real processes


@dataclass
class Server:
    """`engram serve` in a process of its own."""

    running: Running
    url: str
    document: dict[str, Any]

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send it a signal and give its exit code."""
        if self.running.code is None:
            os.kill(self.running.pid, number)
        code = self.running.wait().code
        assert code is not None
        return code


Launch = Callable[..., Server]
