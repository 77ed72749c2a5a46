"""Sums over features: the head that they give, and that they add up exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

from engram import EngramError
from engram.tasks.class_statistics import ClassStatistics
from engram.tasks.feature_sums import PRIOR, FeatureSums

CLASSES, FEATURES = 4, 12


def drawn(images: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features of so many images of each class, and their labels."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(images * CLASSES) % CLASSES
    means = 2 * torch.randn(CLASSES, FEATURES, generator=random)
    return means[labels] + torch.randn(len(labels), FEATURES, generator=random) + 3, labels


def sums_of(features: Tensor, labels: Tensor) -> FeatureSums:
    return FeatureSums.from_features(features, labels, CLASSES)


def assert_same_head(one: FeatureSums, two: FeatureSums) -> None:
    for mine, theirs in zip(one.solve(), two.solve(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_the_head_is_that_of_linear_discriminant_analysis() -> None:
    """scikit-learn's, with its covariance shrunk as much."""
    features, labels = drawn(6)
    sums, x = sums_of(features, labels), features.double()
    means = sums.sums / sums.images[:, None]
    within, spread = (x - means[labels]).square().sum(), (x - x.mean(0)).square().sum()
    prior = PRIOR * FEATURES * float(spread) / len(x)  # the trace of the prior
    shrinkage = prior / (prior + float(within))
    oracle = LinearDiscriminantAnalysis(
        solver="lsqr", shrinkage=shrinkage, priors=np.full(CLASSES, 1 / CLASSES)
    ).fit(x.numpy(), labels.numpy())
    head = sums.solve()
    ours, theirs = (x @ head.weight.mT + head.bias).numpy(), oracle.decision_function(x.numpy())
    ours, theirs = (z - z.mean(1, keepdims=True) for z in (ours, theirs))
    np.testing.assert_allclose(ours / ours.std(), theirs / theirs.std(), atol=1e-6)


def test_images_learned_in_two_parts_give_the_head_of_all_at_once() -> None:
    features, labels = drawn(5)
    both = sums_of(features[:7], labels[:7]) + sums_of(features[7:], labels[7:])
    assert_same_head(both, sums_of(features, labels))


def test_forgotten_images_leave_the_head_of_the_others() -> None:
    features, labels = drawn(5)
    rest = sums_of(features, labels) - sums_of(features[-6:], labels[-6:])
    assert_same_head(rest, sums_of(features[:-6], labels[:-6]))
    assert rest.possible


def test_images_that_were_never_learned_cannot_be_forgotten() -> None:
    features, labels = drawn(2)
    others, _ = drawn(1, seed=1)
    sums = sums_of(features, labels)
    assert not (sums - sums_of(others[:1], labels[:1])).possible
    assert not (sums - sums_of(features[:3], labels[:3]) - sums_of(features[:1], labels[:1])
                - sums_of(features[4:5], labels[4:5])).possible  # fmt: skip


def test_the_order_of_classes_does_not_matter() -> None:
    features, labels = drawn(3)
    order = [2, 0, 3, 1]
    head, moved = sums_of(features, labels).solve(), sums_of(features, labels).among(order, CLASSES)
    torch.testing.assert_close(moved.solve().weight[order], head.weight)


@pytest.mark.parametrize("images", [2, 5])
def test_an_answer_for_a_left_out_image_is_that_of_a_head_without_it(images: int) -> None:
    features, labels = drawn(images)
    features, labels = features[:-1], labels[:-1]  # of unequal classes
    sums = sums_of(features, labels)
    found, kept = sums.leave_one_out(features, labels)
    several = [i for i, k in enumerate(labels.tolist()) if sums.images[k] > 1]
    assert kept.tolist() == labels[several].tolist()
    for logits, i in zip(found, several, strict=True):
        head = (sums - sums_of(features[i : i + 1], labels[i : i + 1])).solve()
        expected = head.weight @ features[i].double() + head.bias
        logits, expected = (z - z.mean() for z in (logits, expected))  # but for the temperature
        torch.testing.assert_close(logits / logits.std(), expected / expected.std())


def test_one_image_a_class_is_enough() -> None:
    features, labels = drawn(1)
    head = sums_of(features, labels).solve()
    assert (features.double() @ head.weight.mT + head.bias).argmax(1).tolist() == labels.tolist()
    assert sums_of(features, labels).leave_one_out(features, labels)[1].tolist() == []


def test_a_class_with_one_image_is_answered_as_often_as_one_with_ten() -> None:
    """Its mean is further from all images than that of ten, which says nothing about them."""
    random = torch.Generator().manual_seed(0)
    labels = torch.tensor([0] + [1] * 10)
    shift = torch.tensor([0.0, 0.6])
    x = torch.randn(11, 200, generator=random) + shift[labels][:, None]
    head = FeatureSums.from_features(x, labels, 2).solve()
    truth = torch.arange(200) % 2
    new = torch.randn(200, 200, generator=random) + shift[truth][:, None]
    said = (new.double() @ head.weight.mT + head.bias).argmax(1)
    assert (said == truth).double().mean() > 0.9
    assert 0.35 < said.double().mean() < 0.65


def test_features_that_are_there_twice_are_no_more_evidence() -> None:
    """The temperature counts features that vary together once."""
    features, labels = drawn(5)

    def probabilities(x: Tensor) -> Tensor:
        head = sums_of(x, labels).solve()
        return (x.double() @ head.weight.mT + head.bias).softmax(1)

    once, twice = probabilities(features), probabilities(torch.cat([features, features], 1))
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=1e-9)


def test_sums_of_no_images_are_refused() -> None:
    features, labels = drawn(2)
    sums = sums_of(features, labels)
    with pytest.raises(EngramError, match="teach the task anew"):
        (sums - FeatureSums(0 * sums.images, 0 * sums.sums, 3 * sums.gram)).solve()


def test_equal_images_have_a_head() -> None:
    head = sums_of(torch.ones(8, FEATURES), torch.arange(8) % CLASSES).solve()
    assert head.weight.isfinite().all()
    assert head.bias.isfinite().all()


def statistics_of(features: Tensor, labels: Tensor) -> ClassStatistics:
    """Class statistics of images, from their features."""
    found, sums = ClassStatistics(CLASSES, FEATURES), sums_of(features, labels)
    found.estimate(sums.images, sums.sums, features.double().square().sum(0))
    found.correlate(features, labels)
    return found


@pytest.mark.parametrize("images", [2, 30])
def test_class_statistics_are_those_of_the_images(images: int) -> None:
    features, labels = drawn(images)
    found = sums_of(features, labels).class_statistics()
    others, _ = drawn(5, seed=1)
    expected = statistics_of(features, labels).likeness(others)
    torch.testing.assert_close(found.likeness(others), expected, rtol=1e-2, atol=1e-3)


def test_images_are_compared_with_those_that_they_are_not_among() -> None:
    features, labels = drawn(2)
    likeness = sums_of(features, labels).left_out_likeness(features, labels)
    for i in range(len(labels)):
        others = torch.arange(len(labels)) != i
        left = statistics_of(features[others], labels[others]).likeness(features[i : i + 1])
        torch.testing.assert_close(likeness[i : i + 1], left, rtol=1e-2, atol=1e-3)


def test_of_many_images_every_class_keeps_most() -> None:
    features, labels = drawn(30)
    sums = sums_of(features, labels)
    left_out, known = (
        sums.left_out_likeness(features, labels),
        sums.class_statistics().likeness(features),
    )
    assert left_out.shape == (120,)
    assert float(left_out.mean()) < float(known.mean())
    torch.testing.assert_close(left_out, known, rtol=0.3, atol=0.1)


def test_an_image_that_is_alone_in_its_class_is_not_compared() -> None:
    features, labels = drawn(2)
    alone = labels != 0
    alone[0] = True  # of the class 0, one is left
    sums = sums_of(features[alone], labels[alone])
    assert len(sums.left_out_likeness(features[alone], labels[alone])) == int(alone.sum()) - 1
