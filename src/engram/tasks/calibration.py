"""Calibration: the temperature that makes a task's probabilities as sure as they are right.

Logits are divided by one number, the temperature (Guo et al., 2017), which minimises the loss on
the validation images. It changes no order of classes, so no accuracy. `TaskHead.divide` puts it
into the weights of the head: then logits, probabilities, averages of tasks, exported files and
everything else that reads the head are calibrated, and nothing has to know about it.

Few images say little about it, so `temperature` is drawn toward 1 by how few they are, and is 1
unless it clearly lowers the loss of images that it was not found on.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

#: The highest temperature, and one divided by the lowest.
MOST = 20.0
_PARTS = 5
#: Images. With fewer, their accuracy is known within five points at best, and the choice of the
#: task was made on the same images: a temperature below 1 would believe in their luck.
_FEWEST = 100
_SPREAD = 0.3  # of the logarithm of temperatures: 0.55 to 1.8 are usual
_ROWS = 4_096  # of logits that are in double precision at once


def temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature for logits of held-out images, or 1 where none would help.

    It helps if temperatures found on four fifths of the images lower the loss of the others by more
    than two standard errors.
    """
    if len(labels) < _FEWEST:
        return 1.0
    part = torch.arange(len(labels)) % _PARTS
    gains = torch.zeros(len(labels), dtype=torch.float64)
    for i in range(_PARTS):
        rest, own = part != i, part == i
        found = best_temperature(logits[rest], labels[rest], _SPREAD)
        x, y = logits[own].double(), labels[own]
        gains[own] = F.cross_entropy(x, y, reduction="none")
        gains[own] -= F.cross_entropy(x / found, y, reduction="none")
    if float(gains.mean()) <= 2 * float(gains.std()) / len(gains) ** 0.5:
        return 1.0
    return best_temperature(logits, labels, _SPREAD)


def best_temperature(logits: Tensor, labels: Tensor, spread: float = math.inf) -> float:
    """The temperature with the lowest cross-entropy of logits (images, classes) for their labels.

    Before any image is seen, its logarithm is taken to be normal around 0 with this spread. One
    image more with a label that may be any class is counted, spread over all images, as in Platt's
    targets: where every answer is right, the best temperature would be 0 without it. 1 where there
    is no image, or where all logits of each image are equal.
    """
    if not len(labels):
        return 1.0
    doubt = 1 / (len(labels) + 1)
    low, high = 1 / MOST, MOST  # of the inverse, in which the loss is convex
    inverse = 1.0
    for _ in range(100):
        slope, bend = _derivatives(logits, labels, inverse, doubt)
        known = spread**2 * len(labels)  # how much the images weigh against the prior
        slope += math.log(inverse) / (inverse * known)
        bend += max(0.0, 1 - math.log(inverse)) / (inverse**2 * known)
        low, high = (low, inverse) if slope > 0 else (inverse, high)
        if bend <= 0:  # nothing depends on it
            return 1.0
        step = inverse - slope / bend
        before, inverse = inverse, step if low < step < high else (low + high) / 2
        if abs(inverse - before) < 1e-7 * before:
            break
    return 1 / inverse


def _derivatives(
    logits: Tensor, labels: Tensor, inverse: float, doubt: float
) -> tuple[float, float]:
    """First and second derivative of the mean loss by the inverse of the temperature."""
    slope = bend = 0.0
    for z, y in zip(torch.split(logits, _ROWS), torch.split(labels, _ROWS), strict=True):
        z = z.double()
        z = z - z.mean(1, keepdim=True)  # so that a label which may be any class has 0
        probability = (z * inverse).softmax(1)
        expected = (probability * z).sum(1)
        slope += float((expected - (1 - doubt) * z.gather(1, y[:, None])[:, 0]).sum())
        bend += float((probability * z.square()).sum() - expected.square().sum())
    return slope / len(labels), bend / len(labels)


def as_pairs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sigmoids as softmaxes over two: (images * classes, 2), and labels of 0 and 1."""
    both = torch.stack([torch.zeros_like(logits), logits], -1)
    return both.flatten(0, 1), labels.long().flatten()
