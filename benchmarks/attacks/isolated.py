"""Run cases in forked processes with a limit of time and memory for each.

A process takes one case after the other. If a case ends it (a crash, the alarm, the memory limit),
that case is lost and a new process goes on with the next one.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.attacks.record import Record
from engram.errors import EngramError

SECONDS = 20.0  # for one case, on a machine that may be busy
MEMORY = 1_500_000_000  # bytes that a process may take beyond what it has at its start

Case = TypeVar("Case")


def run_isolated(
    cases: Sequence[tuple[str, Case]],
    attack: Callable[[Case], None],
    seconds: float = SECONDS,
    memory: int = MEMORY,
) -> Record:
    """Attack with every case: it survives if `attack` returns or raises an EngramError."""
    record, position = Record(), 0
    while position < len(cases):
        for problem in _run_process(cases[position:], attack, seconds, memory):
            record.add(cases[position][0], problem or None)
            position += 1
    return record


def _run_process(
    cases: Sequence[tuple[str, Case]], attack: Callable[[Case], None], seconds: float, memory: int
) -> list[str]:
    """The problems of the cases that one process came to; "" for a case that had none."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _limit_memory(memory)
        for _, case in cases:
            os.write(writing, (_problem(case, attack, seconds) + "\n").encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8", errors="replace") as file:
        found = file.read().splitlines()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code and len(found) < len(cases):
        late = f"took more than {seconds:.0f} seconds"
        found.append(late if code == -signal.SIGALRM else f"the process ended with {code}")
    return found


def _problem(case: Case, attack: Callable[[Case], None], seconds: float) -> str:
    signal.setitimer(signal.ITIMER_REAL, seconds)  # its signal ends the process
    try:
        attack(case)
    except EngramError as error:
        return "" if str(error) else "an error without a sentence"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:300].replace("\n", " ") or "an error"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return ""


def _limit_memory(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
