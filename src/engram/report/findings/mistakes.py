"""Images with wrong predictions, of every kind of task."""

from __future__ import annotations

from collections.abc import Sequence

from engram.inference.evaluate import Answers
from engram.model import MemoryViT
from engram.report.contents import Content, Mistake, Mistakes, Subsection, Text
from engram.report.images import backbone_view, thumbnail

MAX_MISTAKES = 12


def mistake(
    model: MemoryViT,
    answers: Answers,
    row: int,
    alt: str,
    *,
    predicted: Sequence[str],
    true: Sequence[str],
    output: str = "",
    confidence: str = "",
) -> Mistake:
    """A row of the answers as a mistake, with its image."""
    sample = int(answers.samples[row])
    image = thumbnail(backbone_view(model, answers.dataset, sample), alt)
    path = answers.dataset.sample_name(sample)
    return Mistake(image, path, predicted, true, output, confidence)


def mistakes_subsection(
    answers: Answers, mistakes: Sequence[Mistake], note: str, title: str = "Worst mistakes"
) -> Subsection:
    shown: Content = Mistakes(mistakes, note) if mistakes else Text("There are none.")
    return Subsection(f"mistakes-{answers.task}", title, [shown])
