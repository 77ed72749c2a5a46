"""A run that was killed, stopped or out of disk goes on as if nothing had happened."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from tests.support.runs import reached, step_of, written
from tests.support.waiting import wait_until

import engram

CACHED = ("--cache", "on", "--workers", "0")
#: Decoded and augmented anew in every epoch, the average is kept, and patience picks the best.
AUGMENTED = (
    *("--augment", "pad-crop", "--optimizer", "sgd", "--lr", "0.3", "--workers", "2"),
    *("--ema", "0.9", "--patience", "8", "--evaluations", "10"),
)


@pytest.fixture
def fit(small_backbone: Path, colours: Path) -> Callable[..., list[object]]:
    """The arguments of a run that checkpoints at every step."""

    def arguments(out: Path, *more: object) -> list[object]:
        return [
            *("fit", colours, "--task", "colours", "--backbone", small_backbone, "-o", out),
            *("--regime", "masked", "--steps", 20, "--batch", 16, "--checkpoint-seconds", 0, *more),
        ]

    return arguments


@pytest.mark.parametrize("settings", [CACHED, AUGMENTED], ids=["cached", "augmented"])
def test_a_run_killed_again_and_again_ends_with_the_same_bits(
    nursery: Any, fit: Callable[..., list[object]], tmp_path: Path, settings: tuple[str, ...]
) -> None:
    whole, killed = tmp_path / "whole.safetensors", tmp_path / "killed.safetensors"
    at_once = nursery.run(*fit(whole, *settings))
    assert at_once.code == 0, at_once.stderr
    steps = sorted(random.Random(len(settings)).sample(range(1, 13), 3))
    for i, step in enumerate(steps):
        resume = ["--resume"] if i else []
        run = nursery.start(*fit(killed, *settings, *resume), hold=reached(killed, step))
        run.signal_when(signal.SIGKILL, reached(killed, step))
        assert run.code == -signal.SIGKILL
        assert not killed.exists()
    end = nursery.run(*fit(killed, *settings, "--resume", "--json"))
    assert end.code == 0, end.stderr
    assert {k: v.tolist() for k, v in load_file(whole).items()} == {
        k: v.tolist() for k, v in load_file(killed).items()
    }
    assert engram.inspect(whole).content == engram.inspect(killed).content
    assert engram.inspect(whole).metrics == engram.inspect(killed).metrics
    histories = [path.with_suffix(".run") / "history.csv" for path in (whole, killed)]
    assert histories[0].read_text() == histories[1].read_text()
    assert not (killed.with_suffix(".run") / "checkpoint.safetensors").exists()


def test_auto_that_was_killed_and_stopped_ends_with_the_same_bits(
    nursery: Any, fit: Callable[..., list[object]], tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole.safetensors", tmp_path / "out.safetensors"
    settings = (*CACHED, "--regime", "auto", "--patience", 30, "--evaluations", 20)
    at_once = nursery.run(*fit(whole, *settings, "--json"))
    assert at_once.code == 0, at_once.stderr
    killed = nursery.start(*fit(out, *settings), hold=reached(out, 2))
    killed.signal_when(signal.SIGKILL, reached(out, 2))
    assert killed.code == -signal.SIGKILL
    stopped = nursery.start(*fit(out, *settings, "--resume"), hold=reached(out, 6))
    stopped.signal_when(signal.SIGINT, reached(out, 6))  # some have been dropped
    assert stopped.code == 130, stopped.stderr
    assert "--resume" in stopped.stderr
    assert engram.inspect(out).metrics["val"]["accuracy"] > 0.5
    end = nursery.run(*fit(out, *settings, "--resume", "--json"))
    assert end.code == 0, end.stderr
    assert engram.inspect(out).content == engram.inspect(whole).content
    assert json.loads(end.stdout)["tried"] == json.loads(at_once.stdout)["tried"]


@pytest.mark.parametrize("settings", [CACHED, AUGMENTED], ids=["cached", "augmented"])
def test_ctrl_c_keeps_the_best_so_far_and_says_how_to_go_on(
    nursery: Any, fit: Callable[..., list[object]], tmp_path: Path, settings: tuple[object, ...]
) -> None:
    cached = settings == CACHED
    out, other = tmp_path / "out.safetensors", tmp_path / "other.safetensors"
    hour = ("--checkpoint-seconds", 3600)
    # A validation follows every step, with workers that were there before the signal.
    settings = (*settings, "--steps", 30, "--evaluations", 30, "--patience", 30)
    run = nursery.start(*fit(out, *settings), hold=reached(out, 3))
    run.signal_when(signal.SIGINT, reached(out, 3))
    assert run.code == 130, run.stderr
    assert "Stopped at step" in run.stderr
    assert "--resume" in run.stderr
    assert "Traceback" not in run.stderr
    assert step_of(out) >= 3
    kept = engram.inspect(out)
    assert kept.recipe["training"]["interrupted"]
    assert kept.metrics["val"]["interval"]
    if not cached:
        end = nursery.run(*fit(out, *settings, "--resume"))
        whole = nursery.run(*fit(other, *settings, *hour))
        assert (end.code, whole.code) == (0, 0), end.stderr
        assert engram.inspect(out).content == engram.inspect(other).content
    else:
        again = nursery.run(*fit(out, *settings))
        assert again.code == 2
        assert "holds an interrupted run" in again.stderr
        changed = nursery.run(*fit(out, *settings, "--lr", 0.5, "--resume"))
        assert changed.code == 2
        assert "other settings" in changed.stderr
        anew = nursery.run(*fit(out, *settings, "--overwrite", *hour))
        fresh = nursery.run(*fit(other, *settings, *hour))
        assert (anew.code, fresh.code) == (0, 0), anew.stderr
        assert engram.inspect(out).content == engram.inspect(other).content
        written = out.stat().st_mtime_ns
        finished = nursery.run(*fit(out, *settings, *hour, "--resume"))
        assert finished.code == 0, finished.stderr  # a loop that tries again ends well
        changed = nursery.run(*fit(out, *settings, "--lr", 0.5, "--resume"))
        assert changed.code == 2
        assert "exists already" in changed.stderr
        assert out.stat().st_mtime_ns == written


def test_ctrl_c_after_the_first_answer_keeps_it_as_an_engram(
    nursery: Any, fit: Callable[..., list[object]], tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole.safetensors", tmp_path / "out.safetensors"
    settings = (*CACHED, "--regime", "auto", "--test")
    at_once = nursery.run(*fit(whole, *settings))
    assert at_once.code == 0, at_once.stderr
    run = nursery.start(*fit(out, *settings), hold=reached(out, 1))
    run.signal_when(signal.SIGINT, lambda: "trying to improve" in run.stderr)
    assert run.code == 130, run.stderr
    assert f"{out} is the best so far" in run.stderr
    assert "interrupted" in run.stdout
    kept = engram.inspect(out)
    assert kept.spec.regime in ("head", "readout")  # nothing else has seen all folds
    assert kept.has_statistics
    assert kept.metrics["val"]["interval"]
    assert "test" not in kept.metrics
    assert (out.with_suffix(".run") / "report.html").exists()
    assert nursery.run("eval", out, "--data", f"colours={fit(out)[1]}").code == 0
    again = nursery.run(*fit(out, *settings))
    assert again.code == 2
    assert "holds an interrupted run" in again.stderr
    end = nursery.run(*fit(out, *settings, "--resume"))
    assert end.code == 0, end.stderr
    assert engram.inspect(out).content == engram.inspect(whole).content
    assert engram.inspect(out).metrics == engram.inspect(whole).metrics


def test_a_second_signal_ends_a_run_at_once(
    nursery: Any, fit: Callable[..., list[object]], tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    run = nursery.start(*fit(out, *CACHED, "--regime", "auto"), hold=reached(out, 1))
    wait_until(lambda: "trying to improve" in run.stderr, lambda: run.stderr)

    for number in (signal.SIGINT, signal.SIGTERM):  # two of one kind may arrive as one
        os.killpg(run.pid, number)
    assert run.wait().code == 130
    assert "Traceback" not in run.stderr
    assert not out.exists()


def test_sigterm_to_every_process_lets_the_main_one_save(
    nursery: Any, fit: Callable[..., list[object]], tmp_path: Path
) -> None:
    """torchrun and schedulers end the whole group, the processes that read pictures among them."""
    out = tmp_path / "out.safetensors"
    run = nursery.start(*fit(out, *AUGMENTED, "--steps", 1000), hold=reached(out, 3))
    run.signal_when(signal.SIGTERM, reached(out, 3))
    assert run.code == 130, run.stderr
    assert "--resume" in run.stderr
    assert step_of(out) >= 3


def test_a_full_disk_is_a_sentence_and_leaves_the_last_checkpoint(
    nursery: Any, fit: Callable[..., list[object]], tmp_path: Path
) -> None:
    whole, short = tmp_path / "whole.safetensors", tmp_path / "short.safetensors"
    assert nursery.run(*fit(whole, *CACHED)).code == 0
    run = nursery.start(*fit(short, *CACHED, "--steps", 20), hold=reached(short, 5))
    run.signal_when(signal.SIGKILL, reached(short, 5))
    size = (short.with_suffix(".run") / "checkpoint.safetensors").stat().st_size
    before = step_of(short)
    full = nursery.run(*fit(short, *CACHED, "--resume"), fsize=size // 2)
    assert full.code == 2, full.stderr
    assert "Traceback" not in full.stderr
    *_, progress, sentence = full.stderr.strip().splitlines()
    assert "cannot be written" in sentence
    assert "cannot be written" not in progress
    assert step_of(short) == before
    end = nursery.run(*fit(short, *CACHED, "--resume"))
    assert end.code == 0, end.stderr
    assert engram.inspect(short).content == engram.inspect(whole).content


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a small disk")
def test_a_disk_without_room_for_the_log_is_a_sentence(
    nursery: Any, fit: Callable[..., list[object]], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(["mount", *options], check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let a test make a small disk")
    try:
        (disk / "rest").write_bytes(bytes(40_000))
        run = nursery.run(*fit(disk / "out.safetensors", *CACHED))
        assert run.code == 2, run.stderr
        assert "cannot be written (No space left on device)" in run.stderr
        assert "Traceback" not in run.stderr
        assert not (disk / "out.safetensors").exists()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def children_of(pid: int) -> set[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for thread in threads for child in thread.read_text().split()}


@pytest.mark.parametrize("cache", ["on", "off"])
def test_workers_end_with_a_run_that_was_killed(
    cache: str,
    nursery: Any,
    fit: Callable[..., list[object]],
    tmp_path: Path,
    own_cache: Path,
) -> None:
    """SIGKILL to the main process alone, as the kernel sends it for want of memory."""
    settings = ("--workers", 2, "--cache", cache, "--steps", 100_000, "--augment", "none")
    filling = written(own_cache, "*/*.data", files=1, more=0)  # a cache soon needs no workers
    run = nursery.start(*fit(tmp_path / "out.safetensors", *settings), hold=filling)
    wait_until(lambda: children_of(run.pid) or run.ended, lambda: run.stderr)
    workers = children_of(run.pid)
    assert workers, run.stderr
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def test_a_checkpoint_that_is_being_replaced_can_be_followed(tmp_path: Path) -> None:
    """As the tests above do. `safe_open` opens a file twice, and may see two different ones."""
    out, checkpoint = tmp_path / "out.safetensors", tmp_path / "out.run" / "checkpoint.safetensors"
    checkpoint.parent.mkdir()
    contents = [
        safetensors.torch.save({"x": torch.zeros(n)}, {"run": json.dumps({"step": n})})
        for n in (1, 50_000)
    ]
    checkpoint.write_bytes(contents[0])
    for name, content in zip(("a", "b"), contents, strict=True):
        (tmp_path / name).write_bytes(content)
    child = os.fork()
    if child == 0:
        for name in itertools.cycle(("a", "b")):
            os.link(tmp_path / name, tmp_path / "c")
            os.replace(tmp_path / "c", checkpoint)
    try:
        assert {step_of(out) for _ in range(2000)} <= {1, 50_000}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
