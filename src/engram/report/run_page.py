"""The page about a training run, in the run's folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

from engram.data.datasets import Dataset, Splits
from engram.errors import EngramError
from engram.model import MemoryViT
from engram.report.page import answers_for_report, write_report
from engram.report.task_section import TaskPart
from engram.tasks.kinds import KINDS
from engram.train.auto import AutoResult
from engram.train.recipe import Recipe
from engram.train.result import Result
from engram.train.run import run_folder
from engram.train.sweep import SweepResult
from engram.train.trackers import history_rows
from engram.util.files import check_writable


def check_page_path(path: Path) -> None:
    """Refuse a path where a page cannot be written, or would replace anything but a page."""
    check_writable(path)
    if path.exists():
        with open(path, "rb") as file:
            if not file.read(15).lower().startswith(b"<!doctype html"):
                raise EngramError(f"{path} exists and is not an HTML page; choose another name.")


def write_run_report(
    model: MemoryViT,
    result: AutoResult | Result | SweepResult,
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
    dataset = splits.with_validation(recipe.val_share, recipe.data_seed)[split]
    lead = f"Trained in {result.seconds:,.0f} seconds; the engram is {result.path.name}."
    if result.ending is not None:
        lead += f" Training: {result.ending}."
    lead += _calibrated(result, split)
    if isinstance(result, SweepResult) and result.soup is not None:
        lead += f" Averages that were tried: {result.soup.summary(KINDS[splits.kind])}."
    if refit and split == "val":
        dataset = dataset.subset(range(len(dataset)), "train")
        lead += _after_refit(result, splits)
    settings = [one.to_dict() for one in getattr(result, "settings", ())]
    tried = result.table(KINDS[splits.kind]) if isinstance(result, AutoResult) else None
    try:
        answers = answers_for_report(model, dataset, result.task)
        lead += _sampled(answers.dataset, dataset)
        page = write_report(
            folder / "report.html",
            model,
            [TaskPart(answers, read_history(folder / "history.csv"), settings, tried)],
            title=f"{result.task}: what it learned",
            lead=lead,
        )
    except EngramError as error:  # the engram is written, and that is what was asked for
        return f"not written: {error}"
    return str(page)


def _after_refit(result: AutoResult | Result | SweepResult, splits: Splits) -> str:
    kind = KINDS[splits.kind]
    before = kind.shown(result.metrics["val"][kind.score])
    return (
        " It was trained once more with the validation images, so what follows is about images "
        f"that it has learned; before that, its validation {kind.title} was {before}."
    )


def _calibrated(result: AutoResult | Result | SweepResult, split: str) -> str:
    metrics = result.metrics[split]
    if "uncalibrated_ece" not in metrics:
        return ""
    return (
        f" Its probabilities were calibrated on the validation images, at the temperature "
        f"{result.metrics['val']['temperature']:.3g}: the {split} calibration error was "
        f"{metrics['uncalibrated_ece']:.4f} before and is {metrics['ece']:.4f}."
    )


def _sampled(shown: Dataset, dataset: Dataset) -> str:
    if len(shown) == len(dataset):
        return ""
    return f" The page is about {len(shown):,} of the {len(dataset):,} images, chosen at random."


def read_history(path: Path) -> list[dict[str, float]]:
    """The learning curve that the run logged; empty where it logged none, or several in a row."""
    rows: list[dict[str, str]] = []
    with contextlib.suppress(OSError, EngramError):  # a page without the curve is a page
        rows = history_rows(path)
    curve = [{key: float(value) for key, value in row.items()} for row in rows]
    return [row for row in curve if "variant" not in row]
