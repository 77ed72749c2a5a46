"""The temperature is the optimum that scipy finds, and close to scikit-learn's."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from sklearn.calibration import _TemperatureScaling
from torch import Tensor

from engram.tasks.metrics import MAX_TEMPERATURE, as_pairs, best_temperature, temperature, wilson


def overconfident(images: int, classes: int, by: float) -> tuple[Tensor, Tensor]:
    """Logits that are `by` times too large for labels drawn from them."""
    logits = torch.randn(images, classes) * 2
    labels = torch.multinomial(logits.softmax(1), 1)[:, 0]
    return logits * by, labels


@pytest.mark.parametrize(("images", "classes", "by"), [(400, 5, 3.0), (60, 20, 0.3), (5000, 3, 1)])
def test_the_temperature_is_the_optimum(images: int, classes: int, by: float) -> None:
    logits, labels = overconfident(images, classes, by)
    uniform = logits.double().log_softmax(1).new_full((images, classes), 1 / classes)
    doubt = 1 / (images + 1)
    target = (1 - doubt) * F.one_hot(labels, classes) + doubt * uniform

    def loss(log: float) -> float:
        return float(F.cross_entropy(logits.double() / np.exp(log), target))

    best = minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-9})
    assert best_temperature(logits, labels) == pytest.approx(np.exp(best.x), rel=1e-5)


def test_with_many_images_it_is_that_of_scikit_learn() -> None:
    logits, labels = overconfident(5000, 4, 2.5)
    theirs = _TemperatureScaling().fit(logits.numpy(), labels.numpy())
    found = best_temperature(logits, labels)
    assert found == pytest.approx(1 / theirs.beta_, rel=0.01)
    assert found == pytest.approx(2.5, rel=0.1)


def test_answers_that_are_all_right_are_not_made_certain() -> None:
    """Ten of ten right: as sure as that, not more."""
    logits, labels = torch.eye(2).repeat(5, 1) * 9, torch.arange(2).repeat(5)
    sure = (logits / best_temperature(logits, labels)).softmax(1).amax(1)
    assert sure.numpy() == pytest.approx(1 - 1 / 22)


def test_odd_answers_have_a_temperature_within_limits() -> None:
    assert best_temperature(torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])) == 1.0
    assert best_temperature(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)) == 1.0
    wrong = best_temperature(torch.eye(3) * 9, torch.tensor([1, 2, 0]))
    assert wrong == pytest.approx(MAX_TEMPERATURE, rel=1e-3)
    certain = best_temperature(torch.eye(3).repeat(900, 1) * 0.01, torch.arange(3).repeat(900))
    assert certain == pytest.approx(1 / MAX_TEMPERATURE, rel=1e-3)


def test_a_sigmoid_is_a_softmax_over_two() -> None:
    logits, labels = torch.randn(6, 3), torch.randint(2, (6, 3))
    both, flat = as_pairs(logits, labels)
    own = F.binary_cross_entropy_with_logits(logits, labels.float())
    assert float(F.cross_entropy(both, flat)) == pytest.approx(float(own))


@pytest.mark.parametrize("images", [150, 400, 5000])
def test_answers_become_no_surer_than_they_are_surely_right(images: int) -> None:
    logits, labels = overconfident(images, 5, 0.3)
    found, best = temperature(logits, labels), best_temperature(logits, labels, 0.3)
    right = float((logits.argmax(1) == labels).double().mean())
    sure = float((logits / found).softmax(1).amax(1).mean())
    assert best < found < 1
    assert sure == pytest.approx(wilson(right, images)[0], abs=0.001)


def test_answers_that_are_too_sure_become_as_sure_as_they_are_right() -> None:
    logits, labels = overconfident(400, 5, 3.0)
    assert temperature(logits, labels) == best_temperature(logits, labels, 0.3) > 1
