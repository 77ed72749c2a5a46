"""Worker processes end with the process that asked for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.waiting import wait_until

WORKER = """
import multiprocessing, os, time
from engram.util.worker_processes import end_with_parent

def work(parent):
    end_with_parent(parent)
    time.sleep(1)  # a parent that lives is not taken for one that is gone
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.Process(target=work, args=(os.getpid(),)).start()
    time.sleep(600)
"""


@pytest.mark.system
def test_a_worker_of_a_fork_server_lives_as_long_as_who_asked_for_it(tmp_path: Path) -> None:
    """The fork server is its parent, and goes on without the one that asked."""
    script = tmp_path / "parent.py"
    script.write_text(WORKER)
    command = [sys.executable, script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = Path("/proc") / parent.stdout.readline().strip()
        assert worker.name.isdigit(), "the worker ended although its parent lives"
        assert worker.exists()
        parent.kill()
        wait_until(lambda: not worker.exists(), lambda: "the worker outlives its parent")
