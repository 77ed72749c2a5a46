"""The plan of a farm: its jobs checked before any trains, in groups that share a cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from engram.backbones.recommended import AUTO
from engram.cluster.jobs import FarmJob
from engram.data.datasets import Splits, check_fits
from engram.errors import EngramError
from engram.model import MemoryViT
from engram.store.bundles import is_bundle, read_bundle
from engram.store.engram import BackboneInfo
from engram.store.format import read_engram
from engram.train.backbone import backbone_for
from engram.train.feed_plan import FeedPlan
from engram.train.job import TrainingJob
from engram.train.options import DataOptions, RunOptions
from engram.train.run import has_run_of_another, has_state, run_folder
from engram.train.validation import with_held_out
from engram.util.description import Description
from engram.util.flag_names import flag
from engram.util.progress import Progress, silent
from engram.util.text import counted, storage, without_folder
from engram.vit import ViT


@dataclass(frozen=True)
class PlannedJob:
    """A job, the group it belongs to, and the cache that it trains from."""

    job: FarmJob
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
        job = {"job": self.job.name, "task": self.job.task, "parents": list(self.job.parents)}
        where = {"data": self.data, "bundle": str(self.job.bundle), "cache": bool(self.cache)}
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
            planned[job.name] = planner.plan(job, planned)
            _check_shares(planned[job.name], planned)
        except EngramError as error:
            problems.append(f"Job {job.name}: {error}")
    progress("checking the jobs", len(jobs), len(jobs))
    if problems:
        raise EngramError(" ".join(problems))
    groups = list(dict.fromkeys(one.group for one in planned.values()))
    ranks: dict[str, int] = {}
    for name, one in planned.items():  # children stay behind their parents
        ranks[name] = max([groups.index(one.group), *(ranks[name] for name in one.job.parents)])
    return sorted(planned.values(), key=lambda one: ranks[one.job.name])


class _Planner:
    """Plans job after job; data and backbone are kept, as the next one often needs the same."""

    def __init__(self, announce: Callable[[str], object]) -> None:
        self._announce = announce
        self._read = lru_cache(1)(DataOptions.load)
        self._backbones: dict[tuple[Any, ...], tuple[ViT, str]] = {}

    def _backbone(self, backbone: str, splits: Splits, **others: Any) -> tuple[ViT, str]:
        auto = backbone == AUTO  # it depends on the data, on parents, or on a run
        if auto and (others["parents"] or others["resumed"]):
            return backbone_for(backbone, splits, **others)
        key = (backbone, others["image_size"], others["dtype"], splits.name if auto else "")
        if key not in self._backbones:
            self._backbones = {key: backbone_for(backbone, splits, **others)}
        return self._backbones[key]

    def plan(self, job: FarmJob, planned: dict[str, PlannedJob]) -> PlannedJob:
        """Check a job as its training would; its parents are among those that are planned."""
        if any(name not in planned for name in job.parents):
            raise EngramError("a job that it extends cannot be trained.")
        given = job.settings()
        coming = [planned[name] for name in job.parents if not planned[name].job.out.exists()]
        if coming:  # their engrams are not there yet, but their backbone is known
            paths = {str(planned[name].job.out) for name in job.parents}
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
        cached = recipe.cache != "off" and not cache.reason_against() and not cache.too_large()
        view = (cache.augment, recipe.views, recipe.min_area, recipe.data_seed)
        content = f"{cache.keeps} {view if cache.augment != 'none' else 'none'}"
        key = f"{model.backbone.fingerprint} {model.preprocessing.to_dict()}"
        data = job.options.data
        data = os.path.normpath(data) if Path(data).exists() else data
        return PlannedJob(
            job, data, model.backbone.source, key, regime, len(splits["train"]),
            alone=not all(spec.method.shares_pass for spec in specs),
            cache=f"{data} {key} {content}" if cached else "",
            cache_bytes=cache.bytes if cached else 0,
        )  # fmt: skip


def _check_shares(new: PlannedJob, planned: Mapping[str, PlannedJob]) -> None:
    """Refuse a task that could not share a pass with the others of its bundle."""
    bundle, parents = new.job.bundle, [planned[name].job for name in new.job.parents]
    if outside := [parent.name for parent in parents if parent.bundle != bundle]:
        raise EngramError(
            f"it extends {outside[0]}, which goes into another bundle than {bundle}; give both one."
        )
    for other in planned.values():
        if other is new or other.job.bundle != bundle:
            continue
        name, alone = other.job.name, [one.regime for one in (new, other) if one.alone]
        why = ""
        if other.job.task == new.job.task:
            why = f"its task {new.job.task} is also that of job {name}"
        elif other.backbone_key != new.backbone_key:
            backbones = f"its backbone is {new.backbone}, and that of {name} {other.backbone}"
            why = f"{backbones}, with other weights or another image size"
        elif alone:
            why = (
                f"the regime {alone[0]} changes the backbone's own tokens, and {name} cannot share"
            )
        if why:
            raise EngramError(f"{why}; both go into {bundle}: give one of them another bundle.")


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
            where = (str(number), data, without_folder(backbone), one.job.name, one.job.task)
            table.append((*where, one.regime, f"{one.images:,}", cache, str(one.job.bundle)))
        shared = {"data": data, "backbone": backbone, "caches": len(caches)}
        own = [one.to_dict() for one in members]
        documents.append({**shared, "cache_bytes": sum(caches.values()), "jobs": own})
    total = storage(sum(document["cache_bytes"] for document in documents))
    rows = [("jobs", f"{len(jobs)} in {counted(len(documents), 'group')}"), ("caches", total)]
    columns = ("group", "data", "backbone", "job", "task", "regime", "images", "cache", "bundle")
    return Description({"groups": documents}, rows, columns, tuple(table))
