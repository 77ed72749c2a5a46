"""Calibrate tasks at the end of their training, and measure what that changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engram.data.datasets import Splits
from engram.data.loader import Transform
from engram.data.overview import find_leaks
from engram.inference.evaluate import Answers, answers
from engram.model import MemoryViT
from engram.train.learner import TaskTrainer
from engram.train.run import Run


def calibrate(learner: TaskTrainer) -> None:
    """Divide the logits of a task by the temperature that fits its answers for held-out images.

    Its answers and metrics are then the calibrated ones, with the `temperature` and what the
    calibration error was before, `uncalibrated_ece`. Nothing happens where the recipe turned it
    off, where the kind of task has no probabilities, or where it would not help.
    """
    kind, head, held_out = learner.task.kind, learner.task.head, learner.held_out
    if learner.recipe.calibrate == "off" or not kind.calibrates:
        return
    temperature = kind.temperature(held_out.outputs, held_out.labels)
    if temperature == 1.0:
        return
    before = learner.metrics
    head.divide(temperature)
    calibrated = held_out._replace(outputs=held_out.outputs / temperature)
    kind.fit_buffers(head, calibrated.pairs)
    learner.measure(calibrated)
    estimated = ("interval", "folds", "held_out", "learned_all", learner.measured_by)
    learner.metrics |= {
        **{name: before[name] for name in estimated},
        "uncalibrated_ece": before["ece"],
        "temperature": temperature,
    }


def metrics_on_test(
    model: MemoryViT,
    name: str,
    splits: Splits,
    val: Mapping[str, Any],
    run: Run,
    workers: int,
    transform: Transform | None = None,
) -> tuple[dict[str, Any], Answers]:
    """The metrics of the test split, and the answers for it.

    `val` are those of validation: where they have a temperature, the result has the calibration
    error that the test split would have without it.
    """
    answered = answers(
        model, splits, name, workers=workers, transform=transform, team=run.team,
        progress=lambda done, total: run.progress("testing", done, total),
    )  # fmt: skip
    metrics = answered.metrics() | answered.without_leaks(find_leaks(splits, "test"))
    if "temperature" in val and len(answered.labels):
        raw = answered.logits * val["temperature"], answered.labels
        metrics["uncalibrated_ece"] = answered.kind.metrics(raw, answered.fitted)["ece"]
    return metrics, answered
