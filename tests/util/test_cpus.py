"""Threads: as many as the process may use, and none that spins while its partner has no core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engram.cli.main import main
from engram.util import cpus
from engram.util.cpus import available_cpus

VARIABLES = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")


def settings_of_libgomp(code: str, **given: str) -> str:
    """What torch's OpenMP library says of its settings as it is loaded."""
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, "OMP_DISPLAY_ENV": "VERBOSE", **given},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


def has_libgomp() -> bool:
    return any((Path(torch.__file__).parent / "lib").glob("libgomp*"))


@pytest.mark.system
@pytest.mark.skipif(not has_libgomp(), reason="torch has another OpenMP library here")
@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ({}, "GOMP_SPINCOUNT = '1000'"),
        ({"GOMP_SPINCOUNT": "77"}, "GOMP_SPINCOUNT = '77'"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, "GOMP_SPINCOUNT = '0'"),
    ],
)
def test_torch_is_loaded_with_our_settings_or_the_users(
    given: dict[str, str], setting: str
) -> None:
    assert setting in settings_of_libgomp("import engram, torch", **given)


@pytest.mark.system
def test_the_command_sets_them_before_torch_is_imported() -> None:
    code = """
import os, sys
import engram.__main__
assert "torch" not in sys.modules
assert os.environ["GOMP_SPINCOUNT"] and os.environ["KMP_BLOCKTIME"]
"""
    settings_of_libgomp(code)


def test_nothing_is_set_once_torch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    cpus.prepare_threads()
    assert not {*VARIABLES} & {*os.environ}


def tree(root: Path, group: str, files: dict[str, str]) -> Path:
    """A machine with these control groups, and this process in one of them."""
    for name, text in {"proc/self/cgroup": group, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "0::/pods/one\n"
V1 = "4:memory:/docker/a\n3:cpu,cpuacct:/docker/a\n"


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        (V2, {"sys/fs/cgroup/pods/one/cpu.max": "max 100000\n"}, 16),
        (V2, {"sys/fs/cgroup/pods/one/cpu.max": "200000 100000\n"}, 2),
        (V2, {"sys/fs/cgroup/pods/one/cpu.max": "150000 100000\n"}, 2),
        (V2, {"sys/fs/cgroup/pods/one/cpu.max": "20000 100000\n"}, 1),
        (
            V2,
            {
                "sys/fs/cgroup/pods/one/cpu.max": "max 100000\n",
                "sys/fs/cgroup/pods/cpu.max": "300000 100000\n",
            },
            3,
        ),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        (
            V1,
            {
                "sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_quota_us": "500000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_period_us": "100000\n",
            },
            5,
        ),
        (  # the container sees its own group as the root
            V1,
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        (
            V1,
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            16,
        ),
        ("not what a kernel writes\n", {}, 16),
    ],
)
def test_the_quota_of_a_container_counts(
    group: str,
    files: dict[str, str],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpus, "_affinity", lambda: 16)
    assert available_cpus(tree(tmp_path, group, files)) == expected


def test_where_there_are_no_control_groups_the_affinity_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpus, "_affinity", lambda: 3)
    assert available_cpus(tmp_path) == 3


@pytest.mark.system
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_one_allowed_cpu_is_one_thread() -> None:
    code = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import engram, torch
from engram.util.cpus import DECODERS
assert (torch.get_num_threads(), DECODERS) == (1, 1)
"""
    settings_of_libgomp(code)


@pytest.mark.parametrize(
    "command",
    [
        *("bench", "demo", "embed", "eval", "export", "farm", "fit", "predict", "reproduce"),
        *("serve", "sweep"),
    ],
)
def test_every_command_that_computes_takes_threads(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    assert "--threads" in capsys.readouterr().out


def test_threads_reach_torch(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    try:
        assert main(["predict", "old.safetensors", "red.png", "--threads", "3"]) == 0
        assert torch.get_num_threads() == 3
        assert os.environ["OMP_NUM_THREADS"] == "3"  # what worker processes see
    finally:
        torch.set_num_threads(before)
