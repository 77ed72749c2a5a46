"""The page about a farm: every job with its state, and links to the pages of their own."""

from dataclasses import replace
from pathlib import Path

from tests.support.farming import FOLDER, Inline, plan_of

from engram.cluster.farm import FarmResult, JobStatus


def test_the_page_has_every_job_and_leads_to_their_own(work: Path) -> None:
    good, bad = (JobStatus(planned) for planned in plan_of("[jobs.good]\n[jobs.bad]\n"))
    good.result = Inline().train(good.job)
    good.state, good.attempts = "done", 2
    bad = replace(bad, state="failed", note="It is <broken>.")
    FarmResult(FOLDER, [good, bad], 12.0).write_page()
    html = (FOLDER / "report.html").read_text(encoding="utf-8")
    assert "The farm jobs" in html
    assert "2 jobs: 1 done, 1 failed" in html
    assert 'href="good.run/report.html"' in html
    assert (FOLDER / "good.run" / "report.html").exists()
    assert good.result["metric"] in html
    assert "bad: It is &lt;broken&gt;." in html
    assert "good: Validation accuracy" in html  # its learning curve
    assert str(work) not in html
