"""The file of jobs: what it says becomes settings, and every mistake in it is a sentence."""

from pathlib import Path

import pytest
from tests.support.farming import FOLDER, jobs_of

from engram import EngramError
from engram.farm.jobs import Problems
from engram.tasks.settings import TaskSettings
from engram.train.options import DataOptions, RunOptions
from engram.train.recipe import Recipe


def test_a_job_has_the_defaults_and_its_own_options(work: Path) -> None:
    first, second = jobs_of(
        '[jobs.first]\ncells = 2\nweight-decay = 0\n[jobs.second]\ntask = "other"\n'
        'regime = "side"\nbundle = "mine"\nsteps = 3\nlabel = "breed"\n'
    )
    assert (first.name, first.task, first.data) == ("first", "first", "colours.npz")
    assert first.out == FOLDER / "first.safetensors"
    assert (first.bundle, second.bundle) == (FOLDER / "bundle", Path("mine"))
    assert first.given[TaskSettings] == {"cells": 2}
    assert first.given[Recipe] == {
        "steps": 6,
        "batch": 16,
        "workers": 0,
        "evaluations": 1,
        "weight_decay": 0,
    }
    assert first.given[RunOptions] == {"backbone": "vit", "resume": True}
    assert (first.regime, second.regime, second.task) == ("masked", "side", "other")
    assert second.given[Recipe]["steps"] == 3
    assert second.given[DataOptions] == {"label": "breed"}


def test_a_recipe_file_is_below_the_options_of_a_job(work: Path) -> None:
    Path("mine.toml").write_text('lr = 0.5\ncells = 4\nseed = 3\nregime = "side"\n')
    (job,) = jobs_of(
        '[jobs.a]\nrecipe = "mine.toml"\nseed = 9\n', defaults='[defaults]\ndata="d"\n'
    )
    assert (job.given[Recipe]["lr"], job.given[Recipe]["seed"]) == (0.5, 9)
    assert (job.given[TaskSettings]["cells"], job.regime) == (4, "side")


def test_a_job_may_extend_another_which_then_comes_first(work: Path) -> None:
    parent, child = jobs_of(
        '[jobs.child]\nextends = ["parent", "old.safetensors"]\n[jobs.parent]\n'
    )
    assert (parent.name, child.name) == ("parent", "child")
    assert child.parents == ("parent",)
    assert child.extends == (str(parent.out), "old.safetensors")


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", ["jobs.toml has no jobs; give each a table, such as [jobs.flowers]"]),
        ("[job.a]\n", ["jobs.toml has 'job' outside of [defaults] and [jobs.NAME]"]),
        (
            "[jobs.a]\nepoch = 3\n",
            ["Job a: epoch is no option of engram fit; the nearest is epochs"],
        ),
        ("[jobs.a]\nresume = true\n", ["Job a: resume cannot be set: the farm always resumes"]),
        ("[jobs.a]\ndata = 3\n", ["Job a: it has no data; add a line such as data ="]),
        ("[jobs.a]\nbundle = 3\n", ["Job a: bundle is 3; it must be the path of a folder"]),
        ("[jobs.A]\n", ["Job A: its name is 'A'; use up to 64 lower-case letters"]),
        ("[jobs.a]\nseeds = 0\n", ["Job a: seeds is 0; it must be a whole number, at least 1"]),
        ('[jobs.a]\nregime = "no"\n', ["Job a: regime is 'no'; it can be masked, "]),
        ('[jobs.a]\ncells = "x"\n', ["Job a: cells is 'x'; it must be a whole number"]),
        ('[jobs.a]\nextends = ["b"]\n[jobs.b]\nextends = ["a"]\n', ["Job a: it extends itself"]),
        (
            '[jobs.a]\n[jobs.b]\nextends = ["a"]\nbundle = "other"\n',
            ["Job b: it extends a, which goes into the bundle jobs.farm/bundle"],
        ),
        (
            '[jobs.a]\n[jobs.b]\ntask = "a"\n[jobs.c]\nlr = "fast"\n',
            ["Job b: its task a is also that of job a, for the same bundle", "Job c: lr is 'fast'"],
        ),
    ],
)
def test_mistakes_are_sentences_with_the_name_of_the_job(
    text: str, sentences: list[str], work: Path
) -> None:
    with pytest.raises(EngramError) as refused:
        jobs_of(text)
    assert all(sentence in str(refused.value) for sentence in sentences), refused.value


def test_no_problems_are_no_error() -> None:
    Problems().refuse()
