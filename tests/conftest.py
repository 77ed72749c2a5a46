"""What every test shares: where the assets are, one thread per worker, the same seeds."""

import gc
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

# Before anything imports huggingface_hub, which reads it once: no test waits for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import numpy as np
import pytest
import torch
from PIL import Image
from scripts.fetch_web_runtime import NAME
from tests.support.hubs import HubClient
from tests.support.nursery import Nursery
from tests.support.strategies import FAMILY, SIDE_FAMILY, model_of, some_pixels

from engram import MemoryViT, load_backbone, random_backbone, save_backbone
from engram.images.preprocessing import Preprocessing
from engram.methods import METHODS

# Cases are derived from the test itself, so a failure here is a failure everywhere; a busy
# machine is not a bug, so there is no deadline.
hypothesis.settings.register_profile("engram", derandomize=True, deadline=None)
hypothesis.settings.load_profile("engram")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

if not torch.accelerator.is_available():
    # `torch.manual_seed` keeps the stack as text, in case a GPU is there later: once for each of
    # three kinds. Tests add thousands of tasks, and each sets the seed.
    torch.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))

# A suite in the background of a shell ignores Ctrl-C, and so would the processes that tests stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests kill processes and never the machine: what the disk itself has at that time is not seen, and
# waiting for it after every write takes minutes in all. tests/util/test_files.py sees the calls.
os.fsync = lambda handle: None

# All that is collected stays until the end: looking through it for garbage, again and again, would
# take seconds. `pytest_collection_finish` turns the collector on.
gc.disable()


#: Folders and files whose tests are about the documentation.
DOCS = (
    *("promises/test_docs_images.py", "promises/test_docstrings.py", "promises/test_examples.py"),
    *("promises/test_readme.py", "promises/test_reference.py", "promises/test_site.py"),
)
#: Those that drive other programs, and fixtures that start processes or need a browser.
SYSTEM = ("benchmarks", "cluster", "deploy", "farm")
SYSTEM_FIXTURES = {"browser", "hub_client", "launch", "nursery"}
#: Those that take more time than a developer has after every change: they train, export, serve.
LONG = (
    *("cli", "experiments", "export", "promises", "serve", "train", "report/test_run.py"),
    *("test_passes.py", "test_side.py"),
)
_TESTS = ROOT / "tests"


def _is_in(path: Path, places: tuple[str, ...]) -> bool:
    return any(path == _TESTS / place or _TESTS / place in path.parents for place in places)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what `-m fast` leaves out."""
    if config.option.markexpr == "fast" and _is_in(collection_path, (*DOCS, *SYSTEM, *LONG)):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test by where it is and what it asks for."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if "assets" in fixtures:
            item.add_marker("assets")
        if _is_in(item.path, DOCS):
            item.add_marker("docs")
        elif _is_in(item.path, SYSTEM) or fixtures & SYSTEM_FIXTURES:
            item.add_marker("system")
        elif not (_is_in(item.path, LONG) or item.get_closest_marker("system")):
            item.add_marker("fast")


def pytest_collection_finish() -> None:
    """From here on there is garbage, and only what tests make is looked through for it.

    Less often than usual: an export makes a million objects that stay.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of real weights and photographs; the test is skipped where it is missing."""
    folder = Path(os.environ.get("ENGRAM_ASSETS") or ROOT.parent / "shared")
    if not (folder / "weights").is_dir():
        pytest.skip(f"needs the assets folder, and {folder} is none: set ENGRAM_ASSETS")
    return folder


@pytest.fixture(autouse=True)
def seeded() -> int:
    """Every test starts from the same random state, whichever tests ran before it."""
    seed = 0
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (code under test may use the global state)
    torch.manual_seed(seed)
    return seed


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names of new folders; `mktemp` would look through thousands of them for each."""
    folder = tmp_path_factory.mktemp("caches")
    return (folder / str(number) for number in count())


@pytest.fixture(autouse=True)
def own_cache(caches: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a cache of its own, and none touches the user's."""
    folder = next(caches)
    folder.mkdir()
    monkeypatch.setenv("ENGRAM_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def registered_methods() -> Iterator[None]:
    """A method that a test or a page of the documentation registers is gone after it."""
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


# What training is tried on


@pytest.fixture(scope="session")
def small_backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random backbone on disk: 16 pixels, 16 patches, 2 layers, width 32."""
    backbone = random_backbone(image_size=16, patch=4, width=32, depth=2, heads=2, classes=7)
    backbone.preprocessing = Preprocessing((16, 16), None)
    return save_backbone(backbone, tmp_path_factory.mktemp("backbone") / "small")


@pytest.fixture(scope="session")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An easy task as .npz: noisy pictures of three colours, 20 a class, and 7 to test."""
    rng = np.random.default_rng(0)
    tints = np.array([[200, 60, 60], [60, 200, 60], [60, 60, 200]])

    def pictures(each: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(3 * each) % 3
        noise = rng.integers(-50, 50, (3 * each, 16, 16, 3))
        return (tints[labels][:, None, None] + noise).astype(np.uint8), labels

    (x, y), (x_test, y_test) = pictures(20), pictures(7)
    path = tmp_path_factory.mktemp("colours") / "colours.npz"
    names = np.array(["red", "green", "blue"])
    np.savez(path, x_train=x, y_train=y, x_test=x_test, y_test=y_test, class_names=names)
    return path


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    """Two classes of six images of noise each."""
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        folder = tmp_path / "noise" / name
        folder.mkdir(parents=True)
        for i in range(6):
            pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "noise"


@pytest.fixture
def family() -> MemoryViT:
    """A parent, two children, a grandchild of both, and two strangers."""
    return model_of(FAMILY)


@pytest.fixture(params=[FAMILY, SIDE_FAMILY], ids=["masked", "side"])
def either_family(request: pytest.FixtureRequest) -> MemoryViT:
    """The same, with masked tasks or with side network."""
    return model_of(request.param)


@pytest.fixture
def pixels() -> torch.Tensor:
    """Three images for these."""
    return some_pixels(3, dtype=torch.float32)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium to open the page with: make chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def web_runtime() -> Path:
    """The npm package onnxruntime-web."""
    package = Path(sys.prefix) / NAME
    if not package.is_file():
        pytest.skip(f"there is no {NAME} to run models in a browser with: make web-runtime")
    return package


@pytest.fixture(scope="session")
def hub_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubClient]:
    client = HubClient(tmp_path_factory.mktemp("hub"))
    yield client
    client.close()


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.process.send_signal(signal.SIGKILL)
    nursery.process.wait()


@pytest.fixture(scope="session")
def old_engram(tmp_path_factory: pytest.TempPathFactory, small_backbone: Path) -> Path:
    """An engram for this backbone, which it finds beside itself as `vit`."""
    folder = tmp_path_factory.mktemp("old")
    model = MemoryViT(load_backbone(small_backbone))
    model.backbone.source = "vit"
    model.add_task("old", ["red", "green", "blue"], 2, seed=0)
    return model.save("old", folder / "old.safetensors")


@pytest.fixture
def work(
    tmp_path: Path,
    small_backbone: Path,
    colours: Path,
    old_engram: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A folder with a backbone, data, a picture and an engram, as a user would have it."""
    monkeypatch.chdir(tmp_path)
    os.symlink(small_backbone, "vit")
    os.symlink(colours, "colours.npz")
    Image.new("RGB", (20, 16), (210, 50, 60)).save("red.png")
    shutil.copy(old_engram, "old.safetensors")
    return tmp_path
