"""Sums over the features of training images, from which a linear head is solved exactly.

The sums are the number of images of each class, the sum of their features, and the Gram matrix of
all features: sufficient statistics of a Gaussian for each class with one covariance (regularised
discriminant analysis: Friedman, 1989). They are plain sums, so images that are learned later are
added, images that are forgotten are subtracted, and the sums of two people are added up (analytic
federated learning: He et al., CVPR 2025). The head that is solved from them is the one that all
images at once would have given. Nothing about it is chosen on other images.

Axes: c classes, d features, b images. Everything is in double precision, on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engram.errors import EngramError
from engram.tasks.class_statistics import PREFIX, ClassStatistics

PRIOR = 1.0  # images for each feature that the prior of the covariance counts for
#: Of the variance of all images, the share within classes where nobody knows it, and for how many
#: images that counts.
USUAL_SHARE, USUAL_IMAGES = 0.7, 2.0
DOUBT = 0.7  # by how much logits are too large if every class has one image
_GROUPS = 10  # in which images are left out, to know how alike those are that were not learned
_LEAST = 1e-12  # variance, where all images are the same
_SLACK = 1e-3  # of an image's squared features, by which the same image may differ when read again


#: The tensors that files hold, in double precision.
DOUBLE = tuple(PREFIX + name for name in ("images", "sums", "gram"))


class LinearHead(NamedTuple):
    weight: Tensor  # (c, d)
    bias: Tensor  # (c)


def sums_shapes(classes: int, features: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by its name in a file."""
    shapes = (classes,), (classes, features), (features * (features + 1) // 2,)
    return dict(zip(DOUBLE, shapes, strict=True))


@dataclass(frozen=True, eq=False)
class FeatureSums:
    """Counts, sums and the Gram matrix of features, which can be added and subtracted."""

    images: Tensor  # of each class, (c)
    sums: Tensor  # of the features of each class, (c, d)
    gram: Tensor  # sum of x xᵀ over all images: the upper triangle, row by row, (d (d + 1) / 2)

    @classmethod
    def empty(cls, classes: int, features: int) -> FeatureSums:
        shapes = sums_shapes(classes, features).values()
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    @classmethod
    def from_features(cls, features: Tensor, labels: Tensor, classes: int) -> FeatureSums:
        """Sums of images, from their features (b, d) and the numbers of their classes (b)."""
        x = features.double().cpu()
        found = cls.empty(classes, x.shape[1])
        found.images.index_add_(0, labels, torch.ones(len(x), dtype=torch.float64))
        found.sums.index_add_(0, labels, x)
        row, column = torch.triu_indices(x.shape[1], x.shape[1])
        found.gram.copy_((x.mT @ x)[row, column])
        return found

    def tensors(self) -> dict[str, Tensor]:
        """All of it, by name, as in a file."""
        return dict(zip(DOUBLE, (self.images, self.sums, self.gram), strict=True))

    def __add__(self, other: FeatureSums) -> FeatureSums:
        return FeatureSums(
            self.images + other.images, self.sums + other.sums, self.gram + other.gram
        )

    def __sub__(self, other: FeatureSums) -> FeatureSums:
        return FeatureSums(
            self.images - other.images, self.sums - other.sums, self.gram - other.gram
        )

    def among(self, places: Sequence[int], classes: int) -> FeatureSums:
        """Renumber its classes to these numbers, among more classes."""
        found, at = FeatureSums.empty(classes, self.sums.shape[1]), torch.tensor(places)
        found.images[at], found.sums[at] = self.images, self.sums
        found.gram.copy_(self.gram)
        return found

    def only(self, places: Sequence[int]) -> FeatureSums:
        """The sums of these classes, where no other has images."""
        at = torch.tensor(places)
        return FeatureSums(self.images[at], self.sums[at], self.gram)

    # The head

    def solve(self) -> LinearHead:
        """The head of a Gaussian for each class, with one covariance and classes equally likely.

        The covariance is that within classes with a prior, which counts as much as `PRIOR` images
        for each feature: there features do not correlate, and all vary as much as they do on
        average over all images.
        """
        means, within, spread = self._means(), self._within(), self._spread()
        covariance = within + PRIOR * spread / self._total * _identity(within)
        factor, failed = torch.linalg.cholesky_ex(covariance)
        if failed:
            raise EngramError("These sums are not those of any images; teach the task anew.")
        centre = means.mean(0)  # subtracted from all classes, so that logits are small
        weight = torch.cholesky_solve((means - centre).mT, factor).mT
        excess = self._excess(within.trace(), spread, self._total) / self.images
        bias = (excess - (weight * (means + centre)).sum(1)) / 2
        temperature = self._temperature(factor, within)
        return LinearHead(weight / temperature, bias / temperature)

    def leave_one_out(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of heads that have not learned from the image of these sums they answer for.

        Without an image, the covariance within classes changes by a matrix of rank one (Sherman and
        Morrison, 1950). The temperature is that of the head for all images. Images that are alone
        in their class are left out. Also gives the labels.
        """
        several = self.images[labels] > 1
        x, labels = features[several].double().cpu(), labels[several]
        within, total = self._within(), self._total
        values, vectors = torch.linalg.eigh(within)
        centre, counts = self.sums.sum(0) / total, self.images[labels]
        distances = (x - centre).square().sum(1) * total / (total - 1)
        spreads = (self._spread() - distances).clamp(min=_LEAST)
        means, logits = self._means() @ vectors, x.new_zeros(len(x), len(self.images))
        for i, (own, k) in enumerate(zip(x @ vectors, labels.tolist(), strict=True)):
            away, share = own - means[k], counts[i] / (counts[i] - 1)
            others, images = means.clone(), self.images.clone()
            others[k] -= away / (counts[i] - 1)
            images[k] -= 1
            inverse = 1 / (values.clamp(min=0) + PRIOR * spreads[i] / (total - 1))
            pulled = inverse * away
            change = share / (1 - share * (away @ pulled))
            weight = others * inverse + change * (others @ pulled)[:, None] * pulled
            left = within.trace() - share * away.square().sum()
            excess = self._excess(left, spreads[i], total - 1) / images
            logits[i] = weight @ own + (excess - (weight * others).sum(1)) / 2
        factor = torch.linalg.cholesky(within + PRIOR * self._spread() / total * _identity(within))
        return logits / self._temperature(factor, within), labels

    def _excess(self, within: Tensor, spread: Tensor, images: float) -> Tensor:
        """The squared distance of an image from the mean of one image of its class.

        Over the number of its images, that is by how much a class looks further away than it is.
        `within` and `spread` are the traces of the scatter within classes and of all images.
        """
        free, variance = images - len(self.images), spread / images
        noise = (within + USUAL_IMAGES * USUAL_SHARE * variance) / (free + USUAL_IMAGES)
        features = self.sums.shape[1]
        return features * noise / (within + features * PRIOR * variance)

    def _temperature(self, factor: Tensor, within: Tensor) -> float:
        """The temperature of logits, which count correlated features as if each was evidence.

        The number of features over that of independent ones: the participation ratio of the
        covariance of all images, seen through the inverse of the head's, given by its factor.
        """
        away = self._means() - self.sums.sum(0) / self._total
        whole = (within + (away * self.images[:, None]).mT @ away) / self._total
        seen = torch.cholesky_solve(whole, factor)
        ratio = float((seen * seen.mT).sum() / seen.trace().clamp(min=_LEAST))
        return max(_LEAST, ratio * (1 + DOUBT * float((1 / self.images).mean())))

    @property
    def _total(self) -> float:
        return float(self.images.sum())

    def _means(self) -> Tensor:
        return self.sums / self.images[:, None]

    def _within(self) -> Tensor:
        """The scatter of images around the means of their classes, (d, d)."""
        full = self.sums.new_zeros(2 * self.sums.shape[1:])
        row, column = torch.triu_indices(*full.shape)
        full[row, column] = full[column, row] = self.gram
        return full - (self.sums / self.images.clamp(min=1)[:, None]).mT @ self.sums

    def _squares(self) -> Tensor:
        """The sums of the squares of features: the diagonal of the Gram matrix, (d)."""
        lengths = torch.arange(self.sums.shape[1], 0, -1)  # of the rows of the triangle
        return self.gram[lengths.cumsum(0) - lengths]

    def _spread(self) -> Tensor:
        """The sum of the squared distances of all images from their mean."""
        squares = self.sums.sum(0).square().sum() / self._total
        return (self._squares().sum() - squares).clamp(min=_LEAST)

    # Familiarity

    def class_statistics(self) -> ClassStatistics:
        """Means and spread of the classes; the scale of familiarity is not set."""
        found = ClassStatistics(*self.sums.shape)
        found.estimate(self.images, self.sums, self._squares())
        found.correlate_scatter(self._within())
        return found

    def left_out_likeness(self, features: Tensor, labels: Tensor) -> Tensor:
        """Likeness of images of these sums to class statistics of all others (`adjust` takes it).

        They are left out one by one, or in ten groups over which every class is spread. An image
        whose class has no other is not measured.
        """
        several = self.images[labels] > 1
        x, labels = features[several], labels[several]
        order, found = labels.argsort(stable=True), x.new_zeros(len(x))
        for start in range(min(_GROUPS, len(x))):
            group = order[start::_GROUPS]
            own = FeatureSums.from_features(x[group], labels[group], len(self.images))
            found[group] = (self - own).class_statistics().likeness(x[group])
        return found

    # Whether they make sense

    @property
    def valid(self) -> bool:
        """Whether counts are counts, and squares are not negative."""
        whole = bool((self.images == self.images.round()).all())
        return whole and bool((self.images > 0).all()) and bool((self._squares() >= 0).all())

    @property
    def possible(self) -> bool:
        """Whether images can have such sums; classes may have none. It takes a decomposition."""
        image = _SLACK * float(self._squares().sum().abs()) / max(1.0, self._total)
        rest = self.sums[self.images == 0].square().sum()  # of classes without an image
        if bool((self.images < 0).any()) or float(rest) > image:
            return False
        return bool(torch.linalg.eigvalsh(self._within())[0] >= -image)


def _identity(like: Tensor) -> Tensor:
    return torch.eye(len(like), dtype=like.dtype)
