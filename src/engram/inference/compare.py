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
    """The score of every class before and after, and images whose classes changed, if any."""

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
    for i, sample in enumerate(
        after.samples.tolist() if kind.ranked and not kind.per_pixel else ()
    ):
        label = after.labels[i]
        right = label.nonzero()[:, 0].tolist() if label.ndim else [int(label)]
        old, new = (kind.labels(one.logits[i], one.fitted)[0] for one in (before, after))
        if old != new:
            found = (sorted(after.dataset.classes[j] for j in one) for one in (right, old, new))
            shown = (names if label.ndim else names[0] for names in found)
            changes.append(Change(after.dataset.sample_name(sample), *shown))
    return VersionComparison(classes, changes)
