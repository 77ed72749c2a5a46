"""The metrics of every kind of task, and calibration, from tensors alone.

Metrics take what was kept of the answers and the labels, with a row for each image, and return
{"metric": number}. They agree with scikit-learn where it has the same metric; that package is not
needed here.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

#: What was kept of the answers, and the labels (`Kind.keep`): a row for each image.
Pairs: TypeAlias = tuple[Tensor, Tensor]
#: The names for people of metrics that are not called as they are.
TITLES = {
    "balanced_accuracy": "balanced accuracy",
    "top5": "top 5",
    "macro_f1": "macro F1",
    "micro_f1": "micro F1",
    "ece": "calibration error",
    "uncalibrated_ece": "calibration error before",
    "mae": "mean absolute error",
    "rmse": "RMSE",
    "pixel_accuracy": "pixel accuracy",
    "auroc": "AUROC",
    "pixel_auroc": "AUROC of pixels",
    "average_precision": "average precision",
    "false_alarms": "false alarms",
    "recall": "recall",
}

#: Metrics between 0 and 1: for people they are percentages.
SHARES = frozenset(
    {
        *("accuracy", "balanced_accuracy", "top5", "pixel_accuracy", "miou"),
        *("false_alarms", "recall"),
        *("map", "macro_f1", "micro_f1", "ece", "uncalibrated_ece"),
    }
)


def shown(name: str, value: float) -> str:
    """A metric for people."""
    return f"{value:.2%}" if name in SHARES else f"{value:.4f}"


def classification_metrics(answers: Pairs, unreadable: int = 0) -> dict[str, Any]:
    """Metrics from logits and labels; every unreadable image is one more wrong answer.

    accuracy; balanced_accuracy, the mean over classes that occur as label of the share of their
    images that is answered right, without unreadable ones; top5 (from six classes on); macro_f1,
    the mean over classes that occur as label or answer; ece, the expected calibration error over 15
    bins of equal width; loss.
    """
    logits, labels = answers
    if not len(labels):
        return {"accuracy": 0.0, "balanced_accuracy": 0.0, "images": unreadable}
    images = len(labels) + unreadable
    classes = logits.shape[1]
    probability, answer = logits.softmax(1).max(1)
    right = answer == labels
    metrics: dict[str, Any] = {
        "accuracy": right.sum().item() / images,
        "images": images,
        "loss": F.cross_entropy(logits, labels).item(),
    }
    if classes > 5:
        best = logits.topk(5, dim=1).indices
        metrics["top5"] = (best == labels[:, None]).any(1).sum().item() / images
    hits = torch.bincount(labels[right], minlength=classes)
    predicted = torch.bincount(answer, minlength=classes)
    true = torch.bincount(labels, minlength=classes)
    metrics["balanced_accuracy"] = (hits / true)[true > 0].mean().item()
    seen = (predicted + true) > 0
    metrics["macro_f1"] = (2 * hits[seen] / (predicted + true)[seen]).mean().item()
    metrics["ece"] = calibration_error(probability, right)
    return metrics


def calibration_error(probability: Tensor, right: Tensor) -> float:
    """Expected calibration error of probabilities, over 15 bins of equal width."""
    bins = (probability * 15).long().clamp(0, 14)  # of nan, too
    gap = torch.zeros(15).index_add(0, bins, right.float() - probability)
    return (gap.abs().sum() / len(probability)).item()


# Several labels per image


def multilabel_metrics(answers: Pairs, thresholds: Tensor) -> dict[str, Any]:
    """Metrics from logits and labels, 0 or 1, both (images, classes).

    map: the mean over classes that occur of the average precision, which needs no threshold. A
    class is predicted where its probability reaches its threshold: macro_f1 is the mean over
    classes (0 for one that is neither predicted nor there), micro_f1 is over all answers. ece: the
    expected calibration error of the probabilities of all classes, over 15 bins. loss.
    """
    logits, labels = answers[0], answers[1].bool()
    if not len(labels):
        return {"map": 0.0, "images": 0}
    probability = logits.sigmoid()
    predicted = probability >= thresholds
    hits = (predicted & labels).sum(0).double()
    both = predicted.sum(0).double() + labels.sum(0)
    precision = average_precision(logits, labels)
    occurs = labels.any(0)
    return {
        "map": precision[occurs].mean().item() if bool(occurs.any()) else 0.0,
        "images": len(labels),
        "loss": F.binary_cross_entropy_with_logits(logits, labels.to(logits)).item(),
        "macro_f1": (2 * hits / both.clamp(min=1)).mean().item(),
        "micro_f1": (2 * hits.sum() / both.sum().clamp(min=1)).item(),
        "ece": calibration_error(probability.flatten(), labels.flatten()),
    }


def average_precision(scores: Tensor, labels: Tensor) -> Tensor:
    """Area under the precision-recall steps by class, 0 if it does not occur; ties are one step."""
    found = torch.zeros(scores.shape[1], dtype=torch.float64)
    for c in range(scores.shape[1]):
        order = scores[:, c].argsort(descending=True)
        ranked, true = scores[order, c], labels[order, c].double()
        hits = true.cumsum(0)
        if not hits[-1]:
            continue
        ends = torch.cat([ranked[1:] != ranked[:-1], torch.ones(1, dtype=torch.bool)])
        hits, predicted = hits[ends], torch.arange(1, len(ranked) + 1, dtype=torch.float64)[ends]
        gained = hits.diff(prepend=torch.zeros(1, dtype=torch.float64))
        found[c] = (hits / predicted * gained).sum() / hits[-1]
    return found


def best_thresholds(logits: Tensor, labels: Tensor) -> Tensor:
    """Threshold of each class with the best F1 on these answers.

    It lies in the middle between the last answer that is predicted and the first that is not; 0.5
    for a class that does not occur, or always does.
    """
    probabilities, labels = logits.sigmoid().double(), labels.bool()
    thresholds = torch.full((logits.shape[1],), 0.5)
    for c in range(logits.shape[1]):
        ranked, order = probabilities[:, c].sort(descending=True)
        true = labels[order, c].double()
        count = true.sum()
        if not 0 < count < len(true):
            continue
        f1 = 2 * true.cumsum(0) / (torch.arange(1, len(true) + 1) + count)
        below = torch.cat([ranked[1:], torch.zeros(1, dtype=torch.float64)])
        f1[ranked == below] = -1  # equal answers stay together
        best = int(f1.argmax())
        thresholds[c] = (ranked[best] + below[best]) / 2
    return thresholds


# Numbers


def regression_metrics(answers: Pairs, std: Tensor) -> dict[str, Any]:
    """Metrics from values and labels, both (images, numbers).

    mae, the mean absolute error in the labels' own units; r2, the share of the variance that is
    explained; rmse; all averaged over the numbers. loss: squared errors in units of `std`.
    """
    values, labels = (part.double() for part in answers)
    if not len(labels):
        return {"r2": 0.0, "images": 0}
    error = values - labels
    return {
        "r2": r_squared(values, labels).mean().item(),
        "images": len(labels),
        "loss": (error / std).square().mean().item(),
        "mae": error.abs().mean().item(),
        "rmse": error.square().mean(0).sqrt().mean().item(),
    }


def r_squared(values: Tensor, labels: Tensor) -> Tensor:
    """R squared of each number; where the labels do not vary, 1 for no error and 0 for any."""
    missed = (values - labels).square().sum(0)
    spread = (labels - labels.mean(0)).square().sum(0)
    varies = labels.amax(0) > labels.amin(0)  # the mean of equal numbers may be rounded
    constant = torch.where(missed > 0, 0.0, 1.0).to(missed)
    return torch.where(varies, 1 - missed / spread.where(varies, 1), constant)


# A class for every pixel


def pixel_counts(answer: Tensor, labels: Tensor, classes: int, ignore: int) -> Tensor:
    """Pixels (images, 3, classes) that are right, predicted and true; ignored ones are neither."""
    images = len(labels)
    valid = (labels != ignore).flatten(1)
    offset = torch.arange(images, device=labels.device)[:, None] * classes
    predicted, true = (offset + x.flatten(1).long() for x in (answer, labels))

    def count(which: Tensor, where: Tensor) -> Tensor:
        return torch.bincount(which[where], minlength=images * classes).view(images, classes)

    right = valid & (predicted == true)
    return torch.stack(
        [count(predicted, right), count(predicted, valid), count(true, valid)], dim=1
    ).cpu()


def intersection_over_union(counts: Tensor) -> Tensor:
    """IoU of each class from counts (…, 3, classes); NaN for a class that occurs in neither."""
    right, predicted, true = counts.double().unbind(-2)
    return right / (predicted + true - right)


def segmentation_metrics(answers: Pairs) -> dict[str, Any]:
    """Metrics from the `pixel_counts` and the loss of each image.

    miou: the mean over classes that occur (as label or answer) of intersection over union, over
    the pixels of all images; pixel_accuracy; loss, the mean over images.
    """
    counts, losses = answers
    if not len(losses):
        return {"miou": 0.0, "images": 0}
    total = counts.sum(0)
    right, _, true = total.double().unbind(0)
    return {
        "miou": intersection_over_union(total).nanmean().item(),
        "images": len(losses),
        "loss": losses.mean().item(),
        "pixel_accuracy": (right.sum() / true.sum().clamp(min=1)).item(),
    }


# Good images, and others

#: The share of good images that may be called anomalous, as far as there are enough to tell.
FALSE_ALARMS = 0.05
_WORST = 0.01  # of the patches: their mean is the score of an image
_BINS = 1_000  # of distances from 0 to 1


def image_scores(maps: Tensor) -> Tensor:
    """The score of every image: the mean of its largest distances (b, rows, columns)."""
    patches = maps.flatten(1)
    return patches.topk(max(1, round(_WORST * patches.shape[1])), dim=1).values.mean(1)


def alarm_threshold(good: Tensor) -> float:
    """The threshold that as few held-out good images are above as `FALSE_ALARMS` allows."""
    return float(good.topk(_allowed(len(good))).values[-1])


def false_alarm_estimate(images: int) -> tuple[float, float, float]:
    """The share of good images above `alarm_threshold` of so many: expected, and 90 % of cases.

    A new good image exceeds the k-th largest of n scores with a probability that has the
    distribution Beta(k, n + 1 - k), whatever the distribution of scores is.
    """
    k = _allowed(images)

    def quantile(wanted: float) -> float:
        low, high = 0.0, 1.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            fewer = sum(
                math.exp(
                    math.lgamma(images + 1) - math.lgamma(i + 1) - math.lgamma(images - i + 1)
                    + i * math.log(middle) + (images - i) * math.log1p(-middle)
                )
                for i in range(k)
            )  # fmt: skip
            low, high = (middle, high) if 1 - fewer < wanted else (low, middle)
        return low

    return k / (images + 1), quantile(0.05), quantile(0.95)


def _allowed(images: int) -> int:
    return max(1, math.floor(FALSE_ALARMS * (images + 1)))


def pixel_histograms(maps: Tensor, wrong: Tensor) -> Tensor:
    """Histograms of the distances of good and of wrong pixels (b, 2, bins), of masks (b, h, w)."""
    fields = F.interpolate(maps[:, None], wrong.shape[1:], mode="bilinear", align_corners=False)
    bins = (fields[:, 0] * _BINS).long().clamp(max=_BINS - 1) + _BINS * wrong
    counts = torch.zeros(len(maps), 2 * _BINS)
    counts.scatter_add_(1, bins.flatten(1), torch.ones(1).expand_as(bins.flatten(1)))
    return counts.view(-1, 2, _BINS)


def anomaly_metrics(answers: Pairs, threshold: float) -> dict[str, Any]:
    """Metrics from what `Anomaly.keep` kept: scores and histograms, and labels 0 or 1.

    false_alarms, the share of good images whose score exceeds the threshold; recall, the share of
    others that do; balanced_accuracy, the mean over both of the share that is right, or that of
    good images alone if there are no others. With both: auroc, the area under the ROC curve, and
    average_precision; with masks pixel_auroc, that of pixels, of distances rounded to 0.001.
    """
    kept, labels = answers[0].double(), answers[1].bool()
    if not len(labels):
        return {"balanced_accuracy": 0.0, "images": 0}
    scores, alarms = kept[:, 0], kept[:, 0] > threshold
    found: dict[str, Any] = {"images": len(labels), "threshold": threshold}
    if bool((~labels).any()):
        found["false_alarms"] = alarms[~labels].double().mean().item()
    if bool(labels.any()):
        found["recall"] = alarms[labels].double().mean().item()
    right = [1 - found["false_alarms"]] if "false_alarms" in found else []
    right += [found["recall"]] if "recall" in found else []
    found["balanced_accuracy"] = sum(right) / len(right)
    if len(right) == 2:
        values, ranks = torch.unique(scores, return_inverse=True)
        both = torch.stack(
            [torch.bincount(ranks[labels == x], minlength=len(values)) for x in (0, 1)]
        )
        found["auroc"] = auroc(both)
        found["average_precision"] = average_precision(scores[:, None], labels[:, None]).item()
    if kept.shape[1] > 1:
        counts = kept[:, 1:].sum(0).view(2, -1)
        if bool((counts.sum(1) > 0).all()):
            found["pixel_auroc"] = auroc(counts)
    return found


def auroc(counts: Tensor) -> float:
    """The area under the ROC curve, from counts of good and wrong ones by rising score (2, n)."""
    good, wrong = counts.double()
    below = good.cumsum(0) - good / 2
    return float((wrong * below).sum() / (wrong.sum() * good.sum()))


# Calibration: the temperature that makes a task's probabilities as sure as they are right
#
# Logits are divided by one number (Guo et al., 2017), which minimises the loss on the validation
# images. `TaskHead.divide` puts it into the weights, so nothing else has to know about it. Few
# images say little about it, so it is drawn toward 1 by how few they are, and is 1 unless it
# clearly lowers the loss of images that it was not found on. It makes answers no surer than the
# lower end of the interval of their accuracy.

#: The highest temperature, and one divided by the lowest.
MAX_TEMPERATURE = 20.0
_PARTS = 5
#: Images. With fewer, their accuracy is known within five points at best, and the choice of the
#: task was made on the same images: a temperature below 1 would believe in their luck.
_FEWEST = 100
_SPREAD = 0.3  # of the logarithm of temperatures: 0.55 to 1.8 are usual
_ROWS = 4_096  # of logits that are in double precision at once
_Z = 1.645  # of a normal distribution: 90 % are within


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
    found = best_temperature(logits, labels, _SPREAD)
    return found if found >= 1 else max(found, _least_temperature(logits, labels))


def _least_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature, at most 1, with which answers are as sure as their accuracy at its lowest.

    Images to come may be harder, and the task was chosen for its luck with these.
    """
    right = float((logits.argmax(1) == labels).double().mean())
    surely, _ = wilson(right, len(labels))
    low, high = 1 / MAX_TEMPERATURE, 1.0
    for _ in range(20):
        middle = (low * high) ** 0.5
        parts = [(z / middle).softmax(1).amax(1).sum() for z in torch.split(logits, _ROWS)]
        sure = float(torch.stack(parts).double().sum()) / len(labels)
        low, high = (middle, high) if sure > surely else (low, middle)
    return high


def wilson(share: float, images: float) -> tuple[float, float]:
    """Wilson's 90 % interval of a share that was measured on so many images."""
    square = _Z * _Z / images
    middle = (share + square / 2) / (1 + square)
    half = math.sqrt(max(0.0, share * (1 - share)) * square + square * square / 4) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


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
    low, high = 1 / MAX_TEMPERATURE, MAX_TEMPERATURE  # of the inverse, in which the loss is convex
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
