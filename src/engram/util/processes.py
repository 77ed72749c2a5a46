"""The processes of a run (one, or those that torchrun started), precision, and Ctrl-C."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, distributed

from engram.errors import EngramError, flag, is_lost_worker
from engram.util.tensors import device_for


class ProcessGroup:
    """This process's place among those that share the work; alone unless torchrun started it.

    `device` is what `device_for` takes. Under torchrun every process has an accelerator of its
    own, so it cannot have a number there.
    """

    def __init__(self, device: str = "auto") -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank, self.device = 0, device_for(device)
        if self.world == 1:
            return
        if self.device.index is not None or device == "mps":
            raise EngramError(
                f"{flag('device')} is {device!r}, but torchrun started several processes, and "
                f"each takes a device of its own; use {flag('device')} auto, cuda or cpu."
            )
        if self.device.type in ("cuda", "xpu"):
            self.device = torch.device(self.device.type, int(os.environ["LOCAL_RANK"]))
            torch.accelerator.set_device_index(self.device.index)
        if not distributed.is_initialized():
            distributed.init_process_group("gloo" if self.device.type == "cpu" else None)
            atexit.register(_leave_group)
        self.rank = distributed.get_rank()

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world == 1:
            return values
        total = values.to(self.device, copy=True)
        with _as_one():
            distributed.all_reduce(total)
        return total.to(values.device)

    def gather(self, items: list[Any]) -> list[Any]:
        """The lists of all processes, joined in the order of ranks."""
        if self.world == 1:
            return items
        lists: list[list[Any]] = [[] for _ in range(self.world)]
        with _as_one():
            distributed.all_gather_object(lists, items)
        return [item for one in lists for item in one]

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.world > 1:
            with _as_one():
                distributed.barrier()


@contextmanager
def _as_one() -> Iterator[None]:
    """Guard collective work: if one of the processes is gone, the others say so."""
    try:
        yield
    except RuntimeError as error:
        if is_lost_worker(error):
            raise
        raise EngramError(
            "Another process of this run has ended, so this one cannot continue; see its output, "
            "then start all of them again: fit and sweep continue with "
            f"{flag('resume', True)}."
        ) from error


def _leave_group() -> None:
    """Close the connections while Python still runs: the threads behind them would end it badly.

    Without this, a process that did all its work now and then dies of SIGABRT as it leaves.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()


# Precision

_PROBE = (
    "import torch; x = torch.ones(64, 64, dtype=torch.{0}); "
    "torch.nn.functional.linear(x, x); (x @ x).sum().item()"
)


def dtype_for(precision: str, device: torch.device) -> torch.dtype:
    """The type that products are computed in; a CPU that would die of it is an EngramError.

    Some virtual CPUs announce instructions for bf16 or fp16 and end the process that uses them,
    so a CPU is tried in a process of its own first.
    """
    if precision == "auto":
        fit = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if fit else torch.float32
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if precision not in dtypes:
        raise EngramError(f"{flag('precision')} is {precision!r}; it can be {', '.join(dtypes)}.")
    dtype = dtypes[precision]
    if dtype != torch.float32 and device.type == "cpu":
        code = _try_on_cpu(sys.executable, str(dtype).removeprefix("torch."))
        if code:
            why = f"signal {-code}" if code < 0 else "an error"
            raise EngramError(
                f"precision is {precision}, but this CPU cannot run it (a trial ended with {why}); "
                "use precision fp32, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 in the "
                "environment and try again."
            )
    return dtype


def cpu_has_bf16() -> bool:
    """Whether this CPU has instructions for bf16, and a trial of them does not end badly.

    False where several processes share a run: their CPUs may differ, and their results may not.
    """
    if distributed.is_available() and distributed.is_initialized():
        return False
    # an older torch does not say
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    announced = any(value for name, value in capabilities.items() if name.endswith("bf16"))
    return announced and not _try_on_cpu(sys.executable, "bfloat16")


@cache
def _try_on_cpu(python: str, dtype: str) -> int:
    """The exit code of a process that computes in this type: a sweep asks for every variant."""
    probe = [python, "-c", _PROBE.format(dtype)]
    return subprocess.run(probe, capture_output=True, check=False).returncode


# Ctrl-C


class Stop:
    """Set once the user asked to stop."""

    asked = 0  # the signal


@contextmanager
def stoppable(*, at_once: bool = False) -> Iterator[Stop]:
    """Ctrl-C or SIGTERM sets `asked`, so that work ends at a good place; twice, it interrupts.

    With `at_once` it interrupts the first time too, whatever the work is waiting for.
    """
    stop = Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        before, stop.asked = stop.asked, number
        if before or at_once:
            raise KeyboardInterrupt

    try:
        before = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are somebody else's business
        before = {}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
