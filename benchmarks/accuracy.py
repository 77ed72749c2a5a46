"""Test accuracy and training time of the default recipe on flowers and pets, with a real ViT-Ti/16.

    python -m benchmarks.accuracy

For each dataset it runs `engram fit DATA --task NAME -o FILE --test --regime masked` with an empty
cache, then `engram eval` on both engrams in one pass and on each alone. It takes about six minutes
on two idle cores and writes benchmarks/results/accuracy.md. Targets on the test split, masked with
5 cells: 88 % on pets and 95 % on flowers, each in under five minutes including the cache. It needs
the assets folder (../shared, or ENGRAM_ASSETS).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.command import run_engram
from benchmarks.paths import ASSETS, BACKBONE, require_backbone
from benchmarks.report import markdown_table, write_report

TARGETS = {"pets": 0.88, "flowers": 0.95}
COLUMNS = (
    "data",
    "test accuracy",
    "target",
    "seconds in total",
    "same accuracy alone and composed",
)


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description=str(__doc__).splitlines()[0]
    ).parse_args()
    require_backbone()
    with tempfile.TemporaryDirectory() as temporary:
        rows = measure(Path(temporary))
    title = "The default recipe on photographs (ViT-Ti/16, masked, 5 cells)"
    write_report("accuracy", title, markdown_table(COLUMNS, rows))


def measure(folder: Path) -> list[list[str]]:
    """Train and evaluate in this folder; one row per dataset."""
    files = {name: folder / f"{name}.safetensors" for name in TARGETS}
    data = {name: ASSETS / "data" / name for name in TARGETS}
    fitted = {name: fit(name, data[name], files[name]) for name in TARGETS}
    pairs = {name: ("--data", f"{name}={data[name]}") for name in TARGETS}
    both = evaluate(folder, *files.values(), *(word for pair in pairs.values() for word in pair))
    rows = []
    for name, (accuracy, seconds) in fitted.items():
        alone = evaluate(folder, files[name], *pairs[name])
        same = alone[name]["accuracy"] == both[name]["accuracy"] == accuracy
        row = [name, f"{accuracy:.2%}", f"{TARGETS[name]:.0%}", f"{seconds:.0f}"]
        rows.append([*row, "yes" if same else "NO"])
    return rows


def fit(name: str, data: Path, file: Path) -> tuple[float, float]:
    """Train one task with an empty cache: its test accuracy, and the seconds it took."""
    began = time.perf_counter()
    result = run_engram(
        *("fit", data, "--task", name, "--backbone", BACKBONE, "-o", file, "--test"),
        *("--regime", "masked"),
        cache=file.parent / f"cache-{name}",
    )
    return result["metrics"]["test"]["accuracy"], time.perf_counter() - began


def evaluate(folder: Path, *arguments: str | Path) -> dict[str, Any]:
    """The test scores by task, as `engram eval` prints them."""
    return run_engram("eval", *arguments, "--backbone", BACKBONE, cache=folder)


if __name__ == "__main__":
    main()
