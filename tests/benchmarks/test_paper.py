"""benchmarks/paper: the page says what the records say, and killed runs go on where they were."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.paths import ROOT

from benchmarks.paper import page
from benchmarks.paper.__main__ import main
from benchmarks.paper.records import Records
from engram.errors import EngramError

#: Runs on a small random backbone and an easy task, instead of the real ones: one worker is killed
#: after its first record, then two others work side by side. Workers are forks of one process, so
#: that torch is imported only once.
SMALL = """
import json, sys, time
from multiprocessing import get_context
from pathlib import Path
import torch._dynamo  # an optimizer would import it in every worker
from benchmarks.paper.records import FOLDER, RUNS
from benchmarks.paper.runs import datasets
from engram import load_backbone
from engram.data.datasets import load

data = load({data!r}).with_validation(0.2)
datasets.backbone = lambda *_: load_backbone({backbone!r})
datasets.splits = lambda *_: data

from benchmarks.paper import worker
from benchmarks.paper.queue import MAIN, backbone_runs
from benchmarks.paper.runs.auto import UnchangedRun
from benchmarks.paper.runs.from_cache import cached_runs
from benchmarks.paper.runs.settings import Setting

worker.WAIT = 0.1
rows = [{{**row, "epochs": 2}} for row in MAIN]
jobs = [
    *backbone_runs("fashion", 0, rows),
    *backbone_runs("fashion", 1, rows[:1]),
    cached_runs("fashion", "rows", 0, 1),
    cached_runs("fashion", "gap", 0),
    *(UnchangedRun(Setting("fashion", r, epochs=2), 0) for r in ("auto", "readout", "side")),
]

def work(name):
    sys.stdout = open(name, "w")
    worker.work_through(jobs)

def start(name):
    process = get_context("fork").Process(target=work, args=(name,))
    process.start()
    return process

first = start("first")
while not RUNS.all():
    assert first.is_alive(), "it ended before it was killed"
    time.sleep(0.02)
first.kill()
first.join()
before = RUNS.path.read_text()
two = [start(name) for name in ("second", "third")]
for process in two:
    process.join()
print(json.dumps({{"before": before, "codes": [process.exitcode for process in two]}}))
"""


def test_a_killed_worker_loses_the_run_it_was_in_and_two_share_the_rest(
    tmp_path: Path, small_backbone: Path, colours: Path
) -> None:
    script = SMALL.format(data=str(colours), backbone=str(small_backbone))
    environment = {
        **os.environ,
        "ENGRAM_PAPER_WORK": str(tmp_path / "work"),
        "ENGRAM_PAPER_RECORDS": str(tmp_path / "records"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["codes"] == [0, 0]
    logs = [(tmp_path / name).read_text() for name in ("second", "third")]
    began = [line.split(maxsplit=1)[1] for log in logs for line in log.splitlines()
             if not line.startswith(" ")]  # fmt: skip
    assert began
    assert len(began) == len(set(began)), "something was done twice"

    file = tmp_path / "records" / "runs.jsonl"
    assert found["before"]
    assert file.read_text().startswith(found["before"])
    runs = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(runs) == len({run["name"] for run in runs}) == 5 + 2 * 8 + 6 + 3
    for run in runs:
        assert 0 <= run["val"] <= 1
        assert run["test_images"] == 21
    assert any(run.get("kept") and run["tried"] for run in runs), "auto says what it tried"
    narrow = next(run for run in runs if run["place"] == "mlp")
    wide = next(run for run in runs if run["width"] == 128)
    assert narrow["parameters"] - 32 - 2 * 5 * 32 == 2 * 2 * 32 * 64  # layers, down and up
    assert wide["parameters"] - 32 - 2 * 5 * 32 == 2 * 4 * 32 * 128
    chosen = Records(tmp_path / "records" / "rates.jsonl").get("fashion-112-1000-full-e2-b32")
    assert chosen is not None
    assert set(chosen["val"]) == {"5e-05", "0.0001"}


def test_the_page_of_results_says_what_the_records_say() -> None:
    assert not page.outdated()


# The command line


def test_it_lists_runs_and_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--list"])
    assert f"{page.state()[0].split(' runs')[0]} done" in capsys.readouterr().out
    main(["--list", "--only", "extension"])
    assert "12 of 12 done" in capsys.readouterr().out
    main(["table2", "--table"])
    assert "\n".join(page.TABLES["table2"]()) in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["table9"])
    assert "there is no 'table9'; choose from large, further" in capsys.readouterr().err


# Records


def test_the_last_record_of_a_name_counts(tmp_path: Path) -> None:
    records = Records(tmp_path / "new" / "runs.jsonl")
    assert "a" not in records
    assert records.all() == []
    records.append("b", {"x": 1})
    records.append("a", {"x": 2})
    records.append("b", {"x": 0.1})
    assert records.all() == [{"x": 2}, {"x": 0.1}]
    assert Records(records.path).get("b") == {"x": 0.1}


def test_records_of_other_writers_are_seen(tmp_path: Path) -> None:
    mine, theirs = Records(tmp_path / "runs.jsonl"), Records(tmp_path / "runs.jsonl")
    mine.append("a", {"x": 1})
    assert theirs.get("a") == {"x": 1}
    theirs.append("b", {"x": 2})
    assert mine.get("b") == {"x": 2}


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"

    def write(writer: int) -> None:
        for i in range(10):
            Records(path).append(f"{writer}-{i}", {"x": "long " * 2_000})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert len(path.read_text().splitlines()) == len(Records(path).all()) == 80


def test_half_a_record_is_ignored_and_replaced(tmp_path: Path) -> None:
    records = Records(tmp_path / "runs.jsonl")
    records.append("a", {"x": 1})
    whole = records.path.read_bytes()
    records.path.write_bytes(whole + b'{"name": "b", "x"')
    assert records.all() == [{"x": 1}]
    records.append("c", {"x": 3})
    assert records.path.read_bytes() == whole + b'{"name": "c", "x": 3}\n'
    assert records.all() == [{"x": 1}, {"x": 3}]


@pytest.mark.parametrize("line", ["half", "[]", '{"x": 1}', "3"])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    records = Records(tmp_path / "runs.jsonl")
    records.path.write_text(f'{{"name": "a"}}\n{line}\n{{"name": "b"}}\n')
    with pytest.raises(EngramError, match=r"Line 2 of .*runs\.jsonl is not a record"):
        records.all()
