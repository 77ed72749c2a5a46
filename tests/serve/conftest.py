"""A small trunk, a bundle of two tasks, engrams to attach, and pictures to ask about."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image

import engram
from engram.bundles import compose
from engram.images import evaluation_view, normalise
from engram.model import MemoryViT
from engram.serve.app import create_app
from engram.serve.catalogue import Catalogue
from engram.serve.settings import Settings

TOKEN = "a-secret"
AUTH = {"Authorization": f"Bearer {TOKEN}"}


@dataclass
class World:
    """Everything on disk; `model` has all tasks, for answers to compare with."""

    trunk: Path
    bundle: Path  # first, second (extends first)
    engrams: dict[str, Path]
    model: MemoryViT

    def logits(self, picture: bytes, *names: str) -> dict[str, torch.Tensor]:
        preprocessing = self.model.trunk.preprocessing
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


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory, small_trunk: Path) -> World:
    folder = tmp_path_factory.mktemp("world")
    torch.manual_seed(0)
    model = MemoryViT(engram.load_trunk(small_trunk)).eval()
    parents: dict[str, list[str]] = {"first": [], "second": ["first"], "third": [], "fourth": []}
    paths = {}
    for i, (name, extends) in enumerate({**parents, "child": ["first"]}.items()):
        classes = [f"{name} <b>{j}</b>" for j in range(i + 2)]
        task = model.add_task(name, classes, extends=extends)
        torch.nn.init.normal_(task.head.weight, std=0.3)
        paths[name] = model.save(name, folder / f"{name}.safetensors", metrics={"accuracy": 0.5})
    torch.manual_seed(1)
    stranger = MemoryViT(engram.random_trunk(image_size=16, patch=4, width=32, depth=1, heads=2))
    stranger.add_task("stranger", 3)
    paths["stranger"] = stranger.save("stranger", folder / "stranger.safetensors")
    compose([paths["first"], paths["second"]], folder / "bundle")
    return World(small_trunk, folder / "bundle", paths, model)


@pytest.fixture
def bundle(world: World, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(world.bundle, tmp_path / "bundle"))


@dataclass
class Opened:
    """Services in this process, closed at the end of the test."""

    bundle: Path
    clients: list[TestClient] = field(default_factory=list)

    def __call__(self, token: str | None = TOKEN, **settings: Any) -> TestClient:
        catalogue = Catalogue(self.bundle, Settings(**settings))
        app = create_app(catalogue, catalogue.settings, token)
        client = TestClient(app, raise_server_exceptions=False)
        client.__enter__()
        self.clients.append(client)
        return client


@pytest.fixture
def opened(bundle: Path) -> Iterator[Opened]:
    opened = Opened(bundle)
    yield opened
    for client in opened.clients:
        client.__exit__(None, None, None)


@pytest.fixture
def client(opened: Opened) -> TestClient:
    return opened()


# Real processes


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    document: dict[str, Any]

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


def start(bundle: Path, *flags: str, token: str = TOKEN) -> Server:
    """`engram serve` in a process of its own, once it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "engram", "serve", str(bundle), "--port", "0", "--json", *flags],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "ENGRAM_TOKEN": token, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    text = ""
    while not text.endswith("}\n"):
        line = process.stdout.readline()
        assert line, f"engram serve ended with {process.wait()}: {text}"
        text += line
    document = json.loads(text)
    deadline = time.monotonic() + 60
    while True:
        try:
            httpx.get(document["url"] + "/healthz", timeout=60)
            return Server(process, document["url"], document)
        except httpx.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture
def server(bundle: Path) -> Iterator[Server]:
    server = start(bundle)
    yield server
    server.process.kill()
    server.process.wait()
