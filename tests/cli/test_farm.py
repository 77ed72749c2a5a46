"""`engram farm`: at the command line, in a file, and after a kill -9 of the whole farm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from tests.support.commands import Output, assert_refused, document, fit, run
from tests.support.farming import FOLDER, jobs_file, plan_of
from tests.support.waiting import wait_until

import engram
from engram.cli.farm_command import JobTable
from engram.cluster.farm import JobStatus

SLOW = "steps = 100\ncheckpoint_seconds = 0.0\npatience = 0\n"


def test_a_dry_run_prints_the_plan_and_trains_nothing(work: Path, capsys: Output) -> None:
    path = jobs_file("[jobs.a]\n[jobs.b]\n")
    assert run("farm", path, "--dry-run", "--json") == 0
    assert [job["job"] for job in document(capsys)["jobs"]] == ["a", "b"]
    assert not FOLDER.exists()


def test_mistakes_are_refused_before_anything_trains(work: Path, capsys: Output) -> None:
    path = jobs_file('[jobs.a]\n[jobs.b]\ntask = "a"\n')
    code = run("farm", path, "--json")
    assert_refused("Job b: its task a is also that of job a", code, capsys)
    code = run("farm", "none.toml", "--json")
    assert_refused("none.toml cannot be read", code, capsys)
    path = jobs_file("[jobs.a]\n")
    assert_refused("is for Ray", run("farm", path, "--gpus-per-job", 1, "--json"), capsys)
    Path("colours.npz").unlink()  # the address comes first
    code = run("farm", path, "--on", "127.0.0.1:1", "--json")
    assert_refused("No Ray cluster answers at 127.0.0.1:1", code, capsys)


def test_a_farm_that_was_killed_goes_on_where_it_was(work: Path, capsys: Output) -> None:
    """The first job is not done again; the second one resumes from its checkpoint."""
    path = jobs_file(f"[jobs.a]\n[jobs.b]\n{SLOW}")
    command = [sys.executable, "-m", "engram", "farm", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as farm:
        checkpoint = FOLDER / "b.run" / "checkpoint.safetensors"
        wait_until(lambda: checkpoint.exists() or farm.poll() is not None)
        assert farm.poll() is None
        farm.send_signal(signal.SIGKILL)
        assert farm.stderr is not None
        said = farm.stderr.read()
    assert "a: done, val accuracy" in said
    first = (FOLDER / "a.safetensors").stat()
    assert run("farm", path, "--json") == 0
    found = {job["job"]: job for job in document(capsys)["jobs"]}
    assert found["a"]["result"]["finished_before"]
    assert (FOLDER / "a.safetensors").stat() == first
    assert not found["b"]["result"]["finished_before"]
    assert (FOLDER / "farm.log").read_text().count("b: resumed at step ") == 1
    assert (FOLDER / "b.log").read_text() == ""
    assert fit("--regime", "masked", "--steps", 100, "--patience", 0, task="b") == 0
    alone = engram.inspect("new.safetensors").content
    assert engram.inspect(FOLDER / "bundle" / "b.safetensors").content == alone


def test_the_table_shows_what_matters_where_there_is_no_room(work: Path) -> None:
    plan = plan_of("".join(f"[jobs.j{i}]\n" for i in range(9)))
    statuses = [JobStatus(planned) for planned in plan]
    for status in statuses[:5]:
        status.state, status.began, status.result = "done", 1.0, {"metric": "x", "seconds": 2.0}
    statuses[5].state, statuses[5].note = "failed", "It broke."
    statuses[6].state, statuses[6].note = "running", "attempt 2: killed"
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(file=nowhere, record=True, width=80, height=9)
        table = JobTable(console)
        table.show(statuses)
        console.print(table)
    shown = console.export_text()
    assert "attempt 2: killed" in shown
    assert "It broke." in shown
    assert "j0" not in shown
    assert "2 waiting, 1 running, 5 done, 1 failed; 6 not shown" in shown
