"""The CPUs that this process may use, and how torch's threads use them. It imports no torch."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

#: How long a thread of OpenMP spins at a barrier before it sleeps: libgomp in iterations, the
#: libraries of LLVM and Intel in milliseconds. Their defaults spin for so long that a thread whose
#: partner waits for a core takes that core's time itself: two busy programs beside training on two
#: cores made it twenty times as slow. docs/speed.md has the measurement.
_WAITING = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def prepare_threads() -> None:
    """Set what OpenMP reads once, when torch is imported, unless the user has set it.

    Processes that this one starts inherit it. Where torch is imported already, it does nothing.
    """
    if "torch" in sys.modules:
        return
    if "OMP_WAIT_POLICY" not in os.environ:
        for name, value in _WAITING.items():
            os.environ.setdefault(name, value)
    cpus = available_cpus()
    if cpus < _affinity():  # OpenMP knows the affinity, but no quota of a container
        os.environ.setdefault(_THREADS[0], str(cpus))


def use_threads(count: int) -> None:
    """Compute with this number of threads, in this process and in those it starts."""
    for name in _THREADS:
        os.environ[name] = str(count)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(count)


def available_cpus(root: Path = Path("/")) -> int:
    """The number of CPUs that the affinity and the quota of the container leave, at least 1.

    `root` is where `proc` and `sys` are.
    """
    return max(1, min([_affinity(), *(math.ceil(quota) for quota in _quotas(root))]))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[float]:
    """The quotas of the process's control groups and of those above them, in CPUs."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, own = [*line.split(":", 2), "", ""][:3]
        if not controllers:  # version 2
            folders = [mount]
        elif "cpu" in controllers.split(","):
            folders = [mount / controllers, mount / "cpu"]
        else:
            continue
        relative = Path(own.lstrip("/"))
        for folder in folders:
            for group in (relative, *relative.parents):  # in a container its own may be the mount
                yield from _quota(folder / group)


def _quota(group: Path) -> Iterator[float]:
    limit = _read(group / "cpu.max").split() or [
        *_read(group / "cpu.cfs_quota_us").split(),
        *_read(group / "cpu.cfs_period_us").split(),
    ]
    if len(limit) == 2 and all(part.isdigit() for part in limit):  # else "max", or -1
        yield int(limit[0]) / max(int(limit[1]), 1)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


#: Processes that decode images, by default.
DECODERS = min(available_cpus(), 8)
DECODERS_SHOWN = "one per CPU, at most 8"
