"""A small backbone, a bundle of two tasks, engrams to attach, and services that answer for them."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import torch
from fastapi.testclient import TestClient
from tests.support.regimes import known
from tests.support.serving import NARROW, TOKEN, Launch, Opened, Server, World
from tests.support.waiting import wait_until

import engram
from engram.model import MemoryViT
from engram.store.compose import compose
from engram.vit import ViT

if TYPE_CHECKING:
    from tests.support.nursery import Nursery


def wild(backbone: ViT, folder: Path) -> Path:
    """A task that answers to the grey picture it is tried with, and overflows for others."""
    model = MemoryViT(backbone).eval()
    head = model.add_task("wild", ["age"], kind="regression").head
    grey = torch.zeros(1, 3, *backbone.config.image_size)
    with torch.inference_mode():
        head.weight.normal_().mul_(1e3)
        head.bias.sub_(model(grey, tasks=["wild"])["wild"][0])
        head.fitted["std"].fill_(3e37)
    return model.save("wild", folder / "wild.safetensors")


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory, small_backbone: Path) -> World:
    folder = tmp_path_factory.mktemp("world")
    torch.manual_seed(0)
    model = MemoryViT(engram.load_backbone(small_backbone)).eval()
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
    task = model.add_task("anomaly", 1, kind="anomaly", regime="patchcore", bank=5)
    torch.nn.init.normal_(task.head.weight, std=0.3)
    paths["anomaly"] = model.save("anomaly", folder / "anomaly.safetensors")
    for name, regime, extends in NARROW:
        settings = known(regime, cells=2, rank=4)
        task = model.add_task(name, 3, regime=regime, extends=extends, **settings)
        torch.nn.init.normal_(task.head.weight, std=0.3)
        paths[name] = model.save(name, folder / f"{name}.safetensors")
    paths["wild"] = wild(model.backbone, folder)
    stranger = MemoryViT(engram.random_backbone(image_size=16, patch=4, width=32, depth=1, heads=2))
    stranger.add_task("stranger", 3)
    paths["stranger"] = stranger.save("stranger", folder / "stranger.safetensors")
    compose([paths["first"], paths["second"]], folder / "bundle")
    return World(small_backbone, folder / "bundle", paths, model)


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

    def start(bundle: Path, *flags: str, nofile: tuple[int, int] | None = None) -> Server:
        port = () if "--port" in flags else ("--port", "0")
        running = nursery.start(
            "serve", bundle, "--json", *port, *flags, nofile=nofile, ENGRAM_TOKEN=TOKEN
        )

        def said() -> bool:
            return running.files[0].exists() and running.stdout.endswith("}\n")

        wait_until(lambda: said() or running.ended, lambda: running.stderr)
        assert said(), running.stderr
        document = json.loads(running.stdout)
        server = Server(running, document["url"], document)

        def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return bool(server.get("/healthz"))
            return False

        wait_until(lambda: answers() or running.ended, lambda: running.stderr)
        assert not running.ended, running.stderr
        return server

    return start


@pytest.fixture
def server(bundle: Path, launch: Launch) -> Iterator[Server]:
    server = launch(bundle)
    yield server
    server.stop(signal.SIGKILL)
