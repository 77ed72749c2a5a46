"""The jobs of a farm: read from their file, and checked before any trains.

The file has a table for each job, and one of defaults; options have the names of the flags.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from engram.backbones.recommended import AUTO
from engram.data.datasets import Splits, check_fits
from engram.errors import EngramError, naming_flags
from engram.methods import method_class
from engram.store.bundles import is_bundle, read_bundle
from engram.store.format import read_engram
from engram.tasks.spec import check_name
from engram.tasks.task_settings import TaskSettings
from engram.train.backbone import backbone_for
from engram.train.job import Sources, TrainingJob
from engram.train.loop.validation import with_held_out
from engram.train.options import (
    DataOptions,
    RunOptions,
    names_file,
    settings_from,
    with_recipe_file,
)
from engram.train.recipe import Recipe
from engram.train.runs.run import has_state
from engram.util.documents import read_toml
from engram.util.files import check_replaceable
from engram.util.progress import Progress, silent
from engram.util.settings import Given, setting, settings_fields
from engram.util.text import nearest
from engram.vit import ViT


@dataclass(frozen=True)
class JobOptions:
    """Options of a job besides the settings of a training."""

    data: str = setting("", "the data, as engram fit takes it")
    task: str = setting("", "name of the task, if it is not that of the job")
    bundle: str = setting("", "bundle of the task, if it is not that of the farm")
    regime: str | None = setting(None, "as --regime of engram fit", kind=str)
    seeds: int | None = setting(None, "as --seeds of engram fit", least=1)


_SETTINGS = (JobOptions, DataOptions, TaskSettings, Recipe, RunOptions)
_DECIDED = {"out": "the farm decides where engrams are", "resume": "the farm always resumes"}


@dataclass(frozen=True)
class FarmJob:
    """One task to train."""

    name: str
    options: JobOptions
    folder: Path  # of its engram and its run
    bundle: Path
    given: Given
    parents: tuple[str, ...] = ()  # jobs whose tasks it extends
    backbone: str = ""  # this and the next are known once it is checked
    regime: str = ""
    images: int = 0  # to train on

    @property
    def task(self) -> str:
        return self.options.task or self.name

    @property
    def out(self) -> Path:
        """Its engram."""
        return self.folder / f"{self.name}.safetensors"

    @property
    def extends(self) -> tuple[str, ...]:
        """The engrams that it extends, as `--extends` takes them; those of jobs are files here."""
        listed = self.given[TaskSettings].get("extends", ())
        here = {name: str(self.folder / f"{name}.safetensors") for name in self.parents}
        return tuple(here.get(text, text) for text in listed)

    def settings(self, **task: Any) -> Given:
        """The settings of `engram fit --resume`, with other settings of the task."""
        run = {**self.given[RunOptions], "resume": has_state(self.out)}
        task = {**self.given[TaskSettings], "extends": self.extends, **task}
        return {**self.given, RunOptions: run, TaskSettings: task}


def read_jobs(path: Path, folder: Path, bundle: Path, overwrite: bool = False) -> list[FarmJob]:
    """Read a TOML file of jobs, parents before those that extend them.

    `folder` is for their engrams and runs, `bundle` that of jobs that name none. With `overwrite`,
    a job may replace what an earlier one with other settings made.
    """
    tables = read_toml(path)
    defaults, jobs = tables.pop("defaults", {}), tables.pop("jobs", {})
    if tables:
        raise EngramError(
            f"{path} has {next(iter(tables))!r} outside of [defaults] and [jobs.NAME]; put shared "
            "options under [defaults], and every job into a table such as [jobs.flowers]."
        )
    tabled = isinstance(jobs, dict) and all(isinstance(job, dict) for job in jobs.values())
    if not jobs or not tabled or not isinstance(defaults, dict):
        raise EngramError(
            f"{path} has no jobs; give each a table, such as [jobs.flowers] with the line "
            'data = "photos/flowers".'
        )
    found, problems = dict[str, FarmJob](), list[str]()
    for name, table in jobs.items():
        try:
            said = {key.replace("-", "_"): value for key, value in {**defaults, **table}.items()}
            options, given = _read_options(name, said)
        except EngramError as error:
            problems.append(f"Job {name}: {error}")
            continue
        given[RunOptions] |= {"overwrite": True} if overwrite else {}
        found[name] = FarmJob(name, options, folder, Path(options.bundle or bundle), given)
    for name, job in found.items():
        parents = [text for text in job.extends if text in found and not Path(text).exists()]
        found[name] = replace(job, parents=tuple(parents))
    order = TopologicalSorter({name: job.parents for name, job in found.items()})
    try:
        ordered = [found[name] for name in order.static_order()]
    except CycleError as error:
        circle = error.args[1]
        problems.append(f"Job {circle[0]}: it extends itself, by way of {', '.join(circle[1:])}.")
    if problems:
        raise EngramError(" ".join(problems))
    return ordered


def _read_options(name: str, said: dict[str, Any]) -> tuple[JobOptions, dict[type, dict[str, Any]]]:
    """The options of a job and its settings by class, those of a recipe file below its own."""
    for key in _DECIDED.keys() & said.keys():
        raise EngramError(f"{key} cannot be set: {_DECIDED[key]}; leave it out.")
    with naming_flags(False):  # `regime` is a job's own, as it may be auto
        given: dict[type, dict[str, Any]] = {one: settings_from(said, one) for one in _SETTINGS}
        known = [item.name for one in _SETTINGS for item in settings_fields(one)]
        for key in said:
            raise EngramError(f"{key} is no option of engram fit; {nearest(key, known)}.")
        own = JobOptions(**given.pop(JobOptions))
        merged, chosen = with_recipe_file(given, regime=own.regime, seeds=own.seeds)
        if chosen["regime"] not in (None, "auto"):
            method_class(chosen["regime"])  # an unknown one is refused
    check_name(name)  # of its file
    check_name(own.task or name)
    if not own.data:
        raise EngramError('it has no data; add a line such as data = "photos/flowers".')
    settings = {one: dict(values) for one, values in merged.items()}
    if names_file(settings[RunOptions].get("recipe", "default")):
        del settings[RunOptions]["recipe"]  # what it says is among the settings now
    return replace(own, **chosen), settings


# The check


def check_jobs(
    jobs: Sequence[FarmJob], announce: Callable[[str], object], progress: Progress = silent
) -> list[FarmJob]:
    """Check that every job can train; every mistake is a sentence of the EngramError."""
    checked, problems, check = dict[str, FarmJob](), list[str](), _Check(announce)
    for done, job in enumerate(jobs):
        progress("checking the jobs", done, len(jobs))
        try:
            _check_bundle(job, jobs)
            checked[job.name] = check(job, checked)
        except EngramError as error:
            problems.append(f"Job {job.name}: {error}")
    if problems:
        raise EngramError(" ".join(problems))
    return list(checked.values())


class _Check:
    """Checks job after job; data and backbone are kept, as the next one often needs the same."""

    def __init__(self, announce: Callable[[str], object]) -> None:
        self._announce, self._read = announce, lru_cache(1)(DataOptions.load)
        self._kept: dict[tuple[Any, ...], tuple[ViT, str]] = {}

    def _backbone(self, options: RunOptions, splits: Splits, **others: Any) -> tuple[ViT, str]:
        resumed = others["out"] if options.resume else None
        found = str(others["parents"]), resumed, splits.name  # what `auto` depends on
        given = options.backbone, options.image_size, options.backbone_dtype
        key = (*given, options.backbone == AUTO and found)
        if key not in self._kept:
            self._kept = {key: backbone_for(options, splits, **others)}
        return self._kept[key]

    def __call__(self, job: FarmJob, checked: dict[str, FarmJob]) -> FarmJob:
        """Check a job as its training would; its parents are among those that are checked."""
        if any(name not in checked for name in job.parents):
            raise EngramError("a job that it extends cannot be trained.")
        parents = {str(checked[name].out) for name in job.parents}  # which may be yet to come
        given = job.settings(extends=tuple(text for text in job.extends if text not in parents))
        if job.parents and given[RunOptions].get("backbone", AUTO) == AUTO:
            given[RunOptions]["backbone"] = checked[job.parents[0]].backbone
        where, sources = (job.options.data, job.out), Sources(self._read, self._backbone)
        work = TrainingJob.start(*where, given, silent, self._announce, sources)
        regime, _ = work.choose(job.options.regime, job.options.seeds)
        splits = with_held_out(work.splits, work.recipe, cross=False, test=work.options.test)
        for spec in work.specs(job.task, regime):
            check_fits(spec, splits, same_ignore=True)
            work.recipe.check_for(spec.kind_object)
        images, backbone = len(splits["train"]), work.model.backbone.source
        return replace(job, backbone=backbone, regime=regime, images=images)


def _check_bundle(job: FarmJob, others: Sequence[FarmJob]) -> None:
    """Refuse to replace a task that the farm did not train, or that another job trains."""
    for other in others:
        if other.bundle == job.bundle and other.task == job.task and other is not job:
            raise EngramError(
                f"its task {job.task} is also that of job {other.name}, and both go into "
                f"{job.bundle}; give one of them another task or bundle."
            )
        if other.name in job.parents and other.bundle != job.bundle:
            raise EngramError(f"it extends {other.name}, of another bundle; give both one.")
    if not is_bundle(job.bundle):
        check_replaceable(job.bundle, "bundle")
        return
    there = {engram.spec.name: engram for engram in read_bundle(job.bundle).engrams}
    if job.task not in there or job.given[RunOptions].get("overwrite"):
        return
    if not job.out.exists() or read_engram(job.out).content != there[job.task].content:
        raise EngramError(
            f"the bundle {job.bundle} has a task {job.task} that this job did not train; choose "
            "another task or bundle, or replace it with overwrite."
        )
