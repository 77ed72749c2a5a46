"""Labels that look wrong, by the answers of heads that did not learn from the image.

Images are ranked by the odds of the likeliest class against the label. On four datasets with
changed labels that is as good as the probability of the label and better than the margin, and what
a limit of the odds lists is right more often than what the thresholds of confident learning list
(Northcutt, Jiang and Chuang, JAIR 2021): benchmarks/results/check.md.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from engram.inference.evaluate import Answers

#: Odds of another class against the label from which it is listed, and from which it is counted
#: where nobody asked. With clean labels, 1 to 2 % and 0.2 to 0.5 % of the images have such odds.
SUSPECTED, WRONG = 30.0, 100.0
_WORTH_SAYING = 0.01  # of the labels


class Suspect(NamedTuple):
    """An image whose label looks wrong."""

    row: int
    suggested: int  # class
    odds: float  # how many times likelier it is than the label


def label_odds(logits: Tensor, labels: Tensor) -> Tensor:
    """Odds (images) of the likeliest class against the label: 1 and more."""
    logits = logits.double()
    return (logits.amax(1) - logits.gather(1, labels[:, None])[:, 0]).exp()


def suspected_labels(logits: Tensor, labels: Tensor, least: float = SUSPECTED) -> list[Suspect]:
    """Images whose label looks wrong by odds of at least so much, the most suspicious first.

    The logits are calibrated (images, classes), from heads that did not learn from the image.
    """
    odds, suggested = label_odds(logits, labels), logits.argmax(1)
    rows = (odds >= least).nonzero()[:, 0]
    rows = rows[odds[rows].argsort(descending=True, stable=True)]
    return [Suspect(i, int(suggested[i]), float(odds[i])) for i in rows.tolist()]


def wrong_labels(answers: Answers | None) -> int:
    """Number of labels of held-out images that look wrong, if it is worth saying."""
    if answers is None or answers.dataset.kind != "classification" or not len(answers.labels):
        return 0
    found = len(suspected_labels(answers.logits, answers.labels, WRONG))
    return found if found >= _WORTH_SAYING * len(answers.labels) else 0
