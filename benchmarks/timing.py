"""Ratios in one run: functions take turns, round after round, and medians are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from engram.vit import HeadConfig, ViT, ViTConfig

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Timing:
    seconds: float  # median
    ratio: float  # to the first function: median over rounds of the ratio within a round
    low: float  # quartiles of that ratio
    high: float


def compare(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Time the functions in turn; ratios are to the first of them."""
    for function in functions.values():
        function()  # warm up
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - began)
    reference = next(iter(times.values()))
    found = {}
    for name, values in times.items():
        ratios = [value / base for value, base in zip(values, reference, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found[name] = Timing(statistics.median(values), middle, low, high)
    return found


def vit_b32() -> ViT:
    """A ViT-B/32 with random weights: speed does not depend on their values."""
    config = ViTConfig((224, 224), 32, 768, 12, 12, 3072, head=HeadConfig(1000))
    return ViT(config).eval()


def vit_ti16() -> ViT:
    config = ViTConfig((224, 224), 16, 192, 12, 3, 768, head=HeadConfig(1000))
    return ViT(config).eval()


def report(name: str, title: str, lines: list[str]) -> None:
    """Print a table and keep it in benchmarks/results/NAME.md."""
    about = f"{torch.get_num_threads()} threads, torch {torch.__version__}, fp32, CPU"
    text = "\n".join([f"# {title}", "", f"Measured with {about}.", "", *lines, ""])
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
