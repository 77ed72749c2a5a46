"""One job, wherever it runs: as `engram fit --resume`, with what it says meanwhile."""

from pathlib import Path

import pytest
from tests.support.commands import fit
from tests.support.farming import FOLDER, jobs_of

import engram
from engram.farm.events import Event
from engram.farm.work import train_job


def test_a_job_trains_what_fit_trains_and_once(work: Path) -> None:
    assert fit("--regime", "masked") == 0
    (job,) = jobs_of("[jobs.new]\n")
    said: list[Event] = []
    last = train_job(job, said.append)
    assert (last.kind, last.result["finished_before"]) == ("done", False)
    assert last.result["score"].startswith("val accuracy ")
    assert "ready" in [event.kind for event in said]
    assert engram.inspect(job.out).content == engram.inspect("new.safetensors").content
    assert (FOLDER / "new.run" / "report.html").exists()
    said.clear()
    assert train_job(job, said.append).result["finished_before"]
    assert "ready" not in [event.kind for event in said]


def test_a_mistake_is_the_end_of_a_job_and_a_bug_is_an_exception(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = jobs_of('[jobs.new]\nlog = "paper"\n')
    last = train_job(job, print)
    assert last.kind == "failed"
    assert "paper" in last.text
    monkeypatch.setattr("engram.farm.work.TrainingJob.start", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_job(job, print)
