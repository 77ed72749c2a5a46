"""Times that can be compared: within one run, in which all cases take turns."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
Say = Callable[[str], object]


@dataclass(frozen=True)
class Case:
    """Something to time: `run`, called `runs` times in each round.

    The time is reported for `of` calls: of a hundred equal passes only some need to run, and of
    several short calls in a row the mean is taken (`of=1`).
    """

    run: Callable[[], object]
    runs: int = 1
    of: int | None = None

    @property
    def scale(self) -> float:
        return (self.of or self.runs) / self.runs

    @property
    def note(self) -> str:
        return f"{self.runs} of {self.of} passes" if self.scale != 1 else ""


@dataclass(frozen=True)
class Timing:
    seconds: float  # median
    ratio: float  # to the first case: median over rounds of the ratio within a round
    low: float  # quartiles of that ratio
    high: float
    rounds: int


def compare(
    cases: Mapping[Key, Case],
    *,
    seconds: float,
    least: int = 3,
    most: int = 25,
    rest: float = 0,
    say: Say = lambda text: None,
    wait: Callable[[], object] = lambda: None,
) -> dict[Key, Timing]:
    """Time the cases in turn, round after round; ratios are to the first case.

    It takes about `seconds`, but at least `least` and at most `most` rounds. A pause of `rest`
    seconds before each case keeps threads that still spin from disturbing it. `wait` returns once
    the device is done, where it works by itself.
    """
    for case in cases.values():
        case.run()  # warm up
    times: dict[Key, list[float]] = {name: [] for name in cases}
    began = time.perf_counter()
    rounds = 0
    while rounds < least or (rounds < most and time.perf_counter() - began < seconds):
        for name, case in cases.items():
            time.sleep(rest)
            wait()
            start = time.perf_counter()
            for _ in range(case.runs):
                case.run()
            wait()
            times[name].append(case.scale * (time.perf_counter() - start))
        rounds += 1
        say(f"round {rounds}, {time.perf_counter() - began:.0f} s")
    reference = next(iter(times.values()))
    found = {}
    for name, values in times.items():
        ratios = [value / base for value, base in zip(values, reference, strict=True)]
        low, middle, high = quartiles(ratios)
        found[name] = Timing(statistics.median(values), middle, low, high, rounds)
    return found


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def machine() -> dict[str, Any]:
    """The machine and the versions that times were measured on."""
    processor = platform.processor() or "unknown processor"
    if (cpus := Path("/proc/cpuinfo")).exists():  # Linux
        lines = cpus.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        processor = next(iter(names), processor)
    memory = None
    if "SC_PHYS_PAGES" in os.sysconf_names:
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_gb": memory,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
    }


def describe_machine(about: Mapping[str, Any]) -> str:
    memory = f", {about['memory_gb']} GB" if about["memory_gb"] else ""
    return (
        f"{about['processor']} ({about['cores']} cores{memory}, {about['system']}), "
        f"torch {about['torch']} with {about['threads']} threads and {about['kernels']} kernels, "
        f"Python {about['python']}, fp32"
    )
