"""Every metric against scikit-learn or a slow computation of its own."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import beta
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    jaccard_score,
    log_loss,
    mean_absolute_error,
    r2_score,
    roc_auc_score,
    root_mean_squared_error,
    top_k_accuracy_score,
)

from engram.tasks.metrics import (
    alarm_threshold,
    anomaly_metrics,
    average_precision,
    best_thresholds,
    classification_metrics,
    false_alarm_estimate,
    intersection_over_union,
    multilabel_metrics,
    pixel_counts,
    r_squared,
    regression_metrics,
    segmentation_metrics,
    shown,
)

# One class per image


def single(images: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (images,), generator=generator)
    logits = torch.randn(images, classes, generator=generator) * 2
    logits[torch.arange(images), labels] += 1.5
    return logits, labels


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.parametrize(("images", "classes"), [(500, 12), (40, 30), (60, 2)])
def test_accuracy_f1_loss_and_calibration_are_those_of_scikit_learn(
    images: int, classes: int
) -> None:
    logits, labels = single(images, classes)
    found = classification_metrics((logits, labels))
    probability, said = logits.double().softmax(1).numpy(), logits.argmax(1).numpy()
    every = list(range(classes))
    assert found["images"] == images
    assert found["accuracy"] == pytest.approx(accuracy_score(labels, said))
    even = balanced_accuracy_score(labels, said)
    assert found["balanced_accuracy"] == pytest.approx(even, abs=1e-6)
    assert found["macro_f1"] == pytest.approx(f1_score(labels, said, average="macro"), abs=1e-6)
    assert found["loss"] == pytest.approx(log_loss(labels, probability, labels=every), abs=1e-5)
    assert found["ece"] == pytest.approx(calibration_error(probability, labels.numpy()), abs=1e-6)
    if classes > 5:
        top5 = top_k_accuracy_score(labels, probability, k=5, labels=every)
        assert found["top5"] == pytest.approx(top5)
    else:
        assert "top5" not in found


def calibration_error(probability: np.ndarray, labels: np.ndarray, bins: int = 15) -> float:
    """By its definition, bin by bin."""
    sure, right = probability.max(1), probability.argmax(1) == labels
    total = 0.0
    for b in range(bins):
        inside = (sure >= b / bins) & ((sure < (b + 1) / bins) | (b == bins - 1))
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - sure[inside].mean())
    return total


def test_an_unreadable_image_is_a_wrong_answer() -> None:
    logits, labels = torch.eye(4) * 9, torch.arange(4)
    found = classification_metrics((logits, labels), unreadable=4)
    assert (found["accuracy"], found["images"]) == (0.5, 8)
    nothing = classification_metrics((torch.zeros(0, 4), torch.zeros(0)), unreadable=3)
    assert nothing == {"accuracy": 0.0, "balanced_accuracy": 0.0, "images": 3}


# Several labels per image


def several(images: int = 60, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    labels = (torch.rand(images, classes) < 0.3).long()
    logits = torch.randn(images, classes) + labels
    return (logits * 2).round() / 2, labels  # with ties


def test_mean_average_precision_and_f1_are_those_of_scikit_learn() -> None:
    logits, labels = several()
    thresholds = torch.tensor([0.5, 0.2, 0.9, 0.62, 0.31])
    found = multilabel_metrics((logits, labels), thresholds)
    predicted = (logits.sigmoid() >= thresholds).numpy()
    true = labels.numpy()
    expected = {
        "map": average_precision_score(true, logits.numpy(), average="macro"),
        "macro_f1": f1_score(true, predicted, average="macro", zero_division=0),
        "micro_f1": f1_score(true, predicted, average="micro", zero_division=0),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-6), name
    assert found["images"] == 60


def test_a_class_that_never_occurs_is_no_part_of_the_mean_precision() -> None:
    logits, labels = several()
    labels[:, 2] = 0
    rest = [0, 1, 3, 4]
    expected = average_precision_score(labels[:, rest].numpy(), logits[:, rest].numpy())
    found = multilabel_metrics((logits, labels), torch.full((5,), 0.5))
    assert found["map"] == pytest.approx(expected, abs=1e-6)
    assert average_precision(logits, labels)[2] == 0
    assert multilabel_metrics((logits, labels * 0), torch.full((5,), 0.5))["map"] == 0
    assert multilabel_metrics((torch.zeros(0, 5),) * 2, torch.zeros(5)) == {"map": 0.0, "images": 0}


def test_no_other_threshold_has_a_better_f1() -> None:
    logits, labels = several(40, 6)
    labels[:, 3] = 0  # never: nothing to choose by
    labels[:, 4] = 1  # always
    found = best_thresholds(logits, labels)
    assert found[3] == found[4] == 0.5
    for c in (0, 1, 2, 5):
        probability = logits[:, c].sigmoid().numpy()

        def f1(threshold: float, c: int = c, probability: np.ndarray = probability) -> float:
            predicted = probability >= threshold
            return float(f1_score(labels[:, c].numpy(), predicted, zero_division=0))

        ranked = np.unique(probability)  # thresholds between the same two answers say the same
        between = (ranked[1:] + ranked[:-1]) / 2
        best = max(f1(threshold) for threshold in (0.0, *between, 1.0))
        assert f1(float(found[c])) == pytest.approx(best)


# Numbers


def test_mae_and_r2_are_those_of_scikit_learn() -> None:
    labels = torch.randn(50, 3) * torch.tensor([1.0, 10.0, 100.0]) + 5
    values = labels + torch.randn(50, 3)
    found = regression_metrics((values, labels), torch.tensor([1.0, 10.0, 100.0]))
    assert found["mae"] == pytest.approx(mean_absolute_error(labels, values), rel=1e-5)
    assert found["r2"] == pytest.approx(r2_score(labels, values), rel=1e-5)
    assert found["rmse"] == pytest.approx(root_mean_squared_error(labels, values), rel=1e-5)
    assert regression_metrics((torch.zeros(0, 3),) * 2, torch.ones(3)) == {"r2": 0.0, "images": 0}


def test_labels_that_do_not_vary_are_judged_as_scikit_learn_does() -> None:
    same = torch.full((4, 1), 3.0)
    for values in (same, same + 1):
        found = regression_metrics((values, same), torch.ones(1))
        assert found["r2"] == r2_score(same, values)


@pytest.mark.parametrize("count", [3, 7, 61])
def test_equal_labels_count_as_equal_although_their_mean_is_rounded(count: int) -> None:
    labels = torch.full((count, 1), 0.1, dtype=torch.float64)
    assert r_squared(labels + 1e-3, labels).item() == 0
    assert r_squared(labels.clone(), labels).item() == 1


# A class for every pixel


@pytest.mark.parametrize("classes", [2, 5])
def test_mean_iou_and_pixel_accuracy_are_what_pixels_say(classes: int) -> None:
    labels = torch.randint(0, classes, (9, 6, 7)).to(torch.uint8)
    labels[torch.rand(labels.shape) < 0.2] = 255
    answer = torch.randint(0, classes, labels.shape)
    counts = torch.cat(
        [
            pixel_counts(a, b, classes, 255)
            for a, b in zip(answer.split(4), labels.split(4), strict=True)
        ]
    )
    found = segmentation_metrics((counts, torch.arange(9.0)))
    pixels = [(int(t), int(a)) for t, a in zip(labels.flatten(), answer.flatten(), strict=True)]
    pixels = [(true, said) for true, said in pixels if true != 255]
    right = sum(true == said for true, said in pixels)
    assert found["pixel_accuracy"] == pytest.approx(right / len(pixels))
    assert found["miou"] == pytest.approx(
        jaccard_score(*zip(*pixels, strict=True), average="macro")
    )
    assert found["images"] == 9
    assert found["loss"] == 4.0
    first = [
        (t, a) for t, a in zip(labels[0].flatten(), answer[0].flatten(), strict=True) if t < 255
    ]
    for c in range(classes):
        both = sum(t == c and a == c for t, a in first)
        either = sum(t == c or a == c for t, a in first)
        assert intersection_over_union(counts)[0, c] == pytest.approx(both / either)


def test_a_class_that_is_nowhere_is_no_part_of_the_mean_iou() -> None:
    labels = torch.zeros(1, 2, 2, dtype=torch.uint8)
    counts = pixel_counts(labels, labels, 3, 255)
    assert segmentation_metrics((counts, torch.zeros(1)))["miou"] == 1.0
    assert segmentation_metrics((torch.zeros(0, 3, 3), torch.zeros(0))) == {
        "miou": 0.0,
        "images": 0,
    }


def test_shares_are_percentages_for_people() -> None:
    assert shown("accuracy", 0.98) == "98.00%"
    assert shown("loss", 0.98) == "0.9800"


# Good images, and others


def test_the_threshold_is_one_that_few_good_images_reach() -> None:
    scores = torch.arange(1.0, 100.0)  # 99 of them: 5 of 100 may exceed it
    assert alarm_threshold(scores[torch.randperm(99)]) == 95.0
    assert alarm_threshold(torch.tensor([0.3, 0.1, 0.2])) == pytest.approx(0.3)


@pytest.mark.parametrize("images", [1, 10, 19, 99, 1_000])
def test_false_alarms_are_estimated_as_an_order_statistic(images: int) -> None:
    k = max(1, math.floor(0.05 * (images + 1)))
    expected = [k / (images + 1), *beta(k, images + 1 - k).ppf([0.05, 0.95])]
    assert false_alarm_estimate(images) == pytest.approx(expected, abs=1e-5)


def test_of_good_images_alone_there_is_no_area() -> None:
    found = anomaly_metrics((torch.tensor([[0.1], [0.3]]), torch.zeros(2).long()), 0.2)
    assert "auroc" not in found
    assert (found["false_alarms"], found["balanced_accuracy"]) == (0.5, 0.5)
    found = anomaly_metrics((torch.tensor([[0.1], [0.3]]), torch.ones(2).long()), 0.2)
    assert "auroc" not in found
    assert (found["recall"], found["balanced_accuracy"]) == (0.5, 0.5)


def test_equal_scores_count_half() -> None:
    scores = torch.tensor([0.2, 0.2, 0.1, 0.4, 0.4, 0.2])
    labels = torch.tensor([0, 1, 0, 1, 0, 1])
    found = anomaly_metrics((scores[:, None], labels), 0.3)
    assert found["auroc"] == pytest.approx(roc_auc_score(labels, scores))
