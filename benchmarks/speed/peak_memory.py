"""Peak memory of one training step, in a separate process.

    python -m benchmarks.speed.peak_memory full engram

prints the bytes by which the process grows during one step. A step with a single image runs first,
so that memory which a library allocates only once is not counted. Linux only.
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
    ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


if __name__ == "__main__":
    print(peak(*sys.argv[1:]))
