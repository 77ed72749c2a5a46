"""`engram fit`, `engram sweep` and `engram teach`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from engram.cli import shared
from engram.cli.flags import among, numbers, option, switch
from engram.cli.terminal import Watch, announce
from engram.cli.words_option import fit_with_images, fit_without_images, refuse_beside
from engram.errors import EngramError, Interrupted
from engram.methods.method_flags import REGIMES, MethodFlags
from engram.tasks.task_settings import TaskSettings
from engram.train.options import ColumnOptions, DataOptions, RunOptions, with_recipe_file
from engram.train.recipe import Recipe
from engram.util.settings import Given
from engram.util.text import Description, counted

if TYPE_CHECKING:
    from engram.data.datasets import Splits
    from engram.model import MemoryViT
    from engram.tasks.kind import Kind
    from engram.train.job import TrainingJob
    from engram.train.runs.result import Result
    from engram.util.progress import Progress

TrainResult = TypeVar("TrainResult", bound="Result")
TASK_NAME = option("Task", "Name of the task.", "--task", default=...)
_REGIME_HELP = (
    "Which parameters train, and whether attention is masked; auto tries those that leave the "
    f"backbone alone (auto, {', '.join(REGIMES)}; default: auto, or {TaskSettings().regime} "
    "with --recipe paper or --seeds)."
)
_CELLS = MethodFlags().cells
_PANELS = {DataOptions: "Data", TaskSettings: "Task", Recipe: "Training", RunOptions: "Training"}


@shared.command("fit", _PANELS, work="starting", threads=True)
def fit_command(
    task: str = TASK_NAME,
    out: Path = shared.OUT_ENGRAM,
    data: str | None = shared.OPTIONAL_DATA,
    words: str | None = option(
        "Task",
        "Make the classes of texts, with a CLIP or SigLIP as --backbone: a file of lines, or "
        "a list. Images are not needed; a few improve it.",
        metavar="TEXT=CLASS,…|FILE",
    ),
    regime: str | None = option("Task", _REGIME_HELP, autocompletion=among(("auto", *REGIMES))),
    seeds: int | None = option("Training", "Train this many seeds and keep the best (default: 1)."),
    more: bool = switch(
        "Task",
        "Teach the task in --from more classes, from images of these alone.",
        "--add-classes",
    ),
    old: str | None = option(
        "Task", "The engram that gets more classes, with --add-classes.", "--from", metavar="FILE"
    ),
    soup: int | None = option(
        "Training",
        "Train at this many learning rates around the default or --lr, and average the "
        "best if validation says that it helps (default: none).",
    ),
    own_pass: bool = switch(
        "Task",
        "With auto: try memory, adapter and full as well, which take longer and answer in no "
        "pass with other tasks.",
        "--own-pass",
    ),
    *,
    flags: Given,
    progress: Watch,
) -> Description:
    """Train a task on images, or make one of words, and write it as an engram."""
    from engram.curation.check import wrong_labels
    from engram.train.job import TrainingJob
    from engram.train.search.auto import AutoResult

    given, own = with_recipe_file(
        flags, regime=regime, seeds=seeds, soup=soup, own_pass=own_pass or None
    )
    fixed = {k: v for k, v in given[TaskSettings].items() if k != "extends"}
    resume = given[RunOptions].get("resume")
    _check_add_classes(more, old, {**fixed, **own, "resume": resume})
    extends = given[TaskSettings].get("extends")
    others = {**fixed, **own, "resume": resume, "extends": extends, "add_classes": more}
    if words is not None:
        refuse_beside("--words", "the task is a head on the backbone's embedding", others)
    elif data is None:
        raise EngramError("There is nothing to learn from: give DATA, or classes with --words.")
    result: Result
    stopped = ""
    if data is None:
        return fit_without_images(words or "", task, out, given, progress)
    if words is not None:
        job, result = fit_with_images(words, data, task, out, given, progress)
    elif old is not None:
        job, result = _add_classes(old, data, task, out, given, progress)
    else:
        job = TrainingJob.start(data, out, given, progress, announce)
        job = replace(job, own_pass=bool(own["own_pass"]))
        soup = own["soup"] or 0
        chosen, seeds = job.choose(own["regime"], own["seeds"], soup)
        if chosen == "auto" and job.too_few_to_hold_out:
            return taught(job.teach(task, out, progress), job.model)
        progress.say(job.opening(task, chosen))
        result, stopped = _or_best_so_far(
            job, lambda: job.train(task, out, chosen, seeds, progress, soup)
        )
    document, (*rows, report) = _reported(job, result, progress)
    if job.splits.ignored:
        rows.append(("ignored", job.splits.ignored_words))
    document["wrong_labels"] = wrong = wrong_labels(result.answers)
    if wrong:
        looks = "label looks" if wrong == 1 else "labels look"
        rows.append(("labels", f"{wrong:,} {looks} wrong: engram check {data}"))
    found = Description(document, rows, problem=stopped, code=130 if stopped else 0)
    if isinstance(result, AutoResult):
        rows += [("own pass", result.own_pass)] if result.own_pass else []
        columns, table = result.table(job.model.task(task).kind)
        found = replace(found, columns=columns, table=table)
    rows.append(report)
    return found


def _or_best_so_far(job: TrainingJob, train: Callable[[], TrainResult]) -> tuple[TrainResult, str]:
    """The result of a run or, after Ctrl-C, of the best engram so far, and where it stopped."""
    try:
        return train(), ""
    except Interrupted as stopped:
        if stopped.result is None:
            raise
        result: TrainResult = stopped.result
        if result.task not in job.model.tasks:
            job.model.attach(str(result.path))
        return result, str(stopped)


def _check_add_classes(add: bool, old: str | None, given: Mapping[str, Any]) -> None:
    """Refuse one of the two flags alone, and others that decide what the old task has decided."""
    if add and old is None:
        raise EngramError(
            "--add-classes needs the engram that gets more classes: --from OLD.safetensors."
        )
    if old is not None and not add:
        raise EngramError(f"--from {old} is for --add-classes; add that flag, or leave it out.")
    if add:
        why = f"the new task is what the one in {old} is, with more classes"
        refuse_beside("--add-classes", why, given)


def _add_classes(
    old: str, data: str, task: str, out: Path, given: Given, progress: Watch
) -> tuple[TrainingJob, Result]:
    """Teach the task of an engram more classes. The job has data of all classes."""
    from engram.store.format import read_engram
    from engram.store.remote import single_engram_path
    from engram.train.add_classes import add_classes, with_known_classes
    from engram.train.backbone import backbone_for
    from engram.train.job import Sources, TrainingJob
    from engram.train.opening import opening

    engram = read_engram(single_engram_path(old))

    def backbone_of_old(*arguments: Any, **named: Any) -> Any:
        return backbone_for(*arguments, **{**named, "parents": [old, *named["parents"]]})

    def read(options: DataOptions, source: str) -> Splits:
        return options.load(source, one_class=True)

    sources = Sources(read, backbone_of_old)
    job = TrainingJob.start(data, out, given, progress, announce, sources)
    options, whole = job.options, with_known_classes(job.splits, engram)
    spec = replace(engram.spec, classes=whole.classes)
    progress.say(opening(job.model, [spec], whole, job.recipe))
    result = add_classes(
        job.model, engram, job.splits, job.recipe,
        task=task, out=out, overwrite=options.overwrite, test=options.test, processes=job.processes,
        progress=progress,
    )  # fmt: skip
    return replace(job, splits=whole), result


@shared.command("sweep", _PANELS, work="starting", threads=True)
def sweep_command(
    data: str = shared.DATA_ARGUMENT,
    task: str = TASK_NAME,
    out: Path = shared.OUT_ENGRAM,
    cells: str | None = option(
        "Task", f"Numbers of memory cells (default: {_CELLS}).", metavar="A,B"
    ),
    lr: str | None = option("Training", "Learning rates.", metavar="A,B"),
    weight_decay: str | None = option("Training", "Weight decays.", metavar="A,B"),
    seeds: int | None = option("Training", "Seeds for every combination (default: 1)."),
    refit: bool = switch(
        "Training", "Train the best again, validation images included.", "--refit"
    ),
    soup: int | None = option(
        "Training",
        "Average up to this many of the best variants of one seed and number of cells, "
        "if validation says that it helps (default: none).",
    ),
    *,
    flags: Given,
    progress: Watch,
) -> Description:
    """Train many variants of a task at once and keep the best on validation."""
    from engram.train.job import TrainingJob

    given, own = with_recipe_file(
        flags, lr=lr, cells=cells, weight_decay=weight_decay, seeds=seeds,
        refit=refit or None, soup=soup,
    )  # fmt: skip
    grid: dict[str, Any] = {
        "lrs": numbers("--lr", own["lr"], float),
        "weight_decays": numbers("--weight-decay", own["weight_decay"], float),
        "cells": [_CELLS] if own["cells"] is None else numbers("--cells", own["cells"], int),
        "seeds": 1 if own["seeds"] is None else own["seeds"],
        "refit": bool(own["refit"]),
        "soup": own["soup"] or 0,
    }
    job = TrainingJob.start(data, out, given, progress, announce)
    if all(value is None for name, value in own.items() if name != "refit"):
        grid["lrs"] = job.usual_rates()
    progress.say(job.opening(task, job.settings.regime))
    result, stopped = _or_best_so_far(job, lambda: job.sweep(task, out, progress, **grid))
    document, rows = _reported(job, result, progress, grid["refit"] and not result.interrupted)
    columns, table = result.table(job.model.task(result.task).kind)
    code = 130 if stopped else 0
    return Description(document, rows, columns, table, problem=stopped, code=code)


@shared.command("teach", {ColumnOptions: "Data"}, work="starting", threads=True)
def teach_command(
    data: str = shared.DATA_ARGUMENT,
    out: Path = shared.OUT_ENGRAM,
    task: str | None = option("Task", "Name of the task (default: that of --from).", "--task"),
    old: str | None = option(
        "Task", "A taught engram that learns these images, too.", "--from", metavar="FILE"
    ),
    forget: bool = switch("Task", "Let the task in --from forget these images.", "--forget"),
    statistics: str = option(
        "Task",
        "Keep statistics of the images' features, for familiarity, and to learn more, forget "
        "and merge later (on, off).",
        default="on",
        autocompletion=among(("on", "off")),
    ),
    backbone: str = shared.OWN_BACKBONE,
    overwrite: bool = shared.OVERWRITE,
    *,
    flags: Given,
    progress: Watch,
) -> Description:
    """Teach a task from one to five images a class, in a second; or teach it more images."""
    from engram.data.datasets import load
    from engram.store.format import check_free
    from engram.train import teach as teaching

    if forget and old is None:
        raise EngramError(
            "--forget needs the engram that forgets these images: --from OLD.safetensors."
        )
    if task is None and old is None:
        raise EngramError("The task needs a name; give --task NAME.")
    check_free(out, overwrite)  # before a download
    progress("reading the data", 0, 0)
    columns = ColumnOptions(**flags[ColumnOptions]).columns()
    splits = load(data, one_class=old is not None, **columns)
    model, name = _model_to_teach(backbone, splits, old, task, progress)
    how: dict[str, Any] = {"out": out, "overwrite": overwrite, "progress": progress}
    if forget:
        return taught(teaching.forget(model, name, splits, **how), model)
    return taught(teaching.teach(model, name, splits, statistics=statistics, **how), model)


def _model_to_teach(
    backbone: str, splits: Splits, old: str | None, task: str | None, progress: Progress
) -> tuple[MemoryViT, str]:
    """A model to teach, with the old task attached if there is one, and the name of the task."""
    from engram.model import MemoryViT
    from engram.store.engram import load_engram_backbone
    from engram.store.format import read_engram
    from engram.store.remote import single_engram_path
    from engram.train.backbone import backbone_for

    progress("loading the backbone", 0, 0)
    if old is None:
        assert task is not None
        options = RunOptions(backbone)
        found, _ = backbone_for(options, splits, announce=announce, progress=progress)
        return MemoryViT(found), task
    engram = read_engram(single_engram_path(old))
    engram = engram if task is None else engram.renamed(task)
    model = MemoryViT(load_engram_backbone(engram, None if backbone == "auto" else backbone))
    model.attach(engram)
    return model, engram.spec.name


def _reported(
    job: TrainingJob,
    result: Result,
    progress: Watch,
    refit: bool = False,
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Write the page about a run; the result as a document, and as rows that end with the page."""
    from engram.report.run_page import write_run_report

    progress("writing the report", 0, 0)
    report, model = "", job.model
    if job.processes.main:
        report = write_run_report(model, result, job.splits, job.recipe, refit)
    document = {**result.to_dict(), "backbone": model.backbone.source, "report": report}
    return document, [*result_rows(result, model), ("report", report)]


def result_rows(result: Result, model: MemoryViT) -> list[tuple[str, str]]:
    """The result of a run, for people."""
    from engram.tasks.metrics import shown
    from engram.train.runs.run import unreadable_list
    from engram.train.search.sweep import SweepResult

    kind = model.task(result.task).kind
    rows = [
        ("engram", str(result.path)),
        ("backbone", model.backbone.source),
        ("regime", result.regime),
        ("parameters", f"{result.parameters:,}"),
        ("seconds", f"{result.seconds:.{0 if result.seconds > 10 else 1}f}"),
    ]
    if result.interrupted:
        rows.append(("interrupted", "this is the best so far; --resume continues the run"))
    if result.ending is not None:
        rows.append(("training", str(result.ending)))
    for split, metrics in result.metrics.items():
        if kind.one_class:
            rows += _alarm_rows(split, metrics)
            continue
        rows.append((f"{split} {kind.title}", _score(kind, metrics)))
        even = metrics.get("balanced_accuracy", metrics[kind.score])
        if abs(even - metrics[kind.score]) >= 0.01:  # classes of unequal size
            rows.append(
                (f"{split} balanced accuracy", f"{kind.shown(even)}, the mean over classes")
            )
        if "uncalibrated_ece" in metrics:
            at = result.metrics["val"]["temperature"]
            error, before = (shown("ece", metrics[key]) for key in ("ece", "uncalibrated_ece"))
            calibrated = f"{error} ({before} before, temperature {at:.3g})"
            rows.append((f"{split} calibration error", calibrated))
        if metrics.get("deviation"):
            spread = f"{kind.shown(metrics['mean'])} ± {kind.shown(metrics['deviation'])}"
            rows.append(("over seeds", spread))
    if isinstance(result, SweepResult) and result.soup is not None:
        rows.append(("soup", result.soup.summary(kind)))
    if result.unreadable and result.path is not None:
        listed = unreadable_list(result.path)
        see = (
            f", see {listed}" if listed.exists() else f": {', '.join(list(result.unreadable)[:5])}"
        )
        rows.append(("unreadable", f"{counted(len(result.unreadable), 'image')}{see}"))
    return rows


def taught(result: Result, model: MemoryViT) -> Description:
    """The result of teaching, for people and machines."""
    engram = model.engram(result.task)
    images, rows = engram.recipe["train_images"], result_rows(result, model)
    rows.insert(
        3, ("images", f"{images:,} of {counted(len(engram.spec.classes), 'class', 'classes')}")
    )
    if "val" not in result.metrics:
        why = "no class has an image that could be left out"
        rows.append(("accuracy", f"not known: {why}; engram eval measures it on other images"))
    document = {
        **result.to_dict(),
        "backbone": model.backbone.source,
        "classes": list(engram.spec.classes),
        "images": images,
        "unreadable": dict(result.unreadable),
    }
    return Description(document, rows)


def _alarm_rows(split: str, metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The threshold of an anomaly task and what is expected of it, or what was measured."""
    from engram.tasks.metrics import TITLES, shown

    if split == "val" and "recall" not in metrics:
        low, high = (1 - end for end in reversed(metrics["interval"]))
        expected = (
            f"{metrics['threshold']:.3f}: {metrics['false_alarms']:.1%} of good images are "
            f"expected to exceed it ({low:.1%} to {high:.1%}), from "
            f"{counted(metrics['images'], 'held-out image')}"
        )
        return [("threshold", expected)]
    names = ("auroc", "pixel_auroc", "false_alarms", "recall")
    return [(f"{split} {TITLES[n]}", shown(n, metrics[n])) for n in names if n in metrics]


def _score(kind: Kind, metrics: Mapping[str, Any]) -> str:
    """A score for people, with its interval and what it was measured on."""
    score, images = kind.shown(metrics[kind.score]), f"{metrics['images']:,}"
    if not metrics.get("interval"):
        return f"{score} of {images}"
    low, high = (kind.shown(end) for end in metrics["interval"])
    folds = metrics["folds"]
    measured = f"{folds} folds of {images} images" if folds > 1 else f"{images} held-out images"
    if folds == metrics["images"] > 1:
        measured = f"each of {images} images left out once"
    return f"{score} ({low} to {high}), {measured}"
