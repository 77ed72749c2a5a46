"""The file of jobs: a table for each, and one of defaults; options have the names of the flags."""

from __future__ import annotations

from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from engram.errors import EngramError
from engram.methods import method_class
from engram.tasks.spec import check_name
from engram.tasks.task_settings import TaskSettings
from engram.train.given import names_file, with_recipe_file
from engram.train.options import DataOptions, RunOptions
from engram.train.recipe import Recipe
from engram.train.run import has_state
from engram.util.flag_names import naming_flags
from engram.util.settings import Given, check_value, setting, settings_fields
from engram.util.text import nearest
from engram.util.toml import read_toml


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

    Their engrams and runs are kept in `folder`; `bundle` is that of jobs that name none. With
    `overwrite`, every job may replace what an earlier one with other settings made. An EngramError
    has a sentence for each mistake, with the job's name.
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
    ordered = list(found)
    try:
        ordered = list(TopologicalSorter({n: j.parents for n, j in found.items()}).static_order())
    except CycleError as error:
        circle = error.args[1]
        problems.append(f"Job {circle[0]}: it extends itself, by way of {', '.join(circle[1:])}.")
    if problems:
        raise EngramError(" ".join(problems))
    return [found[name] for name in ordered]


def _read_options(name: str, said: dict[str, Any]) -> tuple[JobOptions, dict[type, dict[str, Any]]]:
    """The options of a job and its settings by class, those of a recipe file below its own."""
    known = [item.name for one in _SETTINGS for item in settings_fields(one)]
    for key in said:
        if key in _DECIDED:
            raise EngramError(f"{key} cannot be set: {_DECIDED[key]}; leave it out.")
        if key not in known:
            raise EngramError(f"{key} is no option of engram fit; {nearest(key, known)}.")
    rest = {key: tuple(value) if isinstance(value, list) else value for key, value in said.items()}
    given: dict[type, dict[str, Any]] = {}
    with naming_flags(False):
        for one in _SETTINGS:  # `regime` is a job's own, as it may be auto
            known_here = [item for item in settings_fields(one) if item.name in rest]
            given[one] = {item.name: rest.pop(item.name) for item in known_here}
            for item in known_here:
                check_value(item, given[one][item.name])
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
