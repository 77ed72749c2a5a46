"""Mixup: every image of a batch is mixed with another one, and so are the losses of their labels.

Through the backbone, pixels are mixed. From the cache, tokens are: what every layer feeds to a task
is the weighted mean of what it feeds for the two images. For cross-entropy and squared errors, the
weighted mean of the two losses has the gradients of the loss of the mixed label.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from engram.train.features.feeds import BatchShard
from engram.util.tensors import to_device

#: Labels, each with what it counts for in the loss of every image; None: all of it.
Targets: TypeAlias = Sequence[tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Mixup:
    """Pairs of images that are mixed, and their shares."""

    partners: Tensor  # (images)
    shares: Tensor  # (images), of the image itself

    @classmethod
    def drawn(cls, images: int, alpha: float, seed: Sequence[int]) -> Mixup:
        """Partners are a permutation of the images; shares are from Beta(alpha, alpha)."""
        random = np.random.default_rng(seed)
        partners = torch.from_numpy(random.permutation(images))
        return cls(partners, torch.from_numpy(random.beta(alpha, alpha, images)).float())

    def inputs(self, share: BatchShard, part: slice) -> Tensor:
        """The mixed inputs of a part of the images, in the type that they had."""
        own, other = share.inputs[part], share.inputs[self.partners[part]]
        weight = self.shares[part].view(-1, *[1] * (own.ndim - 1))
        mixed = torch.lerp(other.float(), own.float(), weight)
        return (mixed if own.is_floating_point() else mixed.round_()).to(own.dtype)

    def targets(self, share: BatchShard, part: slice, device: torch.device) -> Targets:
        labels = share.labels[part], share.labels[self.partners[part]]
        own = to_device(self.shares[part], device)
        first, second = (to_device(one, device) for one in labels)
        return [(first, own), (second, 1 - own)]


def parts(
    share: BatchShard, size: int, mixup: Mixup | None, device: torch.device
) -> Iterator[tuple[Tensor, Targets, Tensor]]:
    """Inputs, targets and sample numbers of a batch in parts of at most this size."""
    for start in range(0, len(share.labels), size):
        part = slice(start, start + size)
        targets: Targets
        if mixup is None:
            inputs, targets = share.inputs[part], [(to_device(share.labels[part], device), None)]
        else:
            inputs, targets = mixup.inputs(share, part), mixup.targets(share, part, device)
        yield inputs, targets, share.samples[part]
