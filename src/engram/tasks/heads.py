"""The heads of tasks: from a task's own tokens, or the trunk's patches, to its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: What a head found in the data instead of training it: "thresholds", or "mean" and "std".
Settled = Mapping[str, Tensor]


@dataclass(frozen=True)
class Patches:
    """The last layer's patch tokens after the final norm, and the size that answers have."""

    tokens: Tensor  # (b, rows * columns, D)
    grid: tuple[int, int]
    size: tuple[int, int]  # height, width

    def of(self, rows: Tensor | None) -> Patches:
        """The same of some of the images; None: of all."""
        return self if rows is None else replace(self, tokens=self.tokens[rows])


class TaskHead(nn.Linear):
    """A linear or MLP classifier that starts at zero."""

    def __init__(self, width: int, classes: int, mlp: bool, settled: Sequence[str] = ()) -> None:
        super().__init__(width, classes)
        self.hidden = nn.Linear(width, width) if mlp else None
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self._settled = tuple(settled)
        for name in settled:
            self.register_buffer(name, torch.full((classes,), FIRST[name]))

    @property
    def settled(self) -> dict[str, Tensor]:
        """What was found in the data instead of trained, by name: (classes) each."""
        return {name: getattr(self, name) for name in self._settled}

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(super().forward(self.hide(x)))

    def hide(self, x: Tensor) -> Tensor:
        """What the last layer is given: the features, or those of the hidden layer."""
        return x if self.hidden is None else F.gelu(self.hidden(x))

    def finish(self, linear: Tensor) -> Tensor:
        """The output, from that of the linear layer."""
        return linear

    def divide(self, temperature: float) -> None:
        """Divide all outputs that this head will give by a number: calibration."""
        with torch.no_grad():
            self.weight.div_(temperature)
            self.bias.div_(temperature)

    def read(self, own: Tensor, patches: Patches | None) -> Tensor:
        """The output, from the task's own tokens (b, k, D) or the pooled one (b, D)."""
        output: Tensor = self(self.embed(own, patches))
        return output

    def embed(self, own: Tensor, patches: Patches | None) -> Tensor:
        """One vector per image (b, features): what the output is computed from."""
        return own.mean(1) if own.ndim == 3 else own


FIRST = {"thresholds": 0.5, "mean": 0.0, "std": 1.0}


class NumberHead(TaskHead):
    """Learns numbers of mean 0 and variance 1, and answers in the units of the labels."""

    mean: Tensor
    std: Tensor

    def finish(self, linear: Tensor) -> Tensor:
        return linear * self.std + self.mean


class MaskHead(TaskHead):
    """One mask a class: a vector for each class, times every patch, upsampled bilinearly.

    In the masked regimes the vector is the class's own token, projected, plus a constant one, so
    it differs from image to image. In the others it is the constant one alone: a linear head on
    the patches.
    """

    def __init__(self, width: int, classes: int, mlp: bool, masked: bool) -> None:
        super().__init__(width, classes, mlp)
        self.project = nn.Linear(width, width, bias=False) if masked else None
        if self.project is not None:
            nn.init.zeros_(self.project.weight)

    def embed(self, own: Tensor, patches: Patches | None) -> Tensor:
        """The class tokens in the masked regimes, else the patches; the mean of them."""
        assert patches is not None
        return (patches.tokens if self.project is None else own).mean(1)

    def read(self, own: Tensor, patches: Patches | None) -> Tensor:
        assert patches is not None
        scores = self(patches.tokens)  # (b, patches, classes)
        if self.project is not None:
            scores = scores + patches.tokens @ self.project(own).mT
        field = scores.mT.unflatten(2, patches.grid)
        return F.interpolate(field, patches.size, mode="bilinear", align_corners=False)
