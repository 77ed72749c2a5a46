"""What every test shares: where the assets are, one thread per worker, the same seeds."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before anything imports huggingface_hub, which reads it once: no test waits for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import numpy as np
import pytest
import torch

from engram import random_trunk, save_trunk
from engram.images.preprocessing import Preprocessing

ROOT = Path(__file__).resolve().parent.parent

# Cases are derived from the test itself, so a failure here is a failure everywhere; a busy
# machine is not a bug, so there is no deadline.
hypothesis.settings.register_profile("engram", derandomize=True, deadline=None)
hypothesis.settings.load_profile("engram")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# A suite in the background of a shell ignores Ctrl-C, and so would the processes that tests stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that asks for the assets, so `-m "not assets"` leaves them out."""
    for item in items:
        if "assets" in getattr(item, "fixturenames", ()):
            item.add_marker("assets")


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


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a cache of its own, and none touches the user's."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ENGRAM_CACHE", str(folder))
    return folder


# What training is tried on


@pytest.fixture(scope="session")
def small_trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random trunk on disk: 16 pixels, 16 patches, 2 layers, width 32."""
    trunk = random_trunk(image_size=16, patch=4, width=32, depth=2, heads=2, classes=7)
    trunk.preprocessing = Preprocessing((16, 16), None)
    return save_trunk(trunk, tmp_path_factory.mktemp("trunk") / "small")


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


# Commands as processes of their own

_NURSERY = """
import json, os, resource, sys
import accelerate, torch, torch._dynamo, matplotlib.figure, torch.utils.tensorboard
import engram.cli.jobs, engram.serve.app, uvicorn
from engram.cli.main import main
for line in sys.stdin:
    job = json.loads(line)
    if "wait" in job:
        code = os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1])
        print(code, flush=True)
        continue
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(job["cwd"])
        os.environ.update(job["env"])
        for number, name in enumerate(("/dev/null", job["out"], job["err"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        if job["fsize"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["fsize"], job["fsize"]))
        sys.exit(main(job["arguments"]))
    print(child, flush=True)
"""


@dataclass
class Running:
    """An `engram` command in a process of its own; ended, it has a code, stdout and stderr."""

    nursery: "Nursery"
    pid: int
    files: tuple[Path, Path]
    code: int | None = None

    def wait(self) -> "Running":
        if self.code is None:
            self.code = int(self.nursery.ask({"wait": self.pid}))
        return self

    def signal_when(self, number: int, ready: Callable[[], bool]) -> "Running":
        """Send a signal to its whole group, as a terminal does, as soon as `ready`."""
        while not ready():
            assert Path(f"/proc/{self.pid}/stat").read_text().split()[2] != "Z", self.stderr
            time.sleep(0.002)
        os.killpg(self.pid, number)
        return self.wait()

    @property
    def stdout(self) -> str:
        return self.files[0].read_text()

    @property
    def stderr(self) -> str:
        return self.files[1].read_text()


class Nursery:
    """Starts `engram` commands by forking a process that has torch loaded and has run nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", _NURSERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, job: dict[str, object]) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def start(
        self, *arguments: object, cwd: Path | None = None, fsize: int = 0, **env: object
    ) -> Running:
        self.count += 1
        out, err = (self.folder / f"{self.count}.{name}" for name in ("out", "err"))
        job = {
            "arguments": [str(argument) for argument in arguments],
            "cwd": str(cwd or self.folder),
            "env": {
                "ENGRAM_CACHE": os.environ.get("ENGRAM_CACHE", str(self.folder / "cache")),
                **{name: str(value) for name, value in env.items()},
            },
            "out": str(out),
            "err": str(err),
            "fsize": fsize,
        }
        return Running(self, int(self.ask(job)), (out, err))

    def run(self, *arguments: object, cwd: Path | None = None, fsize: int = 0) -> Running:
        return self.start(*arguments, cwd=cwd, fsize=fsize).wait()


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
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.process.send_signal(signal.SIGKILL)
    nursery.process.wait()
