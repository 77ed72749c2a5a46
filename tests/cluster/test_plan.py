"""The check before anything trains: what cannot work is refused."""

from pathlib import Path

import numpy as np
import pytest
from tests.support.farming import FOLDER, Inline, farm, jobs_of, plan_of

import engram
from engram import EngramError


def test_a_job_that_extends_one_that_is_to_come_has_its_backbone(work: Path) -> None:
    defaults = '[defaults]\ndata = "colours.npz"\nregime = "masked"\n'
    plan = plan_of('[jobs.a]\nbackbone = "vit"\n[jobs.b]\nextends = ["a"]\n', defaults=defaults)
    assert [planned.backbone for planned in plan] == ["vit", "vit"]


def test_every_mistake_is_found_before_anything_trains(work: Path) -> None:
    np.savez("few.npz", x=np.zeros((2, 8, 8, 3), np.uint8), y=np.array([0, 1]))
    with pytest.raises(EngramError) as refused:
        plan_of(
            '[jobs.good]\n[jobs.lost]\ndata = "nowhere"\n[jobs.child]\nextends = ["lost"]\n'
            '[jobs.smooth]\nmixup = 0.5\nkind = "segmentation"\n[jobs.twice]\ntask = "good"\n'
            '[jobs.away]\nextends = ["good"]\nbundle = "other"\n'
        )
    said = str(refused.value)
    assert "Job lost: " in said
    assert "nowhere" in said
    assert "Job child: a job that it extends" in said
    assert "Job smooth: " in said
    assert "Job twice: its task good is also that of job good" in said
    assert "Job away: it extends good" in said
    assert not FOLDER.exists()


@pytest.mark.parametrize("setting", ['regime = "auto"', "seeds = 2", "cells = 2"])
def test_a_trained_job_that_has_changed_fails_and_is_left_as_it_is(
    work: Path, setting: str
) -> None:
    text = f"[jobs.a]\n{setting}\n"
    Inline().train(jobs_of(text)[0])
    content = engram.inspect(FOLDER / "a.safetensors").content
    assert "--overwrite" in farm(plan_of(text + "lr = 0.5\n")).complaint
    assert engram.inspect(FOLDER / "a.safetensors").content == content
    assert not farm(plan_of(text + "checkpoint_seconds = 1.0\n")).failed
    assert not farm(plan_of(text + "lr = 0.5\n", overwrite=True)).failed


def test_a_bundle_that_is_there_is_added_to_and_never_spoiled(work: Path) -> None:
    engram.compose(["old.safetensors"], "garden")
    assert plan_of('[jobs.new]\nbundle = "garden"\n')
    with pytest.raises(EngramError, match="garden has a task old"):
        plan_of('[jobs.old]\nbundle = "garden"\n')
    assert plan_of('[jobs.old]\nbundle = "garden"\n', overwrite=True)
    (work / "photos").mkdir()
    (work / "photos" / "cat.png").touch()
    with pytest.raises(EngramError, match="photos is not a bundle"):
        plan_of('[jobs.new]\nbundle = "photos"\n')


def test_a_task_that_does_not_fit_its_bundle_fails_and_fits_another_untrained(work: Path) -> None:
    """It is trained by then, so only the bundle has to be named."""
    text = "[jobs.a]\n[jobs.b]\nimage_size = 8\n"
    (failed,) = farm(plan_of(text)).failed
    assert failed.name == "b"
    again = farm(plan_of(f'{text}bundle = "other"\n'))
    assert [status.result["finished_before"] for status in again.statuses] == [True, True]
