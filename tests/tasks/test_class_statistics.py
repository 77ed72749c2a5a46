"""Means and spread are those of the data, familiarity is a distance, drawn features are alike."""

import numpy as np
import pytest
import torch
from torch import Tensor

from engram.tasks.class_statistics import (
    RANK,
    ClassStatistics,
    largest_eigenvectors,
    statistics_shapes,
)

GROUPS, FEATURES = 3, 12


def images(count: int = 4000) -> tuple[Tensor, Tensor]:
    """Features of three classes with one covariance, and the classes."""
    mix = torch.randn(FEATURES, FEATURES) / 2 + torch.eye(FEATURES)
    groups = torch.randint(GROUPS, (count,))
    means = 4 * torch.randn(GROUPS, FEATURES) + 7
    return means[groups] + torch.randn(count, FEATURES) @ mix, groups


def kept(x: Tensor, groups: Tensor, number: int = GROUPS) -> ClassStatistics:
    found, x = ClassStatistics(number, x.shape[1]), x.double()
    counts = torch.bincount(groups, minlength=number).double()
    sums = torch.zeros(number, x.shape[1], dtype=torch.float64).index_add_(0, groups, x)
    found.estimate(counts, sums, x.square().sum(0))
    found.correlate(x, groups)
    found.adjust(found.likeness(x))
    return found


def covariance(found: ClassStatistics) -> Tensor:
    alone = torch.diag(1 - found.basis.square().sum(0).clamp(max=0.95))
    return (found.basis.mT @ found.basis + alone) * found.deviation[:, None] * found.deviation


def test_means_and_covariance_are_those_of_the_images() -> None:
    x, groups = images()
    found = kept(x, groups)
    means = torch.stack([x[groups == g].mean(0) for g in range(GROUPS)])
    assert torch.allclose(found.means * found.deviation + found.centre, means, atol=0.01)
    within = torch.cov((x - means[groups]).mT)
    assert torch.allclose(covariance(found), within, atol=0.15 * float(within.max()))
    assert found.counts.tolist() == torch.bincount(groups).tolist()


def test_familiarity_is_the_distance_to_the_nearest_class() -> None:
    x, groups = images(600)
    found = kept(x, groups)
    inverse = torch.linalg.inv(covariance(found))
    away = x[:, None] - (found.means * found.deviation + found.centre)  # (images, groups, features)
    squares = torch.einsum("bgf,fh,bgh->bg", away, inverse, away).amin(1)
    assert torch.allclose(found.likeness(x), -(squares / FEATURES).sqrt(), atol=1e-3)
    familiar = found.familiarity(x)
    assert float(familiar.median()) == pytest.approx(1, abs=0.02)
    assert float((familiar < 0).float().mean()) == pytest.approx(0.05, abs=0.01)
    assert bool((found.familiarity(x + 50) < familiar.min()).all())


def test_drawn_features_have_the_same_means_and_spread() -> None:
    found = kept(*images())
    groups = torch.full((20_000,), 1)
    drawn = found.draw(groups, torch.Generator().manual_seed(0))
    again = found.draw(groups, torch.Generator().manual_seed(0))
    assert torch.equal(drawn, again)
    mean = (found.means * found.deviation + found.centre)[1]
    assert torch.allclose(drawn.mean(0), mean, atol=0.1)
    expected = covariance(found)
    assert torch.allclose(torch.cov(drawn.mT), expected, atol=0.05 * float(expected.max()))


@pytest.mark.parametrize("number", [12, 600])
def test_sums_are_those_that_statistics_were_made_from(number: int) -> None:
    x, groups = images(number)
    found = kept(x, groups)
    again = ClassStatistics(GROUPS, FEATURES)
    again.estimate(*found.sums())
    assert torch.allclose(again.deviation, found.deviation, rtol=1e-3)
    assert torch.allclose(again.centre, found.centre, atol=1e-2)
    _, sums, squares = found.sums()
    assert torch.allclose(sums.sum(0), x.double().sum(0), rtol=1e-2, atol=1e-2 * number)
    assert torch.allclose(squares, x.double().square().sum(0), rtol=1e-2)


def test_one_image_a_class_says_nothing_of_what_is_usual() -> None:
    x, _ = images(3)
    few = kept(torch.cat([x, torch.full((3, 1), 5.0)], 1), torch.arange(3))
    assert bool((few.deviation > 0).all())
    likeness = few.likeness(torch.randn(40, FEATURES + 1))
    assert bool(likeness.isfinite().all())
    assert not few.adjust(likeness)


def test_constant_features_have_a_familiarity() -> None:
    same = kept(torch.ones(20, FEATURES), torch.zeros(20, dtype=torch.long))
    assert float(same.familiarity(torch.ones(1, FEATURES))) == pytest.approx(1)
    assert float(same.familiarity(torch.zeros(1, FEATURES))) < 0


def test_nothing_is_like_a_class_without_images() -> None:
    x, groups = images(300)
    found = kept(x, groups, number=GROUPS + 1)
    assert torch.allclose(found.likeness(x), kept(x, groups).likeness(x), atol=1e-3)


def test_fewer_images_than_features_have_directions_too_less_what_noise_explains() -> None:
    x = torch.randn(30, 40)
    found = kept(x, torch.zeros(30, dtype=torch.long), number=1)
    assert found.basis.shape == (RANK, 40)
    centred = (x - found.centre) / found.deviation
    values, vectors = torch.linalg.eigh(centred.mT @ centred / 30)
    largest = (vectors[:, -RANK:] * values[-RANK:]) @ vectors[:, -RANK:].mT
    believed = 1 - RANK / 29
    assert torch.allclose(found.basis.mT @ found.basis, believed * largest, atol=0.05)
    few = kept(torch.randn(10, 40), torch.zeros(10, dtype=torch.long), number=1)
    assert not bool(few.basis.any())


def test_eigenvectors_of_a_large_matrix_are_those_of_numpy() -> None:
    x = torch.randn(700, 700).double() * torch.arange(1, 701) ** -0.5
    matrix = x @ x.mT
    values, vectors = largest_eigenvectors(matrix, RANK)
    theirs, columns = np.linalg.eigh(matrix.numpy())
    assert values.numpy() == pytest.approx(theirs[-RANK:], rel=0.01)
    inside = torch.from_numpy(columns[:, -RANK // 2 :]).mT @ vectors
    assert float(inside.square().sum(1).min()) > 0.99


def test_shapes_are_those_of_the_tensors() -> None:
    for features in (4, 40):
        found = ClassStatistics(3, features).tensors()
        shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
        assert shapes == statistics_shapes(3, features)
    assert not ClassStatistics(3, 4).state_dict()
