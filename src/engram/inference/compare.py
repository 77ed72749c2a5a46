"""Two versions of a task on the same images: what changed, by class and by image."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from engram.errors import EngramError
from engram.inference.evaluate import Answers


@dataclass(frozen=True)
class Change:
    """An image that the two versions answer differently."""

    image: str
    label: Any  # a class, or the classes of a multilabel task
    before: Any
    after: Any


@dataclass(frozen=True)
class VersionComparison:
    """The score of every class before and after, and the images whose answer changed.

    Only tasks that answer with classes of the image have `changes`.
    """

    classes: dict[str, tuple[float, float]]
    changes: list[Change]

    @property
    def mended(self) -> int:
        """Images that were wrong and are right."""
        return sum(change.after == change.label for change in self.changes)

    @property
    def broken(self) -> int:
        """Images that were right and are wrong."""
        return sum(change.before == change.label for change in self.changes)


def compare(before: Answers, after: Answers) -> VersionComparison:
    """Compare the answers of two versions of a task for the same split.

    Raises:
        EngramError: The versions are different kinds of task, or read different images.
    """
    if before.dataset.kind != after.dataset.kind:
        raise EngramError(
            f"{after.task!r} is a {after.dataset.kind} task, and the version to compare it with a "
            f"{before.dataset.kind} task; compare versions of one task."
        )
    if before.samples.tolist() != after.samples.tolist():
        raise EngramError("An image could be read only once of two times; run the command again.")
    kind = after.kind
    scores = [kind.class_scores(one.logits, one.labels).tolist() for one in (before, after)]
    classes = {
        name: (was, now)
        for name, was, now in zip(after.dataset.classes, *scores, strict=True)
        if not (math.isnan(was) or math.isnan(now))
    }
    changes = []
    if kind.ranked and not kind.per_pixel:
        for i, sample in enumerate(after.samples.tolist()):
            old, new = _answer(before, i), _answer(after, i)
            if old != new:
                name = after.dataset.sample_name(sample)
                changes.append(Change(name, _label(after, i), old, new))
    return VersionComparison(classes, changes)


def _answer(answers: Answers, row: int) -> Any:
    kind, names = answers.kind, answers.dataset.classes
    answer = kind.answer(answers.logits[row], names, answers.fitted, top_k=1)
    found = kind.table_row(answer)[""]
    return sorted(found) if isinstance(found, list) else found


def _label(answers: Answers, row: int) -> Any:
    label, names = answers.labels[row], answers.dataset.classes
    if label.ndim:
        return sorted(name for name, there in zip(names, label.tolist(), strict=True) if there)
    return names[int(label)]
