"""Flowers and pets with the real ViT-Ti/16 and the default recipe, from photographs to accuracy.

    python benchmarks/accuracy.py

Runs `engram fit DATA --task NAME -o FILE --test` with an empty cache for each, then `engram eval`
on both engrams together and on each alone. Takes about six minutes on two idle cores and leaves
results/accuracy.md. Targets, on the test split, masked with 5 cells: 88 % on pets and 95 % on
flowers, each in under five minutes including the cache. Needs the assets folder (../shared,
or ENGRAM_ASSETS).
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from photographs import ASSETS, TRUNK, run
from reporting import report

TARGETS = {"pets": 0.88, "flowers": 0.95}


lines = [
    "| data | test accuracy | target | seconds, all | alone = together |",
    "|---|---|---|---|---|",
]
with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    files = {name: folder / f"{name}.safetensors" for name in TARGETS}
    found = {}
    for name, file in files.items():
        began = time.perf_counter()
        result = run(
            *("fit", ASSETS / "data" / name, "--task", name, "--backbone", TRUNK),
            *("-o", file, "--test"),
            cache=folder / f"cache-{name}",
        )
        found[name] = (result["metrics"]["test"]["accuracy"], time.perf_counter() - began)
    data = {name: f"{name}={ASSETS / 'data' / name}" for name in TARGETS}
    pairs = [word for name in TARGETS for word in ("--data", data[name])]
    both = run("eval", *files.values(), *pairs, "--backbone", TRUNK, cache=folder)
    for name, file in files.items():
        alone = run("eval", file, "--data", data[name], "--backbone", TRUNK, cache=folder)
        same = alone[name]["accuracy"] == both[name]["accuracy"] == found[name][0]
        accuracy, seconds = found[name]
        lines.append(
            f"| {name} | {accuracy:.2%} | {TARGETS[name]:.0%} | {seconds:.0f} "
            f"| {'yes' if same else 'NO'} |"
        )
report("accuracy", "The default recipe on photographs (ViT-Ti/16, masked, 5 cells)", lines)
