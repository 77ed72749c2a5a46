"""Calibrate tasks at the end of their training, and measure what that changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from engram.data.datasets import Splits
from engram.data.loader import Transform
from engram.inference.evaluate import answers
from engram.model import MemoryViT
from engram.train.learner import TaskTrainer
from engram.util.processes import ProcessGroup
from engram.util.progress import Progress

if TYPE_CHECKING:
    from engram.train.training import Training


def calibrate(training: Training, learners: Sequence[TaskTrainer]) -> None:
    """Divide the logits of these learners by the temperatures that fit the validation images.

    Their metrics are then those of the calibrated answers, with the `temperature` and what the
    calibration error was before, `uncalibrated_ece`. Nothing happens where the recipe turned it
    off, or where the kind of task has no probabilities.
    """
    chosen = [one for one in learners if one.task.kind.calibrates]
    if training.recipe.calibrate == "off" or not chosen:
        return
    found, failed = training.validate(chosen)
    for learner in chosen:
        if not found[learner.name]:
            continue
        kind, head = learner.task.kind, learner.task.head
        logits, labels = (torch.cat(parts) for parts in zip(*found[learner.name], strict=True))
        temperature = kind.temperature(logits, labels)
        before = learner.measure([(logits, labels)], failed)["ece"]
        head.divide(temperature)
        kept = [(logits / temperature, labels)]
        kind.fit_buffers(head, kept)
        learner.metrics = {
            **learner.measure(kept, failed),
            "uncalibrated_ece": before,
            "temperature": temperature,
        }


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
    metrics = answered.metrics()
    if "temperature" in val and len(answered.labels):
        raw = [(answered.logits * val["temperature"], answered.labels)]
        metrics["uncalibrated_ece"] = answered.kind.metrics(raw, answered.fitted)["ece"]
    return metrics
