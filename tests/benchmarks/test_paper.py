"""benchmarks/paper: the page says what the records say, and killed runs go on where they were."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.paths import ROOT

PAPER = ROOT / "benchmarks" / "paper"

#: The list of runs on a small random trunk and an easy task, instead of the real ones.
SMALL = """
import sys
sys.path.insert(0, {paper!r})
import sets
from engram import load_trunk
from engram.data.datasets import load

data = load({data!r}).with_validation(0.2)
sets.TRUNK = sets.Path({trunk!r})
sets.trunk = lambda pixels, raw=False: load_trunk({trunk!r})
sets.splits = lambda *_: data

import cached
from plan import MAIN, through
from run import work_through

rows = [{{**row, "epochs": 2}} for row in MAIN]
jobs = [
    *through("fashion", 0, rows),
    *through("fashion", 1, rows[:1]),
    cached.group("fashion", "rows", 0, 1),
    cached.group("fashion", "gap", 0),
]
work_through(jobs)
"""


@pytest.fixture
def script(tmp_path: Path, small_trunk: Path, colours: Path) -> list[str]:
    text = SMALL.format(paper=str(PAPER), data=str(colours), trunk=str(small_trunk))
    return [sys.executable, "-c", text]


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "ENGRAM_PAPER_WORK": str(tmp_path / "work"),
        "ENGRAM_PAPER_RECORDS": str(tmp_path / "records"),
        "OMP_NUM_THREADS": "1",
    }


def written(folder: Path) -> dict[str, int]:
    """Every record, with the time it was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.json")}


def test_a_killed_worker_loses_the_run_it_was_in_and_two_share_the_rest(
    script: list[str], places: dict[str, str], tmp_path: Path
) -> None:
    records = tmp_path / "records"
    first = subprocess.Popen(script, env=places, stdout=subprocess.DEVNULL)
    while not list((records / "runs").glob("*.json")):
        assert first.poll() is None, "it ended before it was killed"
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = written(records)

    two = [subprocess.Popen(script, env=places, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    said = [process.communicate()[0] for process in two]
    assert [process.returncode for process in two] == [0, 0]
    began = [line.split(maxsplit=1)[1] for text in said for line in text.splitlines()
             if not line.startswith(" ")]  # fmt: skip
    assert len(began) == len(set(began)), "something was done twice"

    after = written(records)
    finals = {name: at for name, at in before.items() if "seed" in name}
    assert finals
    assert {name: after[name] for name in finals} == finals
    runs = [json.loads(path.read_text()) for path in (records / "runs").glob("*.json")]
    assert len(runs) == 5 + 2 * 8 + 6
    for run in runs:
        assert 0 <= run["val"] <= 1
        assert run["test_images"] == 21
    narrow = next(run for run in runs if run["place"] == "mlp")
    wide = next(run for run in runs if run["width"] == 128)
    assert narrow["parameters"] - 32 - 2 * 5 * 32 == 2 * 2 * 32 * 64  # layers, down and up
    assert wide["parameters"] - 32 - 2 * 5 * 32 == 2 * 4 * 32 * 128
    chosen = json.loads((records / "rates" / "fashion-112-1000-full-e2-b32.json").read_text())
    assert set(chosen["val"]) == {"5e-05", "0.0001"}


def test_the_page_of_results_says_what_the_records_say() -> None:
    done = subprocess.run(
        [sys.executable, str(PAPER / "tables.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
