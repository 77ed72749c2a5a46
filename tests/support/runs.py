"""How far a training run is, read from its checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError, safe_open


def step_of(out: Path) -> int:
    """How far the checkpoint of a run is."""
    try:
        with safe_open(out.with_suffix(".run") / "checkpoint.safetensors", "pt") as file:
            return int(json.loads(file.metadata()["run"])["step"])
    except (FileNotFoundError, SafetensorError):
        return 0


def reached(out: Path, step: int) -> Callable[[], bool]:
    return lambda: step_of(out) >= step
