"""Statistics of a task's training images: the mean of each class and the spread around it.

The features are what the head is given of an image (`TaskHead.embed`). Around the mean of every
class they are taken to be normal, with one covariance for all: a deviation of each feature, and
correlations along a few directions. That says how much an image is like those that were learned
(`familiarity`, the Mahalanobis distance to the nearest class; Lee et al., 2018), and features of
images that are gone can be drawn again (`draw`), to learn more classes without forgetting them.

A kind of task without one class for each image has a single mean. Means and directions are in units
of the deviations and in half precision, so that files stay small.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from engram.util.tensors import VersionedCache

RANK = 16  # directions of correlation
PREFIX = "statistics."
#: The tensors that files hold in half precision.
HALF = tuple(PREFIX + name for name in ("means", "basis"))
FEWEST, EACH = 10, 4  # held-out images, and images of the usual class, to know what is usual
_MANY = 100  # from here on quantiles are counted
_LARGE, _ROUNDS = 512, 12  # rows of a matrix whose eigenvectors are approximated, and how often
_LEAST = 0.05  # of a feature's variance that no direction explains


def statistics_shapes(groups: int, features: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by its name in a file."""
    return {
        f"{PREFIX}centre": (features,),
        f"{PREFIX}deviation": (features,),
        f"{PREFIX}means": (groups, features),
        f"{PREFIX}basis": (min(RANK, features), features),
        f"{PREFIX}counts": (groups,),
        f"{PREFIX}quantiles": (2,),
    }


class ClassStatistics(nn.Module):
    """Means of classes, and how features are spread around them. `adjust` scales familiarity."""

    centre: Tensor  # of all images, (features)
    deviation: Tensor  # within a class, (features)
    means: Tensor  # of classes from the centre, in deviations, (groups, features)
    basis: Tensor  # directions of correlation, in deviations, (rank, features)
    counts: Tensor  # images of each class, (groups)
    quantiles: Tensor  # of the likeness of validation images: 5 % and 50 %

    def __init__(self, groups: int, features: int) -> None:
        super().__init__()
        for name, shape in statistics_shapes(groups, features).items():
            # Not in a state dict, which holds what is trained.
            self.register_buffer(name.removeprefix(PREFIX), torch.zeros(shape), persistent=False)
        self._constants: VersionedCache[tuple[Tensor, ...]] = VersionedCache(1)

    def tensors(self) -> dict[str, Tensor]:
        """All of it, by name, as in a file."""
        return dict(self.named_buffers(prefix=PREFIX.rstrip(".")))

    def familiarity(self, features: Tensor) -> Tensor:
        """Familiarity of images (b): 1 is usual, and 5 % of the validation images are below 0."""
        quantiles = self.quantiles.float().to(features.device)
        return (self.likeness(features) - quantiles[0]) / (quantiles[1] - quantiles[0])

    def likeness(self, features: Tensor) -> Tensor:
        """Minus the distance to the nearest class, in deviations: the root mean over features."""
        device = features.device
        with torch.autocast(device.type, enabled=False):
            centre, deviation, scaled, inverse, unexplained, pulled, lengths = (
                part.to(device) for part in self.prepared()
            )
            x = (features.detach().float() - centre) / deviation
            own = x / unexplained - ((x @ scaled.mT) @ inverse) @ scaled
            distance = (x * own).sum(1, keepdim=True) - 2 * x @ pulled.mT + lengths
            return -(distance.amin(1).clamp(min=0) / x.shape[1]).sqrt()

    def prepared(self) -> tuple[Tensor, ...]:
        """Constants of the distance: the inverse covariance, by Woodbury, and its products."""
        return self._constants.get("", self.buffers(), self._prepare)

    def _prepare(self) -> tuple[Tensor, ...]:
        means, basis, unexplained = self.means.float(), self.basis.float(), self._unexplained()
        scaled = basis / unexplained
        inverse = torch.linalg.inv(torch.eye(len(basis), device=basis.device) + scaled @ basis.mT)
        pulled = means / unexplained - ((means @ scaled.mT) @ inverse) @ scaled
        lengths = (means * pulled).sum(1)
        lengths = lengths.where(self.counts > 0, torch.inf)  # nothing is like what has no image
        made = (scaled, inverse, unexplained, pulled, lengths)
        return self.centre.float(), self.deviation.float(), *made

    def _unexplained(self) -> Tensor:
        """The share of each feature's variance that no direction explains."""
        return (1 - self.basis.float().square().sum(0)).clamp(min=_LEAST)

    def draw(self, groups: Tensor, generator: torch.Generator) -> Tensor:
        """Features of images of these classes that might have been, one each: (b, features)."""
        rank, features = self.basis.shape
        shared = torch.randn(len(groups), rank, generator=generator)
        alone = torch.randn(len(groups), features, generator=generator)
        x = shared.to(self.basis) @ self.basis + alone.to(self.basis) * self._unexplained().sqrt()
        return (x + self.means[groups]) * self.deviation + self.centre

    # From features

    def estimate(self, counts: Tensor, sums: Tensor, squares: Tensor) -> None:
        """Set means and deviations, from sums over images in double precision.

        Counts (groups) and sums (groups, features) are those of each class, squares (features)
        those of all images. `correlate` comes next.
        """
        images = counts.sum().clamp(min=1)
        centre = sums.sum(0) / images
        means = sums / counts.clamp(min=1)[:, None]
        total = (squares / images - centre.square()).clamp(min=0)
        within = (squares - (counts[:, None] * means.square()).sum(0)).clamp(min=0)
        self.counts.copy_(counts)
        deviation = ((within + total) / (self._free() + 1)).sqrt()
        deviation = deviation.clamp(min=max(1e-6, 1e-3 * float(deviation.mean())))
        away = ((means - centre) / deviation).where(counts[:, None] > 0, 0.0)
        self.centre.copy_(centre)
        self.deviation.copy_(deviation)
        self.means.copy_(_rounded(away))

    def _free(self) -> float:
        """Degrees of freedom within classes: none, where each class has one image."""
        return float(self.counts.double().sum() - (self.counts > 0).sum())

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Counts, sums and the sum of squares, the input of `estimate` but for rounding."""
        counts, deviation = self.counts.double(), self.deviation.double()
        images, away = float(counts.sum()), self.means.double() * deviation
        means = away + self.centre
        between = (counts[:, None] * away.square()).sum(0) / images
        total_and_within = deviation.square() * (self._free() + 1)  # total: between + within/images
        within = (total_and_within - between).clamp(min=0) / (1 + 1 / images)
        return counts, counts[:, None] * means, (counts[:, None] * means.square()).sum(0) + within

    def correlate(self, features: Tensor, groups: Tensor) -> None:
        """Set the directions of correlation, from the features of some images."""
        x = (features.to(self.centre).float() - self.centre) / self.deviation
        share = (self._free() + 1) / max(1.0, float(self.counts.sum()))
        x = (x - self.means[groups.to(x.device)]) / (max(1, len(x)) * share) ** 0.5
        rank = min(len(self.basis), *x.shape)
        if x.shape[0] < x.shape[1]:  # fewer images than features
            _, vectors = largest_eigenvectors((x @ x.mT).double(), rank)
            self._keep_directions(vectors.mT.to(x) @ x)
        else:
            self._keep_directions(_principal_axes((x.mT @ x).double(), rank))

    def correlate_scatter(self, within: Tensor) -> None:
        """Set the directions of correlation, from the scatter within classes, in fp64."""
        rank = min(len(self.basis), int(self.counts.sum()))
        if rank >= self._free():  # no direction would be believed
            self.basis.zero_()
            return
        deviation = self.deviation.double()
        scaled = within / deviation / deviation[:, None] / (self._free() + 1)
        self._keep_directions(_principal_axes(scaled, rank))

    def _keep_directions(self, found: Tensor) -> None:
        """Set the basis to these directions, the most important last: (rank, features)."""
        rank = len(found)
        # Of the variance, as much as directions of mere noise would explain is not believed.
        believed = max(0.0, 1 - rank / max(1.0, self._free())) ** 0.5
        largest = found.gather(1, found.abs().argmax(1, keepdim=True))
        self.basis.zero_()
        self.basis[:rank] = _rounded((found * largest.sign() * believed).flip(0))

    def adjust(self, likeness: Tensor) -> bool:
        """Set the scale of familiarity, from the `likeness` of held-out images.

        Returns False, and sets nothing, where they are too few to know what is usual. Up to a
        hundred, the value that 5 % are below is that of a normal distribution whose mean and
        deviation are only known from so few (Student's prediction interval).
        """
        values, images = likeness.double(), len(likeness)
        if not self.enough(images):
            return False
        low, middle = (float(values.quantile(q)) for q in (0.05, 0.5))
        if images < _MANY:
            wide = float(values.std()) * student_quantile(images - 1) * math.sqrt(1 + 1 / images)
            low = min(low, float(values.mean()) - wide)
        least = 1e-6 * max(1.0, abs(middle))  # where they are all equally alike
        self.quantiles.copy_(torch.tensor([min(low, middle - least), middle]))
        return True

    def enough(self, held_out: int) -> bool:
        """Whether so many held-out images, with its own, are enough to know what is usual."""
        return held_out >= FEWEST and float(self.counts[self.counts > 0].median()) >= EACH


def _principal_axes(covariance: Tensor, rank: int) -> Tensor:
    """Eigenvectors with the largest eigenvalues, as long as their deviations: (rank, features)."""
    values, vectors = largest_eigenvectors(covariance, rank)
    return (vectors * values.clamp(min=0).sqrt()).mT.float()


def largest_eigenvectors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues, the largest last, of a symmetric matrix, and their eigenvectors.

    Of a large matrix by subspace iteration: all of its eigenvectors would take seconds.
    """
    n = len(matrix)
    if n <= _LARGE:
        values, vectors = torch.linalg.eigh(matrix)
    else:
        start = torch.randn(n, 4 * rank, generator=torch.Generator().manual_seed(0))
        basis = torch.linalg.qr(start.to(matrix)).Q
        for _ in range(_ROUNDS):
            basis = torch.linalg.qr(matrix @ basis).Q
        values, vectors = torch.linalg.eigh(basis.mT @ matrix @ basis)
        vectors = basis @ vectors
    return values[len(values) - rank :], vectors[:, vectors.shape[1] - rank :]


def student_quantile(freedom: int) -> float:
    """The 95 % quantile of Student's t distribution, by its expansion around the normal one."""
    z = 1.6448536269514722
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(sum(term / freedom**i for i, term in enumerate(terms)))


def _rounded(x: Tensor) -> Tensor:
    """Round to half precision, so that a task in memory is what its file will be."""
    return x.clamp(-6e4, 6e4).half().float()
