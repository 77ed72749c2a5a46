"""What every test shares: where the assets are, one thread per worker, the same seeds."""

import os
import random
from pathlib import Path

# Before anything imports huggingface_hub, which reads it once: no test waits for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

# Cases are derived from the test itself, so a failure here is a failure everywhere; a busy
# machine is not a bug, so there is no deadline.
hypothesis.settings.register_profile("engram", derandomize=True, deadline=None)
hypothesis.settings.load_profile("engram")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


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
