"""What a farm will do: its jobs checked before any trains, in groups that share a cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engram.data.datasets import Splits
from engram.data.fits import check_fits
from engram.errors import EngramError
from engram.farm.jobs import FarmJob, Problems
from engram.store.bundles import is_bundle, read_bundle
from engram.store.format import read_engram
from engram.tasks.settings import TaskSettings
from engram.train.cache_plan import CachePlan
from engram.train.job import TrainingJob
from engram.train.options import DataOptions, RunOptions
from engram.train.run import has_run_of_another, has_state, run_folder
from engram.train.trunk import trunk_for
from engram.util.description import Description
from engram.util.progress import Progress, silent
from engram.util.spelling import spell
from engram.util.text import counted, storage, without_folder
from engram.vit import ViT


@dataclass(frozen=True)
class PlannedJob:
    """A job, the group it belongs to, and the cache that it trains from."""

    job: FarmJob
    data: str
    trunk: str  # its source
    trunk_key: str  # the same for jobs whose tasks can share a pass
    regime: str
    images: int  # to train on
    alone: bool  # whether its regime changes the trunk, so that it shares no pass
    cache: str = ""  # the same for jobs that share one; "" without a cache
    cache_bytes: int = 0

    @property
    def group(self) -> tuple[str, str]:
        """The same for jobs on the same data and trunk."""
        return self.data, self.trunk_key


@dataclass(frozen=True)
class Plan:
    """The jobs in the order in which they start: group by group, parents first."""

    jobs: Sequence[PlannedJob]

    def describe(self) -> Description:
        """The groups with their caches, and all jobs."""
        groups: dict[tuple[str, str], list[PlannedJob]] = {}
        for planned in self.jobs:
            groups.setdefault(planned.group, []).append(planned)
        table, documents = list[tuple[str, ...]](), list[dict[str, Any]]()
        for number, members in enumerate(groups.values(), 1):
            caches = {one.cache: one.cache_bytes for one in members if one.cache}
            documents.append(
                {
                    "data": members[0].data,
                    "trunk": members[0].trunk,
                    "caches": len(caches),
                    "cache_bytes": sum(caches.values()),
                    "jobs": [_document(one) for one in members],
                }
            )
            names = {cache: f"{number}.{i}" for i, cache in enumerate(caches, 1)}
            table += [_row(number, one, names.get(one.cache, "none")) for one in members]
        rows = [
            ("jobs", f"{len(self.jobs)} in {counted(len(groups), 'group')}"),
            ("caches", storage(sum(document["cache_bytes"] for document in documents))),
        ]
        columns = ("group", "data", "trunk", "job", "task", "regime", "images", "cache", "bundle")
        return Description({"groups": documents}, rows, columns, tuple(table))


def _document(planned: PlannedJob) -> dict[str, Any]:
    job = planned.job
    return {
        "job": job.name,
        "task": job.task,
        "regime": planned.regime,
        "images": planned.images,
        "cache": bool(planned.cache),
        "bundle": str(job.bundle),
        "parents": list(job.parents),
    }


def _row(number: int, planned: PlannedJob, cache: str) -> tuple[str, ...]:
    job, size = planned.job, storage(planned.cache_bytes)
    return (
        *(str(number), planned.data, without_folder(planned.trunk), job.name, job.task),
        *(planned.regime, f"{planned.images:,}"),
        f"{cache}: {size}" if planned.cache else "none",
        str(job.bundle),
    )


def make_plan(
    jobs: Sequence[FarmJob], announce: Callable[[str], object], progress: Progress = silent
) -> Plan:
    """Read the data and load the trunk of every job, and check that it can train.

    Raises:
        EngramError: A sentence for each mistake, with the job's name.
    """
    problems, planned, sources = Problems(), dict[str, PlannedJob](), _Sources()
    for done, job in enumerate(jobs):
        progress("checking the jobs", done, len(jobs))
        try:
            planned[job.name] = _planned(job, planned, sources, announce)
        except EngramError as error:
            problems.add(job.name, error)
    progress("checking the jobs", len(jobs), len(jobs))
    _check_bundles(list(planned.values()), problems)
    problems.refuse()
    return Plan(_by_group(list(planned.values())))


@dataclass
class _Sources:
    """Data and trunks as they were read last: the next job often needs the same."""

    _splits: dict[tuple[str, DataOptions], Splits] = field(default_factory=dict)
    _trunks: dict[tuple[Any, ...], tuple[ViT, str]] = field(default_factory=dict)

    def read(self, options: DataOptions, data: str) -> Splits:
        key = (data, options)
        if key not in self._splits:
            self._splits = {key: options.load(data)}
        return self._splits[key]

    def trunk(self, backbone: str, splits: Splits, **others: Any) -> tuple[ViT, str]:
        hard = backbone == "auto"  # it depends on the data, or on parents, or on a run
        key = (backbone, others["image_size"], others["dtype"], splits.name if hard else "")
        if hard and (others["parents"] or (others["resumed"] and others["resumed"].exists())):
            return trunk_for(backbone, splits, **others)
        if key not in self._trunks:
            self._trunks = {key: trunk_for(backbone, splits, **others)}
        return self._trunks[key]


def _planned(
    job: FarmJob,
    planned: dict[str, PlannedJob],
    sources: _Sources,
    announce: Callable[[str], object],
) -> PlannedJob:
    given = job
    coming = [planned[name] for name in job.parents if name in planned]
    if len(coming) < len(job.parents):
        raise EngramError("a job that it extends cannot be trained.")
    if any(not parent.job.out.exists() for parent in coming):  # they will be trained first
        paths = {str(parent.job.out) for parent in coming}
        given = job.but(TaskSettings, extends=tuple(t for t in job.extends if t not in paths))
        if job.given[RunOptions].get("backbone", "auto") == "auto":
            given = given.but(RunOptions, backbone=coming[0].trunk)
    work = TrainingJob.start(
        *(job.data, job.out, given.given, silent, announce),
        read=sources.read, find_trunk=sources.trunk,
    )  # fmt: skip
    regime, seeds = work.choose(job.regime, job.seeds)
    if given is job and has_state(job.out) and not work.options.overwrite:
        _check_same_run(job, work.identity(job.task, regime, seeds))
    specs, recipe, model = work.specs(job.task, regime), work.recipe, work.model
    splits = work.splits.with_validation(recipe.val_share, recipe.data_seed)
    for spec in specs:
        check_fits(spec, splits, same_ignore=True)
        recipe.check_for(spec.does)
    if work.options.test:
        splits["test"]  # whether there is one should show now
    cache = CachePlan(model, specs, splits, recipe)
    cached = recipe.cache != "off" and not cache.reason_against() and not cache.too_large()
    views = (cache.augment, recipe.views, recipe.min_area, recipe.data_seed)
    kind_of_view = views if cache.augment != "none" else "none"
    fingerprint = f"{model.trunk.fingerprint} {model.preprocessing.to_dict()}"
    data = os.path.normpath(job.data) if Path(job.data).exists() else job.data
    return PlannedJob(
        job=job,
        data=data,
        trunk=model.trunk.source,
        trunk_key=fingerprint,
        regime=regime,
        images=len(splits["train"]),
        alone=any(spec.parts.changes_trunk for spec in specs),
        cache=f"{data} {fingerprint} {cache.keeps} {kind_of_view}" if cached else "",
        cache_bytes=cache.bytes if cached else 0,
    )


def _check_same_run(job: FarmJob, identity: str) -> None:
    if has_run_of_another(job.out, identity):
        raise EngramError(
            f"its earlier run in {run_folder(job.out)} had other settings, data or trunk; undo the "
            f"change, give the job another name, or train it anew with {spell('overwrite', True)}."
        )


def _check_bundles(jobs: Sequence[PlannedJob], problems: Problems) -> None:
    """Refuse what could not share a pass, or would replace what the farm did not make."""
    first: dict[Path, PlannedJob] = {}
    for planned in jobs:
        job = planned.job
        other = first.setdefault(job.bundle, planned)
        if other.trunk_key != planned.trunk_key:
            problems.add(
                job.name,
                f"its trunk is {planned.trunk}, and that of {other.job.name} {other.trunk}, with "
                f"other weights or another image size, but both go into the bundle {job.bundle}; "
                "give one of them another bundle.",
            )
        elif other is not planned and (other.alone or planned.alone):
            alone = planned if planned.alone else other
            problems.add(
                alone.job.name,
                f"the regime {alone.regime} changes the trunk's own tokens, so its task can share "
                f"the bundle {job.bundle} with no other; give it a bundle of its own.",
            )
        try:
            _check_bundle(job, planned)
        except EngramError as error:
            problems.add(job.name, error)


def _check_bundle(job: FarmJob, planned: PlannedJob) -> None:
    folder = job.bundle
    if not is_bundle(folder):
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise EngramError(f"its bundle {folder} exists and is no bundle; choose another path.")
        return
    bundle = read_bundle(folder)
    there = {engram.spec.name: engram.content for engram in bundle.engrams}
    preprocessing = bundle.preprocessing and bundle.preprocessing.to_dict()
    if f"{bundle.trunk.fingerprint} {preprocessing}" != planned.trunk_key:
        raise EngramError(
            f"the bundle {folder} is for the trunk {bundle.trunk.source}, and this job's is "
            f"{planned.trunk}, with other weights or another image size; choose another bundle."
        )
    if job.task not in there or job.given[RunOptions].get("overwrite"):
        return
    if not job.out.exists() or read_engram(job.out).content != there[job.task]:
        raise EngramError(
            f"the bundle {folder} has a task {job.task} that this job did not train; choose "
            "another task or bundle, or replace it with overwrite."
        )


def _by_group(jobs: Sequence[PlannedJob]) -> list[PlannedJob]:
    """Group after group in the order of their first jobs; children stay behind their parents."""
    order: dict[tuple[str, str], int] = {}
    for planned in jobs:
        order.setdefault(planned.group, len(order))
    ranks: dict[str, int] = {}
    for planned in jobs:  # parents first
        before = [ranks[parent] for parent in planned.job.parents]
        ranks[planned.job.name] = max([order[planned.group], *before])
    return sorted(jobs, key=lambda planned: ranks[planned.job.name])
