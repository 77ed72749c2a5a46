"""A disk that fills, a folder that is read-only, a clock that jumps: nothing is lost.

The disks are real ones, a tmpfs that a test mounts; only root may do that.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.runs import reached, step_of

import engram

Fit = Callable[..., list[object]]


@pytest.fixture(scope="module")
def fit(small_backbone: Path, colours: Path) -> Fit:
    """The arguments of a run that checkpoints at every step."""

    def arguments(out: Path, *more: object) -> list[object]:
        return [
            *("fit", colours, "--task", "colours", "--backbone", small_backbone, "-o", out),
            *("--regime", "masked", "--steps", 40, "--batch", 16, "--checkpoint-seconds", 0),
            *("--workers", 0, *more),
        ]

    return arguments


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty disk of 2 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let a test mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", disk], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all space that is left."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (65_536, 4096, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    return path


def is_sentence(stderr: str) -> bool:
    return stderr.strip().endswith(".") and "Traceback" not in stderr


@pytest.fixture(scope="module")
def whole(nursery: Any, fit: Fit, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The content of a run that nothing happened to."""
    out = tmp_path_factory.mktemp("whole") / "whole.safetensors"
    run = nursery.run(*fit(out, "--cache", "on"))
    assert run.code == 0, run.stderr
    return engram.inspect(out).content


def test_a_disk_that_fills_during_a_checkpoint_loses_no_finished_step(
    nursery: Any, fit: Fit, disk: Path, whole: str
) -> None:
    out = disk / "out.safetensors"
    run = nursery.start(*fit(out, "--cache", "on"), hold=reached(out, 3))
    run.signal_when(signal.SIGSTOP, reached(out, 3), wait=False)
    filler = fill(disk)
    os.killpg(run.pid, signal.SIGCONT)
    assert run.wait().code == 2, run.stderr
    assert is_sentence(run.stderr)
    assert "cannot be written (No space left on device)" in run.stderr
    assert step_of(out) >= 3
    assert not out.exists()
    filler.unlink()
    end = nursery.run(*fit(out, "--cache", "on", "--resume"))
    assert end.code == 0, end.stderr
    assert engram.inspect(out).content == whole


def test_a_folder_that_became_read_only_keeps_its_run(
    nursery: Any, fit: Fit, disk: Path, whole: str
) -> None:
    out = disk / "out.safetensors"
    run = nursery.start(*fit(out, "--cache", "on"), hold=reached(out, 3))
    run.signal_when(signal.SIGKILL, reached(out, 3))
    before = step_of(out)
    remount(disk, "ro")
    for more in (["--resume"], ["--overwrite"]):
        refused = nursery.run(*fit(out, "--cache", "on", *more))
        assert refused.code == 2, refused.stderr
        assert is_sentence(refused.stderr)
        assert "cannot be written (Read-only file system)" in refused.stderr
    assert step_of(out) == before
    remount(disk, "rw")
    end = nursery.run(*fit(out, "--cache", "on", "--resume"))
    assert end.code == 0, end.stderr
    assert engram.inspect(out).content == whole


def test_a_new_run_in_a_read_only_folder_is_refused_before_it_trains(
    nursery: Any, fit: Fit, disk: Path
) -> None:
    remount(disk, "ro")
    run = nursery.run(*fit(disk / "out.safetensors", "--steps", 10**9))
    assert run.code == 2, run.stderr
    assert is_sentence(run.stderr)
    assert "cannot be written (Read-only file system)" in run.stderr


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_a_cache_that_cannot_be_written_is_a_sentence(
    how: str, nursery: Any, fit: Fit, disk: Path, tmp_path: Path
) -> None:
    if how == "full":
        fill(disk)
    else:
        remount(disk, "ro")
    out = tmp_path / "out.safetensors"
    run = nursery.start(*fit(out, "--cache", "on"), ENGRAM_CACHE=disk / "cache").wait()
    assert run.code == 2, run.stderr
    assert is_sentence(run.stderr)
    assert not out.exists()


# At every second call the clock of the process is ten years ahead or behind.
JUMPING = """
import itertools, time
YEARS = 10 * 365 * 86400
_time, _shift = time.time, itertools.cycle((YEARS, -YEARS))
time.time = lambda: _time() + next(_shift)
time.time_ns = lambda: int(time.time() * 1e9)
"""


def test_a_clock_that_jumps_by_years_changes_nothing_with_patched_time_and_file_dates(
    nursery: Any, fit: Fit, tmp_path: Path, whole: str
) -> None:
    """`time.time` of the process jumps, and files of the run are from 1970 and from 2100."""
    out = tmp_path / "out.safetensors"
    run = nursery.start(*fit(out, "--cache", "on"), hold=reached(out, 3))
    run.signal_when(signal.SIGKILL, reached(out, 3))
    files = sorted(path for path in out.with_suffix(".run").rglob("*") if path.is_file())
    for i, path in enumerate(files):
        seconds = 4_102_444_800 * (i % 2)
        os.utime(path, (seconds, seconds))
    end = nursery.run(*fit(out, "--cache", "on", "--resume"), before=JUMPING)
    assert end.code == 0, end.stderr
    assert engram.inspect(out).content == whole
