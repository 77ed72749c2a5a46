"""`engram fit --add-classes --from OLD`: more classes for a task, from their images alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram.cli.progress import Watch
from engram.cli.terminal import announce
from engram.errors import EngramError
from engram.util.settings import Given

if TYPE_CHECKING:
    from engram.train.job import TrainingJob
    from engram.train.result import Result


def check_flags(add: bool, old: str | None, given: Mapping[str, Any]) -> None:
    """Refuse one of the two flags alone, and others that decide what the old task has decided."""
    if add and old is None:
        raise EngramError(
            "--add-classes needs the engram that gets more classes: --from OLD.safetensors."
        )
    if old is not None and not add:
        raise EngramError(f"--from {old} is for --add-classes; add that flag, or leave it out.")
    useless = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if add and useless:
        raise EngramError(
            f"{', '.join(useless)} cannot be given with --add-classes: the new task is what the "
            f"one in {old} is, with more classes, and takes seconds. Leave it out."
        )


def add_classes_to(
    old: str, data: str, task: str, out: Path, given: Given, progress: Watch
) -> tuple[TrainingJob, Result]:
    """Teach the task of an engram more classes. The job has data of all classes."""
    from engram.store.format import read_engram
    from engram.store.remote import single_engram_path
    from engram.train.add_classes import add_classes, with_known_classes
    from engram.train.backbone import backbone_for
    from engram.train.job import TrainingJob
    from engram.train.opening import opening

    engram = read_engram(single_engram_path(old))

    def backbone_of_old(*arguments: Any, **named: Any) -> Any:
        return backbone_for(*arguments, **{**named, "parents": [old, *named["parents"]]})

    job = TrainingJob.start(
        data, out, given, progress, announce,
        read=lambda options, source: options.load(source, one_class=True),
        find_backbone=backbone_of_old,
    )  # fmt: skip
    options, whole = job.options, with_known_classes(job.splits, engram)
    spec = replace(engram.spec, classes=whole.classes)
    progress.say(opening(job.model, [spec], whole, job.recipe))
    result = add_classes(
        job.model, engram, job.splits, job.recipe,
        task=task, out=out, overwrite=options.overwrite, test=options.test, team=job.team,
        progress=progress,
    )  # fmt: skip
    return replace(job, splits=whole), result
