"""The page about a training run, in the run's folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from engram.data.datasets import Dataset, Splits
from engram.errors import EngramError
from engram.inference.evaluate import Answers, answers
from engram.model import MemoryViT
from engram.report.contents import Section, Table
from engram.report.page import write_sections
from engram.report.task_section import TaskPart, task_sections
from engram.tasks.kind import Kind
from engram.tasks.kinds import KINDS
from engram.tasks.metrics import shown
from engram.train.loop.validation import with_held_out
from engram.train.recipe import Recipe
from engram.train.runs.result import Result
from engram.train.runs.run import run_folder
from engram.train.runs.trackers import history_rows
from engram.train.search.auto import AutoResult
from engram.train.search.sweep import SweepResult
from engram.util.text import counted

MAX_IMAGES = 1000  # that a task answers for a report after training
MAX_SETTINGS = 40  # of a sweep
_TRIED = (
    "The best on held-out images first. Of those that tie, the one with the lowest loss was kept. "
    "Short trainings, which chose what was trained to the end, come last: they are measured on the "
    "first fold alone, where there are folds."
)
_TOGETHER = (
    "Of the tasks that were trained, not solved: at each step the one that was best then. Where "
    "another takes over, a curve may jump."
)


def write_run_report(
    model: MemoryViT,
    result: Result,
    splits: Splits,
    recipe: Recipe,
    refit: bool = False,
) -> str:
    """Write the page into the run's folder and return its path, or say why there is none.

    It is about the test split if that was evaluated, else about validation.
    """
    assert result.path is not None
    folder = run_folder(result.path)
    split = "test" if "test" in result.metrics else "val"
    known = result.answers
    dataset = known.dataset if known else with_held_out(splits, recipe, cross=False)[split]
    lead = f"Trained in {result.seconds:,.0f} seconds; the engram is {result.path.name}."
    if result.interrupted:
        lead += " It was interrupted, and this is the best so far."
    if result.ending is not None:
        lead += f" Training: {result.ending}."
    lead += _measured(result, KINDS[splits.kind])
    lead += _calibrated(result, split)
    if isinstance(result, SweepResult) and result.soup is not None:
        lead += f" Averages that were tried: {result.soup.summary(KINDS[splits.kind])}."
    if isinstance(result, AutoResult) and result.own_pass:
        lead += f" About a pass of its own: {result.own_pass}."
    if split == "val" and known is None and (refit or _learned_all(result)):
        dataset = dataset.subset(range(len(dataset)), "train")
        lead += " It has learned from the validation images since, so what follows flatters it."
    try:
        given = known or answers_for_report(model, dataset, result.task)
        if (few := len(given.dataset)) < len(dataset):
            lead += f" The page is about {few:,} of the {len(dataset):,} images, chosen at random."
        note = _TOGETHER if isinstance(result, AutoResult) else ""
        tried = tried_section(result, KINDS[splits.kind])
        part = TaskPart(given, read_history(folder / "history.csv"), note, tried)
        page, title = folder / "report.html", f"{result.task}: what it learned"
        write_sections(page, title, lead, task_sections(model, [part]), model.backbone)
    except EngramError as error:  # the engram is written, and that is what was asked for
        return f"not written: {error}"
    return str(page)


def tried_section(result: Result, kind: Kind) -> Section | None:
    """The settings of a sweep, or the regimes that auto tried; the best first."""
    if isinstance(result, AutoResult):
        columns, rows = result.table(kind)
        kept = next(i for i, row in enumerate(rows) if row[-1].startswith("kept"))
        table = Table(columns, rows, _TRIED, highlighted=kept)
        return Section(f"tried-{result.task}", "Regimes that were tried", [table])
    if not isinstance(result, SweepResult):
        return None
    settings, (columns, rows) = result.settings, result.table(kind)
    order = sorted(range(len(settings)), key=lambda i: -settings[i].mean)[:MAX_SETTINGS]
    cut = f" {len(order)} of {len(settings)}" if len(order) < len(settings) else ""
    seeds = counted(len(result.best.values), "seed")
    note = f"The best{cut or ' first'}, by {columns[3]}, with {seeds} each."
    table = Table(columns, [rows[i] for i in order], note, highlighted=0)
    return Section(f"settings-{result.task}", "Settings that were tried", [table])


def answers_for_report(model: MemoryViT, dataset: Dataset, task: str) -> Answers:
    """Answers for the images of a split, or for a thousand of them, chosen at random."""
    if len(dataset) > MAX_IMAGES:
        chosen = np.random.default_rng(0).permutation(len(dataset))[:MAX_IMAGES]
        dataset = dataset.subset(np.sort(chosen))
    return answers(model, dataset, task, workers=0)


def _learned_all(result: Result) -> bool:
    """Whether the task learned from the images that it was validated on, in the end."""
    return result.metrics["val"].get("learned_all", False) is True


def _measured(result: Result, kind: Kind) -> str:
    """The estimate from held-out images, with its interval."""
    metrics = result.metrics["val"]
    if not metrics.get("interval"):
        return ""
    low, high = (kind.shown(end) for end in metrics["interval"])
    folds = f", in {metrics['folds']} folds" if metrics["folds"] > 1 else ""
    learned = " Then it learned from all of them." if _learned_all(result) else ""
    estimate, answered = (kind.shown(metrics[name]) for name in (kind.score, "held_out"))
    corrected = (
        f" The answers for them have {answered}; the estimate is for a task that learned from all "
        "images, less what choosing the best on the same images flatters."
    )
    return (
        f" From {metrics['images']:,} held-out images{folds}, its {kind.title} is estimated to be "
        f"{estimate}, and in nine of ten such cases it is between {low} and {high}."
        f"{corrected if estimate != answered else ''}{learned}"
    )


def _calibrated(result: Result, split: str) -> str:
    metrics = result.metrics[split]
    if "uncalibrated_ece" not in metrics:
        return ""
    return (
        f" Its probabilities were calibrated on held-out images, at the temperature "
        f"{result.metrics['val']['temperature']:.3g}; the {split} calibration error is "
        f"{shown('ece', metrics['ece'])}, and without it would be "
        f"{shown('ece', metrics['uncalibrated_ece'])}."
    )


def read_history(path: Path) -> list[dict[str, float]]:
    """The learning curve that the run logged; empty where it logged none, or several in a row."""
    rows: list[dict[str, str]] = []
    with contextlib.suppress(OSError, EngramError):  # a page without the curve is a page
        rows = history_rows(path)
    curve = [{key: float(value) for key, value in row.items()} for row in rows]
    return [row for row in curve if "variant" not in row]
