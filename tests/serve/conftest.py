"""A small trunk, a bundle of two tasks, engrams to attach, and pictures to ask about."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image

import engram
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.model import MemoryViT
from engram.serve.app import create_app
from engram.serve.catalogue import Catalogue
from engram.serve.settings import Settings
from engram.store.bundles import compose
from engram.vit import ViT

if TYPE_CHECKING:
    from tests.support.nursery import Nursery, Running

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


def wild(trunk: ViT, folder: Path) -> Path:
    """A task that answers to the grey picture it is tried with, and overflows for others."""
    model = MemoryViT(trunk).eval()
    head = model.add_task("wild", ["age"], kind="regression").head
    grey = torch.zeros(1, 3, *trunk.config.image_size)
    with torch.inference_mode():
        head.weight.normal_().mul_(1e3)
        head.bias.sub_(model(grey, tasks=["wild"])["wild"][0])
        head.settled["std"].fill_(3e37)
    return model.save("wild", folder / "wild.safetensors")


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
    for kind in ("multilabel", "regression", "segmentation"):
        task = model.add_task(kind, ["one", "two", "three"], kind=kind)
        torch.nn.init.normal_(task.head.weight, std=0.3)
        paths[kind] = model.save(kind, folder / f"{kind}.safetensors")
    paths["wild"] = wild(model.trunk, folder)
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


@pytest.fixture(scope="session")
def launch(nursery: Nursery) -> Launch:
    """Start a service and wait until it answers."""

    def start(bundle: Path, *flags: str) -> Server:
        port = () if "--port" in flags else ("--port", "0")
        running = nursery.start("serve", bundle, "--json", *port, *flags, ENGRAM_TOKEN=TOKEN)
        deadline = time.monotonic() + 120
        while not (running.files[0].exists() and running.stdout.endswith("}\n")):
            assert time.monotonic() < deadline, running.stderr
            time.sleep(0.02)
        document = json.loads(running.stdout)
        server = Server(running, document["url"], document)
        while True:
            with contextlib.suppress(httpx.TransportError):
                server.get("/healthz")
                return server
            assert time.monotonic() < deadline, running.stderr
            time.sleep(0.02)

    return start


@pytest.fixture
def server(bundle: Path, launch: Launch) -> Iterator[Server]:
    server = launch(bundle)
    yield server
    server.stop(signal.SIGKILL)
