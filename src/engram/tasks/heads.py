"""The heads of tasks: from a task's own tokens, or the backbone's patches, to its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.methods.method import HeadInput
from engram.vit import ViT

#: Fitted buffers of a head: "thresholds", or "mean" and "std".
Fitted = Mapping[str, Tensor]


@dataclass(frozen=True)
class HeadSizes:
    features: int
    classes: int  # rows of the weight: those of a memory bank are patches
    mlp: bool = False
    token_per_class: bool = False  # in segmentation, it reads the task's own class tokens


class TaskHead(nn.Linear):
    """A linear or MLP classifier that starts at zero."""

    def __init__(self, sizes: HeadSizes, fitted: Sequence[str] = ()) -> None:
        super().__init__(sizes.features, sizes.classes)
        width = sizes.features
        self.hidden = nn.Linear(width, width) if sizes.mlp else None
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self._fitted = tuple(fitted)
        for name in fitted:
            self.register_buffer(name, torch.full((sizes.classes,), FIRST[name]))

    @property
    def fitted(self) -> dict[str, Tensor]:
        """Fitted buffers: found in the data instead of trained, by name, (classes) each."""
        return {name: getattr(self, name) for name in self._fitted}

    @property
    def vector_size(self) -> int:
        """Numbers of an embedding."""
        return self.weight.shape[-1]

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(super().forward(self.hide(x)))

    def hide(self, x: Tensor) -> Tensor:
        """Input of the last layer: the features, or those of the hidden layer."""
        return x if self.hidden is None else F.gelu(self.hidden(x))

    def finish(self, linear: Tensor) -> Tensor:
        """The output, from that of the linear layer."""
        return linear

    def divide(self, temperature: float) -> None:
        """Divide all outputs that this head will give by a number: calibration."""
        with torch.no_grad():
            self.weight.div_(temperature)
            self.bias.div_(temperature)

    def read(self, inputs: HeadInput) -> Tensor:
        """The output for the images of a head input."""
        output: Tensor = self(self.embed(inputs))
        return output

    def embed(self, inputs: HeadInput) -> Tensor:
        """One vector per image (b, features): what the output is computed from."""
        return inputs.own.mean(1) if inputs.own.ndim == 3 else inputs.own


FIRST = {"thresholds": 0.5, "mean": 0.0, "std": 1.0}


class NumberHead(TaskHead):
    """Learns numbers of mean 0 and variance 1, and answers in the units of the labels."""

    mean: Tensor
    std: Tensor

    def finish(self, linear: Tensor) -> Tensor:
        return linear * self.std + self.mean


class MaskHead(TaskHead):
    """One mask a class: a vector for each class, times every patch, upsampled bilinearly.

    The vector is constant, plus the projected token of a task that has one for every class.
    """

    def __init__(self, sizes: HeadSizes, fitted: Sequence[str] = ()) -> None:
        super().__init__(sizes, fitted)
        width = sizes.features
        self.project = nn.Linear(width, width, bias=False) if sizes.token_per_class else None
        if self.project is not None:
            nn.init.zeros_(self.project.weight)

    def embed(self, inputs: HeadInput) -> Tensor:
        """The mean of the task's own class tokens, or of the patches if it has none."""
        assert inputs.patches is not None
        return (inputs.patches.tokens if self.project is None else inputs.own).mean(1)

    def read(self, inputs: HeadInput) -> Tensor:
        patches = inputs.patches
        assert patches is not None
        scores = self(patches.tokens)  # (b, patches, classes)
        if self.project is not None:
            scores = scores + patches.tokens @ self.project(inputs.own).mT
        field = scores.mT.unflatten(2, patches.grid)
        return F.interpolate(field, patches.size, mode="bilinear", align_corners=False)


class BankHead(TaskHead):
    """A memory bank: its weight has features of patches of good images, one a row.

    The output is the distance of every patch to the nearest in the bank: 1 - the cosine, from 0.
    """

    def __init__(self, sizes: HeadSizes, fitted: Sequence[str] = ()) -> None:
        super().__init__(sizes)
        self.bias = None  # type: ignore[assignment]
        self._fitted = tuple(fitted)
        self.register_buffer("thresholds", torch.full((1,), FIRST["thresholds"]))

    def embed(self, inputs: HeadInput) -> Tensor:
        """The mean of the patches."""
        return inputs.own

    def read(self, inputs: HeadInput) -> Tensor:
        """Distances (b, rows, columns)."""
        patches = inputs.patches
        assert patches is not None
        # All patches as rows of one product with a bias: exported in float32, as other heads are.
        none = self.weight.new_zeros(len(self.weight))
        likeness = F.linear(patches.tokens.flatten(0, 1), self.weight, none).amax(1)
        return (1 - likeness).clamp(min=0).view(-1, *patches.grid)


class BackboneHead(nn.Module):
    """The original model's own head, as the head of a task."""

    def __init__(self, backbone: ViT) -> None:
        super().__init__()
        self.fitted: Fitted = {}
        self._backbone = (backbone,)  # in a tuple: its parameters are the model's, not a task's

    @property
    def vector_size(self) -> int:
        """Numbers of an embedding."""
        return self._backbone[0].config.width

    def read(self, inputs: HeadInput) -> Tensor:
        head = self._backbone[0].head
        assert head is not None
        output: Tensor = head(inputs.raw, inputs.own)
        return output

    def embed(self, inputs: HeadInput) -> Tensor:
        """The pooled token (b, D)."""
        return self._backbone[0].pool(inputs.own)
