"""The page about a farm: every job with its state, and links to the pages of their own."""

from dataclasses import replace
from pathlib import Path

from tests.support.farming import FOLDER, plan_of

from engram.farm.page import write_farm_report
from engram.farm.schedule import Status
from engram.farm.work import train_job


def test_the_page_has_every_job_and_leads_to_their_own(work: Path) -> None:
    plan = plan_of("[jobs.good]\n[jobs.bad]\n")
    good, bad = (Status(planned) for planned in plan.jobs)
    good.result = train_job(good.planned.job, lambda event: None).result
    good.state, good.attempts = "done", 2
    bad = replace(bad, state="failed", note="It is <broken>.")
    page = write_farm_report(FOLDER / "report.html", [good, bad], 12.0)
    html = page.read_text(encoding="utf-8")
    assert "The farm jobs" in html
    assert "2 jobs: 1 done, 1 failed, in 12 seconds." in html
    assert 'href="good.run/report.html"' in html
    assert (FOLDER / "good.run" / "report.html").exists()
    assert good.result["score"] in html
    assert "bad: It is &lt;broken&gt;." in html
    assert "good: Validation accuracy" in html  # its learning curve
    assert str(work) not in html
