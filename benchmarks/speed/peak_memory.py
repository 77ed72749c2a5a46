"""Peak memory of training steps, each in its own process.

    python -m benchmarks.speed.peak_memory full engram "separate model, full"

prints, for each step, the bytes by which its process grows during the step. A step with a single
image runs first, so that memory which a library allocates only once is not counted. The processes
are forks of one that has imported everything and computed nothing. Linux only.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

import torch._dynamo  # noqa: F401, the first optimiser would import it

from benchmarks.peers import training_steps
from benchmarks.speed.plan import PLANS, backbone_of
from engram.experiments.bench import Step, Workload, steps


def peak(plan_name: str, what: str) -> int:
    plan = PLANS[plan_name]
    workload = Workload(backbone_of(plan.big))

    def make(batch: int) -> Step:
        return {**steps(workload, batch), **training_steps(workload, batch)}[what]()

    make(1)()
    step = make(plan.step_batch)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def main(plan_name: str, *names: str) -> None:
    for name in names:
        child = os.fork()
        if child == 0:
            print(peak(plan_name, name), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"The step {name!r} failed.")


if __name__ == "__main__":
    main(*sys.argv[1:])
