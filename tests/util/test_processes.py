"""The processes of a run, its precision, and how it is stopped."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engram import EngramError
from engram.util.processes import ProcessGroup, cpu_has_bf16, dtype_for, stoppable

CPU = torch.device("cpu")


def test_a_process_alone_is_the_whole_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    processes = ProcessGroup()
    assert (processes.world, processes.rank, processes.main) == (1, 0, True)
    assert processes.gather([1, "two"]) == [1, "two"]
    assert processes.sum(torch.tensor([1.5])).tolist() == [1.5]


# Precision


def test_auto_is_fp32_on_a_cpu() -> None:
    assert dtype_for("auto", CPU) == torch.float32
    assert dtype_for("fp32", CPU) == torch.float32


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for every trial, which ends as the file `python.code` says."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho trial >> {tmp_path}/trials\nexit $(cat {python}.code)\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return tmp_path / "trials"


def test_a_cpu_that_cannot_run_a_precision_is_a_sentence(trials: Path) -> None:
    trials.with_name("python.code").write_text("1")
    with pytest.raises(EngramError, match="this CPU cannot run it"):
        dtype_for("fp16", CPU)


def test_a_precision_is_tried_once_in_a_process(trials: Path) -> None:
    trials.with_name("python.code").write_text("0")
    assert [dtype_for("bf16", CPU) for _ in range(3)] == [torch.bfloat16] * 3
    assert trials.read_text().splitlines() == ["trial"]
    assert dtype_for("fp16", CPU) == torch.float16
    assert trials.read_text().splitlines() == ["trial"] * 2


@pytest.mark.parametrize(
    ("capabilities", "code", "has"),
    [
        ({"avx2": True, "avx512_bf16": True, "amx_bf16": False}, 0, True),
        ({"avx2": True, "avx512_bf16": True, "amx_bf16": False}, 1, False),
        ({"avx2": True, "avx512_bf16": False, "amx_bf16": False}, 0, False),
    ],
)
def test_bf16_is_what_a_cpu_announces_and_survives(
    capabilities: dict[str, bool],
    code: int,
    has: bool,
    trials: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trials.with_name("python.code").write_text(str(code))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert cpu_has_bf16() == has


# Ctrl-C


@pytest.fixture
def outside() -> Iterator[list[int]]:
    """The signals that reach the handlers that were there before."""
    caught: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {n: signal.signal(n, lambda number, frame: caught.append(number)) for n in numbers}
    yield caught
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_interrupts(number: int, outside: list[int]) -> None:
    with stoppable() as stop:
        assert not stop.asked
        signal.raise_signal(number)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert outside == []
    signal.raise_signal(number)
    assert outside == [number]


def test_signals_are_left_alone_outside_the_main_thread(outside: list[int]) -> None:
    asked: list[bool] = []

    def work() -> None:
        with stoppable() as stop:
            asked.append(stop.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert asked == [False]
    signal.raise_signal(signal.SIGTERM)
    assert outside == [signal.SIGTERM]
