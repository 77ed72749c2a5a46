"""The plan: jobs on the same data and backbone share a cache, and what cannot work is refused."""

from pathlib import Path

import numpy as np
import pytest
from tests.support.farming import FOLDER, Inline, jobs_of, plan_of

import engram
from engram import EngramError
from engram.cluster.jobs import describe_plan


def test_jobs_are_grouped_by_data_and_backbone_and_share_caches(work: Path) -> None:
    (work / "more.npz").write_bytes(Path("colours.npz").read_bytes())
    plan = plan_of(
        '[jobs.a]\n[jobs.b]\ndata = "more.npz"\n[jobs.c]\ncells = 1\n[jobs.d]\nregime = "readout"\n'
        '[jobs.e]\ncache = "off"\n[jobs.f]\ndata = "./more.npz"\nseed = 4\n'
    )
    assert [planned.name for planned in plan] == ["a", "c", "d", "e", "b", "f"]
    by_name = {planned.name: planned for planned in plan}
    assert by_name["a"].cache == by_name["c"].cache != ""
    assert by_name["b"].cache == by_name["f"].cache
    caches = {by_name[name].cache for name in "abde"}
    assert "" in caches  # of e, without one
    assert len(caches) == 4
    shown = describe_plan(plan)
    assert shown.rows[0] == ("jobs", "6 in 2 groups")
    assert [group["caches"] for group in shown.document["groups"]] == [2, 1]
    assert [row[0] for row in shown.table] == ["1", "1", "1", "1", "2", "2"]


def test_a_job_that_extends_one_that_is_to_come_has_its_backbone(work: Path) -> None:
    defaults = '[defaults]\ndata = "colours.npz"\nregime = "masked"\n'
    plan = plan_of('[jobs.a]\nbackbone = "vit"\n[jobs.b]\nextends = ["a"]\n', defaults=defaults)
    assert [planned.backbone for planned in plan] == ["vit", "vit"]


def test_every_mistake_is_found_before_anything_trains(work: Path) -> None:
    np.savez("few.npz", x=np.zeros((2, 8, 8, 3), np.uint8), y=np.array([0, 1]))
    with pytest.raises(EngramError) as refused:
        plan_of(
            '[jobs.good]\n[jobs.lost]\ndata = "nowhere"\n[jobs.child]\nextends = ["lost"]\n'
            '[jobs.all]\nregime = "full"\n[jobs.size]\nimage_size = 8\n'
            '[jobs.smooth]\nmixup = 0.5\nkind = "segmentation"\n[jobs.twice]\ntask = "good"\n'
            '[jobs.away]\nextends = ["good"]\nbundle = "other"\n'
        )
    said = str(refused.value)
    assert "Job lost: " in said
    assert "nowhere" in said
    assert "Job child: a job that it extends" in said
    assert "Job all: the regime full" in said
    assert "Job size: its backbone is vit" in said
    assert "Job smooth: " in said
    assert "Job twice: its task good is also that of job good" in said
    assert "Job away: it extends good" in said
    assert not FOLDER.exists()


@pytest.mark.parametrize("setting", ['regime = "auto"', "seeds = 2", "cells = 2"])
def test_a_job_that_is_trained_is_refused_only_if_it_has_changed(work: Path, setting: str) -> None:
    text = f"[jobs.a]\n{setting}\n"
    assert Inline().train(jobs_of(text)[0]).state == "done"
    assert plan_of(text + "lr = 0.5\n", overwrite=True)
    assert plan_of(text + "checkpoint_seconds = 1.0\n")
    with pytest.raises(EngramError, match=r"^Job a: its earlier run in jobs\.farm/a\.run"):
        plan_of(text + "lr = 0.5\n")


def test_a_bundle_that_is_there_is_added_to_and_never_spoiled(work: Path) -> None:
    engram.compose(["old.safetensors"], "garden")
    assert plan_of('[jobs.new]\nbundle = "garden"\n')
    with pytest.raises(EngramError, match="garden has a task old"):
        plan_of('[jobs.old]\nbundle = "garden"\n')
    assert plan_of('[jobs.old]\nbundle = "garden"\n', overwrite=True)
    with pytest.raises(EngramError, match="garden is for another backbone"):
        plan_of('[jobs.new]\nbundle = "garden"\nimage_size = 8\n')
    (work / "photos").mkdir()
    (work / "photos" / "cat.png").touch()
    with pytest.raises(EngramError, match="photos exists and is no bundle"):
        plan_of('[jobs.new]\nbundle = "photos"\n')
