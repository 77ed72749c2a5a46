"""Processes that train: one that is killed is replaced, and its job goes on from its checkpoint."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.farming import FOLDER, jobs_of

import engram
from engram.farm.events import Event
from engram.farm.local import LocalRunner
from engram.farm.work import train_job

SLOW = "steps = 60\ncheckpoint_seconds = 0.0\npatience = 0\n"


def test_a_killed_job_resumes_and_a_bad_one_is_not_tried_again(work: Path) -> None:
    first, bad, whole = jobs_of(
        f'[jobs.a]\n{SLOW}[jobs.bad]\nlog = "paper"\n[jobs.whole]\ntask = "a"\nbundle = "x"\n{SLOW}'
    )
    FOLDER.mkdir()
    checkpoint, said, killed = FOLDER / "a.run" / "checkpoint.safetensors", list[Event](), 0
    with LocalRunner(slots=1, retries=1, threads=1, folder=FOLDER) as runner:
        runner.start(first)
        while not said or said[-1].kind not in ("done", "failed"):
            if checkpoint.exists() and not killed:
                (worker,) = multiprocessing.active_children()
                killed = worker.pid or 0
                os.kill(killed, signal.SIGKILL)
            said += runner.events(0.02)
        runner.start(bad)
        while said[-1].job != "bad" or said[-1].kind == "at_work":
            said += runner.events(0.5)
    kinds = [event.kind for event in said if event.kind not in ("at_work", "ready", "said")]
    assert kinds == ["retried", "done", "failed"]
    retried = next(event for event in said if event.kind == "retried")
    assert retried.text == "attempt 2: its process was ended by SIGKILL"
    assert [event.text for event in said if event.text.startswith("resumed at step ")]
    assert (FOLDER / "a.log").read_text() == ""
    train_job(whole, lambda event: None)
    assert engram.inspect(first.out).content == engram.inspect(whole.out).content
    assert "paper" in said[-1].text


def test_what_a_killed_process_leaves_is_freed_without_a_word() -> None:
    """Python calls it leaked: here a lock, in a training the queues of its loaders."""
    code = (
        "import multiprocessing, os, pathlib\n"
        "from engram.farm.local import LocalRunner\n"
        "with LocalRunner(1, 0, 1, pathlib.Path('.')):\n"
        "    lock = multiprocessing.get_context('spawn').Lock()\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (-signal.SIGKILL, b"")
