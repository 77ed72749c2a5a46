"""The file of jobs: what it says becomes settings, and every mistake in it is a sentence."""

from pathlib import Path

import pytest
from tests.support.farming import FOLDER, jobs_of

from engram import EngramError
from engram.tasks.task_settings import TaskSettings
from engram.train.options import DataOptions, RunOptions
from engram.train.recipe import Recipe


def test_a_job_has_the_defaults_and_its_own_options(work: Path) -> None:
    first, second = jobs_of(
        '[jobs.first]\ncells = 2\nweight-decay = 0\n[jobs.second]\ntask = "other"\n'
        'regime = "side"\nbundle = "mine"\nsteps = 3\nlabel = "breed"\n'
    )
    assert (first.name, first.task, first.options.data) == ("first", "first", "colours.npz")
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
    assert first.given[RunOptions] == {"backbone": "vit"}
    assert (first.options.regime, second.options.regime, second.task) == ("masked", "side", "other")
    assert second.given[Recipe]["steps"] == 3
    assert second.given[DataOptions] == {"label": "breed"}


def test_a_recipe_file_is_below_the_options_of_a_job(work: Path) -> None:
    Path("mine.toml").write_text('lr = 0.5\ncells = 4\nseed = 3\nregime = "side"\n')
    (job,) = jobs_of(
        '[jobs.a]\nrecipe = "mine.toml"\nseed = 9\n', defaults='[defaults]\ndata="d"\n'
    )
    assert (job.given[Recipe]["lr"], job.given[Recipe]["seed"]) == (0.5, 9)
    assert (job.given[TaskSettings]["cells"], job.options.regime) == (4, "side")


def test_a_job_may_extend_another_which_then_comes_first(work: Path) -> None:
    parent, child = jobs_of(
        '[jobs.child]\nextends = ["parent", "old.safetensors"]\n[jobs.parent]\n'
    )
    assert (parent.name, child.name) == ("parent", "child")
    assert child.parents == ("parent",)
    assert child.extends == (str(parent.out), "old.safetensors")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["has no jobs"]),
        ("[job.a]\n", ["'job' outside of [defaults]"]),
        ("[jobs.a]\nepoch = 3\n", ["Job a: epoch", "epochs"]),
        ("[jobs.a]\nresume = true\n", ["Job a: resume cannot be set"]),
        ("[jobs.a]\ndata = 3\n", ["Job a: data is 3"]),
        ('[jobs.a]\ndata = ""\n', ["Job a: it has no data"]),
        ("[jobs.a]\nbundle = 3\n", ["Job a: bundle is 3"]),
        ("[jobs.A]\n", ["Job A: 'A' cannot name a task"]),
        ("[jobs.a]\nseeds = 0\n", ["Job a: seeds is 0", "at least 1"]),
        ('[jobs.a]\nregime = "no"\n', ["Job a: ", "no regime 'no'", "masked"]),
        ('[jobs.a]\ncells = "x"\n', ["Job a: cells is 'x'"]),
        ('[jobs.a]\nextends = ["b"]\n[jobs.b]\nextends = ["a"]\n', ["it extends itself"]),
        (
            '[jobs.a]\n[jobs.b]\ncells = "x"\n[jobs.c]\nlr = "fast"\n',
            ["Job b: cells is 'x'", "Job c: lr is 'fast'"],
        ),
    ],
)
def test_mistakes_are_sentences_with_the_name_of_the_job(
    text: str, words: list[str], work: Path
) -> None:
    with pytest.raises(EngramError) as refused:
        jobs_of(text)
    assert all(word in str(refused.value) for word in words), refused.value
