"""The memory of one training step, in a process of its own.

    python -m benchmarks.speed.peak full engram

prints the bytes by which the process grows while it takes one step. A step with a single image
comes first, so that what a library allocates once is not counted; Linux only.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

from benchmarks.speed.plan import PLANS, trunk_of
from engram.experiments.bench import Size, steps


def peak(plan_name: str, what: str) -> int:
    plan = PLANS[plan_name]
    size = Size(trunk_of(plan.big))
    steps(size, 1)[what]()()
    step = steps(size, plan.step_batch)[what]()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


if __name__ == "__main__":
    print(peak(*sys.argv[1:]))
