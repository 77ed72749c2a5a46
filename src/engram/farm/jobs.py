"""The file of jobs: a table for each, and one of defaults; options have the names of the flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from engram.errors import EngramError
from engram.tasks.settings import TaskSettings
from engram.tasks.spec import NAME
from engram.train.given import names_file, with_recipe_file
from engram.train.options import DataOptions, RunOptions
from engram.train.recipe import Recipe
from engram.util.settings import Given, check
from engram.util.spelling import spelled_as_flags
from engram.util.text import nearest
from engram.util.toml import read_toml

SETTINGS = (DataOptions, TaskSettings, Recipe, RunOptions)
_OWN = ("data", "task", "bundle", "regime", "seeds")
_DECIDED = {"out": "the farm decides where engrams are", "resume": "the farm always resumes"}


@dataclass(frozen=True)
class FarmJob:
    """One task to train."""

    name: str
    task: str
    data: str
    bundle: Path
    out: Path  # the engram, in the farm's folder
    given: Given
    regime: str | None = None
    seeds: int | None = None
    parents: tuple[str, ...] = ()  # jobs whose tasks it extends

    @property
    def extends(self) -> tuple[str, ...]:
        """The engrams that it extends, as `--extends` takes them."""
        return tuple(self.given[TaskSettings].get("extends", ()))

    def but(self, settings_class: type, **changes: Any) -> FarmJob:
        """The same with other settings of a class."""
        changed = {**self.given[settings_class], **changes}
        return replace(self, given={**self.given, settings_class: changed})


class Problems:
    """What is wrong with jobs, a sentence each, so that a user hears of all of it at once."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def add(self, job: str, sentence: object) -> None:
        self.sentences.append(f"Job {job}: {sentence}")

    def refuse(self) -> None:
        """An EngramError if there are any."""
        if self.sentences:
            raise EngramError(" ".join(self.sentences))


def read_jobs(path: Path, folder: Path, bundle: Path, overwrite: bool = False) -> list[FarmJob]:
    """The jobs of a file, parents before those that extend them.

    Args:
        path: The TOML file.
        folder: Where the jobs' engrams and runs are kept.
        bundle: The bundle of jobs that name none.
        overwrite: Whether every job may replace what an earlier one with other settings made.

    Raises:
        EngramError: What is wrong, a sentence for each mistake, with the job's name.
    """
    tables = read_toml(path)
    defaults, jobs = tables.pop("defaults", {}), tables.pop("jobs", {})
    if tables:
        other = next(iter(tables))
        raise EngramError(
            f"{path} has {other!r} outside of [defaults] and [jobs.NAME]; put shared options under "
            "[defaults], and every job into a table such as [jobs.flowers]."
        )
    tabled = isinstance(jobs, dict) and all(isinstance(job, dict) for job in jobs.values())
    if not jobs or not tabled or not isinstance(defaults, dict):
        raise EngramError(
            f"{path} has no jobs; give each a table, such as [jobs.flowers] with the line "
            'data = "photos/flowers".'
        )
    problems, found = Problems(), []
    for name, table in jobs.items():
        try:
            found.append(_job(name, {**defaults, **table}, folder, bundle, overwrite))
        except EngramError as error:
            problems.add(name, error)
    found = _related(found, problems)
    _refuse_same_task(found, problems)
    problems.refuse()
    return found


def _job(
    name: str, table: Mapping[str, Any], folder: Path, bundle: Path, overwrite: bool
) -> FarmJob:
    said = {key.replace("-", "_"): value for key, value in table.items()}
    known = [*_OWN, *(item.name for one in SETTINGS for item in fields(one))]
    for key in said:
        if key in _DECIDED:
            raise EngramError(f"{key} cannot be set: {_DECIDED[key]}; leave it out.")
        if key not in known:
            raise EngramError(f"{key} is no option of engram fit; {nearest(key, known)}.")
    task = said.get("task", name)
    for what, text in (("its name", name), ("task", task)):
        if not isinstance(text, str) or not NAME.fullmatch(text):
            raise EngramError(
                f"{what} is {text!r}; use up to 64 lower-case letters, digits, '.', '_' and '-', "
                "beginning with a letter or a digit."
            )
    if not isinstance(data := said.get("data"), str) or not data:
        raise EngramError('it has no data; add a line such as data = "photos/flowers".')
    if not isinstance(into := said.get("bundle", str(bundle)), str) or not into:
        raise EngramError(f"bundle is {into!r}; it must be the path of a folder.")
    given, own = _given(said)
    if overwrite:
        given[RunOptions]["overwrite"] = True
    given[RunOptions]["resume"] = True
    out = folder / f"{name}.safetensors"
    return FarmJob(name, task, data, Path(into), out, given, own["regime"], own["seeds"])


def _given(said: Mapping[str, Any]) -> tuple[dict[type, dict[str, Any]], dict[str, Any]]:
    """The settings by class with those of a recipe file below them, and regime and seeds."""
    own = {key: said.get(key) for key in ("regime", "seeds")}
    flags: dict[type, dict[str, Any]] = {}
    for one in SETTINGS:
        names = [item.name for item in fields(one) if item.name in said and item.name not in own]
        flags[one] = {name: _tuple(said[name]) for name in names}
        with spelled_as_flags(False):
            check(one(**flags[one]))
    given, chosen = with_recipe_file(flags, **own)
    regime, seeds = chosen["regime"], chosen["seeds"]
    with spelled_as_flags(False):
        check(TaskSettings(regime="masked" if regime in (None, "auto") else regime))
    if seeds is not None and (not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1):
        raise EngramError(f"seeds is {seeds!r}; it must be a whole number, at least 1.")
    merged = {one: dict(values) for one, values in given.items()}
    if names_file(merged[RunOptions].get("recipe", "default")):
        del merged[RunOptions]["recipe"]  # what it says is among the settings now
    return merged, chosen


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _related(jobs: Sequence[FarmJob], problems: Problems) -> list[FarmJob]:
    """The jobs with their parents among them, parents first.

    An entry of `extends` that is the name of a job, and no file, means the task of that job.
    """
    by_name = {job.name: job for job in jobs}
    related = {}
    for job in jobs:
        parents = [text for text in job.extends if text in by_name and not Path(text).exists()]
        paths = [str(by_name[t].out) if t in parents else t for t in job.extends]
        if paths:
            job = job.but(TaskSettings, extends=tuple(paths))
        for parent in parents:
            if by_name[parent].bundle != job.bundle:
                problems.add(
                    job.name,
                    f"it extends {parent}, which goes into the bundle {by_name[parent].bundle}, "
                    f"but itself into {job.bundle}; give both the same bundle.",
                )
        related[job.name] = replace(job, parents=tuple(parents))
    ordered: dict[str, FarmJob] = {}
    while len(ordered) < len(related):
        ready = [
            job
            for name, job in related.items()
            if name not in ordered and all(parent in ordered for parent in job.parents)
        ]
        if not ready:
            stuck = [name for name in related if name not in ordered]
            problems.add(stuck[0], f"it extends itself, by way of {', '.join(stuck)}.")
            break
        ordered.update((job.name, job) for job in ready)
    return list(ordered.values())


def _refuse_same_task(jobs: Sequence[FarmJob], problems: Problems) -> None:
    first: dict[tuple[Path, str], str] = {}
    for job in jobs:
        other = first.setdefault((job.bundle, job.task), job.name)
        if other != job.name:
            problems.add(
                job.name,
                f"its task {job.task} is also that of job {other}, for the same bundle "
                f"{job.bundle}; give one of them another task, or another bundle.",
            )
