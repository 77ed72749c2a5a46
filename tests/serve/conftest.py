"""A small trunk, a bundle of two tasks, engrams to attach, and services that answer for them."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import torch
from fastapi.testclient import TestClient
from tests.support.serving import NARROW, TOKEN, Launch, Opened, Server, World

import engram
from engram.model import MemoryViT
from engram.store.bundles import compose
from engram.vit import ViT

if TYPE_CHECKING:
    from tests.support.nursery import Nursery


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
    for name, regime, extends in NARROW:
        task = model.add_task(name, 3, 2, regime=regime, rank=4, extends=extends)
        torch.nn.init.normal_(task.head.weight, std=0.3)
        paths[name] = model.save(name, folder / f"{name}.safetensors")
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


@pytest.fixture
def opened(bundle: Path) -> Iterator[Opened]:
    opened = Opened(bundle)
    yield opened
    for client in opened.clients:
        client.__exit__(None, None, None)


@pytest.fixture
def client(opened: Opened) -> TestClient:
    return opened()


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
