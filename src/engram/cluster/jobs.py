"""The jobs of a farm: read from their file, checked before any trains, in groups by cache.

The file has a table for each job, and one of defaults; options have the names of the flags.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from engram.backbones.recommended import AUTO
from engram.data.datasets import Splits, check_fits
from engram.errors import EngramError
from engram.methods import method_class
from engram.model import MemoryViT
from engram.store.bundles import is_bundle, read_bundle
from engram.store.engram import BackboneInfo
from engram.store.format import read_engram
from engram.tasks.spec import check_name
from engram.tasks.task_settings import TaskSettings
from engram.train.backbone import backbone_for
from engram.train.feed_plan import FeedPlan
from engram.train.job import TrainingJob
from engram.train.options import DataOptions, RunOptions, names_file, with_recipe_file
from engram.train.recipe import Recipe
from engram.train.run import has_run_of_another, has_state, run_folder
from engram.train.validation import with_held_out
from engram.util.description import Description
from engram.util.flag_names import flag, naming_flags
from engram.util.progress import Progress, silent
from engram.util.settings import Given, check_value, setting, settings_fields
from engram.util.text import counted, nearest, storage, without_folder
from engram.util.toml import read_toml
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
    # `regime` is a job's own, as it may be auto.
    known = {item.name: (one, item) for one in _SETTINGS[::-1] for item in settings_fields(one)}
    given: dict[type, dict[str, Any]] = {one: {} for one in _SETTINGS}
    with naming_flags(False):
        for key, value in said.items():
            if key in _DECIDED:
                raise EngramError(f"{key} cannot be set: {_DECIDED[key]}; leave it out.")
            if key not in known:
                raise EngramError(f"{key} is no option of engram fit; {nearest(key, list(known))}.")
            settings_class, item = known[key]
            given[settings_class][key] = tuple(value) if isinstance(value, list) else value
            check_value(item, given[settings_class][key])
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


# The plan


@dataclass(frozen=True, kw_only=True)
class PlannedJob(FarmJob):
    """A job that was checked, the group it belongs to, and the cache that it trains from."""

    data: str
    backbone: str  # its source
    backbone_key: str  # the same for jobs whose tasks can share a pass
    regime: str
    images: int  # to train on
    alone: bool  # whether its regime changes the backbone, so that it shares no pass
    cache: str = ""  # the same for jobs that share one; "" without a cache
    cache_bytes: int = 0

    @property
    def group(self) -> str:
        """A key that jobs on the same data and backbone share."""
        return f"{self.data} {self.backbone_key}"

    def to_dict(self) -> dict[str, Any]:
        job = {"job": self.name, "task": self.task, "parents": list(self.parents)}
        where = {"data": self.data, "bundle": str(self.bundle), "cache": bool(self.cache)}
        return {**job, **where, "regime": self.regime, "images": self.images}


def make_plan(
    jobs: Sequence[FarmJob], announce: Callable[[str], object], progress: Progress = silent
) -> list[PlannedJob]:
    """Check that every job can train, with its data and its backbone, and put the jobs in order.

    They start group by group, parents first. Every mistake is a sentence of the EngramError.
    """
    planned, problems, planner = dict[str, PlannedJob](), list[str](), _Planner(announce)
    for done, job in enumerate(jobs):
        progress("checking the jobs", done, len(jobs))
        try:
            others = list(planned.values())
            planned[job.name] = planner.plan(job, planned)
            _check_shares(planned[job.name], others)
        except EngramError as error:
            problems.append(f"Job {job.name}: {error}")
    progress("checking the jobs", len(jobs), len(jobs))
    if problems:
        raise EngramError(" ".join(problems))
    groups = list(dict.fromkeys(one.group for one in planned.values()))
    ranks: dict[str, int] = {}
    for name, one in planned.items():  # children stay behind their parents
        ranks[name] = max([groups.index(one.group), *(ranks[name] for name in one.parents)])
    return sorted(planned.values(), key=lambda one: ranks[one.name])


class _Planner:
    """Plans job after job; data and backbone are kept, as the next one often needs the same."""

    def __init__(self, announce: Callable[[str], object]) -> None:
        self._announce, self._read = announce, lru_cache(1)(DataOptions.load)
        self._kept: dict[tuple[Any, ...], tuple[ViT, str]] = {}

    def _backbone(self, backbone: str, splits: Splits, **others: Any) -> tuple[ViT, str]:
        auto = backbone == AUTO  # it depends on the data, on parents, or on a run
        if auto and (others["parents"] or others["resumed"]):
            return backbone_for(backbone, splits, **others)
        key = (backbone, others["image_size"], others["dtype"], splits.name if auto else "")
        if key not in self._kept:
            self._kept = {key: backbone_for(backbone, splits, **others)}
        return self._kept[key]

    def plan(self, job: FarmJob, planned: dict[str, PlannedJob]) -> PlannedJob:
        """Check a job as its training would; its parents are among those that are planned."""
        if any(name not in planned for name in job.parents):
            raise EngramError("a job that it extends cannot be trained.")
        given = job.settings()
        coming = [planned[name] for name in job.parents if not planned[name].out.exists()]
        if coming:  # their engrams are not there yet, but their backbone is known
            paths = {str(planned[name].out) for name in job.parents}
            given = job.settings(extends=tuple(t for t in job.extends if t not in paths))
            if given[RunOptions].get("backbone", AUTO) == AUTO:
                given[RunOptions]["backbone"] = coming[0].backbone
        work = TrainingJob.start(
            *(job.options.data, job.out, given, silent, self._announce),
            read=self._read, find_backbone=self._backbone,
        )  # fmt: skip
        regime, seeds = work.choose(job.options.regime, job.options.seeds)
        resumes = has_state(job.out) and not coming and not work.options.overwrite
        if resumes and has_run_of_another(job.out, work.identity(job.task, regime, seeds)):
            raise EngramError(
                f"its earlier run in {run_folder(job.out)} had other settings, data or backbone; "
                "undo that, give it another name, or train it anew with "
                f"{flag('overwrite', True)}."
            )
        _check_bundle(job, work.model)
        specs, recipe, model = work.specs(job.task, regime), work.recipe, work.model
        splits = with_held_out(work.splits, recipe, cross=False)
        for spec in specs:
            check_fits(spec, splits, same_ignore=True)
            recipe.check_for(spec.kind_object)
        if work.options.test:
            splits["test"]  # whether there is one should show now
        cache = FeedPlan(model, specs, splits, recipe)
        kind = f"{cache.keeps} {cache.augment}"
        if cache.augment != "none":
            kind += f" {recipe.views} {recipe.min_area} {recipe.data_seed}"
        key = f"{model.backbone.fingerprint} {model.preprocessing.to_dict()}"
        data = job.options.data
        data = os.path.normpath(data) if Path(data).exists() else data
        off = recipe.cache == "off" or cache.reason_against() or cache.too_large()
        return PlannedJob(
            **vars(job), data=data, backbone=model.backbone.source, backbone_key=key,
            regime=regime, images=len(splits["train"]),
            alone=not all(spec.method.shares_pass for spec in specs),
            cache="" if off else f"{data} {key} {kind}", cache_bytes=0 if off else cache.bytes,
        )  # fmt: skip


def _check_shares(new: PlannedJob, others: Sequence[PlannedJob]) -> None:
    """Refuse a task that could not share a pass with the others of its bundle."""
    for other in others:
        name, why = other.name, ""
        if other.bundle != new.bundle:
            if name in new.parents:
                other_bundle = f"which goes into another bundle than {new.bundle}"
                raise EngramError(f"it extends {name}, {other_bundle}; give both one.")
        elif other.task == new.task:
            why = f"its task {new.task} is also that of job {name}"
        elif other.backbone_key != new.backbone_key:
            backbones = f"its backbone is {new.backbone}, and that of {name} {other.backbone}"
            why = f"{backbones}, with other weights or another image size"
        elif new.alone or other.alone:
            regime = new.regime if new.alone else other.regime
            why = f"the regime {regime} changes the backbone's own tokens, and {name} cannot share"
        if why:
            raise EngramError(f"{why}; both go into {new.bundle}: give one of them another bundle.")


def _check_bundle(job: FarmJob, model: MemoryViT) -> None:
    """Refuse a bundle of another backbone, and to replace a task that the farm did not make."""
    folder = job.bundle
    if not is_bundle(folder):
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise EngramError(f"its bundle {folder} exists and is no bundle; choose another path.")
        return
    there = {engram.spec.name: engram for engram in read_bundle(folder).engrams}
    try:
        next(iter(there.values())).check_backbone(
            BackboneInfo.from_backbone(model.backbone), model.preprocessing
        )
    except EngramError as error:
        raise EngramError(f"its bundle {folder} is for another backbone. {error}") from None
    if job.task not in there or job.given[RunOptions].get("overwrite"):
        return
    if not job.out.exists() or read_engram(job.out).content != there[job.task].content:
        raise EngramError(
            f"the bundle {folder} has a task {job.task} that this job did not train; choose "
            "another task or bundle, or replace it with overwrite."
        )


def describe_plan(jobs: Sequence[PlannedJob]) -> Description:
    """Describe the groups with their caches, and all jobs."""
    table, documents = list[tuple[str, ...]](), list[dict[str, Any]]()
    for number, group in enumerate(dict.fromkeys(one.group for one in jobs), 1):
        members = [one for one in jobs if one.group == group]
        data, backbone = members[0].data, members[0].backbone
        caches = {one.cache: one.cache_bytes for one in members if one.cache}
        for one in members:
            cache = "none"
            if one.cache:
                place = list(caches).index(one.cache) + 1
                cache = f"{number}.{place}: {storage(one.cache_bytes)}"
            where = (str(number), data, without_folder(backbone), one.name, one.task)
            table.append((*where, one.regime, f"{one.images:,}", cache, str(one.bundle)))
        shared = {"data": data, "backbone": backbone, "caches": len(caches)}
        own = [one.to_dict() for one in members]
        documents.append({**shared, "cache_bytes": sum(caches.values()), "jobs": own})
    total = storage(sum(document["cache_bytes"] for document in documents))
    rows = [("jobs", f"{len(jobs)} in {counted(len(documents), 'group')}"), ("caches", total)]
    columns = ("group", "data", "backbone", "job", "task", "regime", "images", "cache", "bundle")
    return Description({"groups": documents}, rows, columns, tuple(table))
