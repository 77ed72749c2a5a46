"""Calibrate tasks at the end of their training, and measure what that changed."""

from __future__ import annotations

from typing import Any

from engram.data.datasets import Splits
from engram.data.loader import Transform
from engram.data.overview import find_leaks
from engram.inference.evaluate import answers
from engram.model import MemoryViT
from engram.train.learner import TaskTrainer
from engram.train.validation import HeldOut
from engram.util.processes import ProcessGroup
from engram.util.progress import Progress


def calibrate(learner: TaskTrainer, held_out: HeldOut, failed: int) -> HeldOut:
    """Divide the logits of a task by the temperature that fits its answers for held-out images.

    Its metrics are then those of the calibrated answers, with the `temperature` and what the
    calibration error was before, `uncalibrated_ece`. Nothing happens where the recipe turned it
    off, where the kind of task has no probabilities, or where it would not help.

    Returns:
        The answers, with calibrated logits.
    """
    kind, head = learner.task.kind, learner.task.head
    if learner.recipe.calibrate == "off" or not kind.calibrates:
        return held_out
    temperature = kind.temperature(held_out.outputs, held_out.labels)
    if temperature == 1.0:
        return held_out
    before = learner.metrics
    head.divide(temperature)
    calibrated = held_out._replace(outputs=held_out.outputs / temperature)
    kind.fit_buffers(head, calibrated.pairs)
    after = learner.measure(calibrated.pairs, failed)
    estimated = ("interval", "folds", "held_out", "learned_all", learner.measured_by)
    learner.metrics = {
        **after,
        **{name: before[name] for name in estimated},
        "uncalibrated_ece": before["ece"],
        "temperature": temperature,
    }
    return calibrated


def metrics_on_test(
    model: MemoryViT,
    name: str,
    splits: Splits,
    val: dict[str, Any],
    *,
    workers: int,
    transform: Transform | None = None,
    team: ProcessGroup,
    progress: Progress,
) -> dict[str, Any]:
    """The metrics of the test split.

    `val` are those of validation: where they have a temperature, the result has the calibration
    error that the test split would have without it.
    """
    answered = answers(
        model, splits, name, workers=workers, transform=transform, team=team,
        progress=lambda done, total: progress("testing", done, total),
    )  # fmt: skip
    metrics = answered.metrics() | answered.without_leaks(find_leaks(splits, "test"))
    if "temperature" in val and len(answered.labels):
        raw = [(answered.logits * val["temperature"], answered.labels)]
        metrics["uncalibrated_ece"] = answered.kind.metrics(raw, answered.fitted)["ece"]
    return metrics
