"""The page about a farm: every job with its state, and links to the pages of their own."""

from pathlib import Path

from tests.support.farming import FOLDER, Inline, Lines, plan_of

from engram.cluster.farm import Farm


def test_the_page_has_every_job_and_leads_to_their_own(work: Path) -> None:
    found = Farm(plan_of("[jobs.good]\n[jobs.bad]\n"), FOLDER, Lines())
    good, bad = found.statuses
    good.result = Inline().train(good.job)
    good.state, good.attempts = "done", 2
    bad.state, bad.note = "failed", "It is <broken>."
    found.write_page()
    html = (FOLDER / "report.html").read_text(encoding="utf-8")
    assert "The farm jobs" in html
    assert "2 jobs: 1 done, 1 failed" in html
    assert 'href="good.run/report.html"' in html
    assert (FOLDER / "good.run" / "report.html").exists()
    assert good.result["metric"] in html
    assert "bad: It is &lt;broken&gt;." in html
    assert "good: Validation accuracy" in html  # its learning curve
    assert str(work) not in html
