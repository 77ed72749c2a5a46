"""PatchCore: features of patches in the middle of the backbone, for a memory bank of good images.

An image is good where each of its patches is like some patch of a good image. The head of such a
task is a *memory bank*: features of patches of good images, as many as `bank` says, chosen so that
no patch is far from all of them (a greedy coreset). The score of a patch is its distance to the
nearest one in the bank. Nothing trains: one pass over the good images fills the bank.

From Roth, Pemula, Zepeda, Schoelkopf, Brox and Gehler, "Towards Total Recall in Industrial Anomaly
Detection" (PatchCore, CVPR 2022), on tokens of a ViT with cosine distances as Damm, Laszkiewicz,
Lederer and Fischer, "AnomalyDINO" (WACV 2025) have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from engram.errors import EngramError
from engram.methods.method import (
    Batch,
    Branch,
    Features,
    HeadInput,
    Joined,
    Method,
    Needs,
    SharedPassMethod,
    TaskInput,
    TaskShape,
)
from engram.methods.method_flags import shared_setting
from engram.util.settings import setting
from engram.vit import ViT

#: Which layer is read unless another is given, as a share of the depth.
_HEIGHT = 0.6


@dataclass(frozen=True)
class PatchCore(SharedPassMethod):
    """A memory bank of patch features of good images, filled instead of trained."""

    name: ClassVar[str] = "patchcore"
    about: ClassVar[str] = "nothing: a memory bank of patches of good images"
    solved: ClassVar[bool] = True
    one_class: ClassVar[bool] = True
    half: ClassVar[frozenset[str]] = frozenset({"head.weight"})
    needs: ClassVar[Needs] = Needs.LAYERS | Needs.FINAL

    bank: int = shared_setting("bank")
    layer: int = setting(
        0, "layer whose tokens are compared; 0: one past the middle", most=10_000, flag=False
    )

    def fitted(self, task: TaskShape) -> Method:
        return replace(self, layer=self.layer or round(_HEIGHT * task.backbone.depth))

    def check_task(self, task: TaskShape) -> None:
        super().check_task(task)
        if self.layer > task.backbone.depth:
            raise EngramError(
                f"it compares tokens of layer {self.layer}, and the backbone has "
                f"{task.backbone.depth}."
            )

    def head_rows(self, task: TaskShape) -> int:
        return self.bank

    def details(self) -> list[tuple[str, str]]:
        return [("patches in its memory bank", f"{self.bank:,}"), ("of layer", str(self.layer))]

    @classmethod
    def join(cls, tasks: Sequence[TaskInput], backbone: ViT) -> Joined:
        return partial(PatchBranch, tasks)


class PatchBranch(Branch):
    """The patches of the layers that tasks compare, as unit vectors; once for all tasks."""

    def __init__(self, tasks: Sequence[TaskInput], batch: Batch) -> None:
        self.tasks, self.prefix = tasks, batch.backbone.config.prefix
        self._layers = {_layer(task) for task in tasks}
        self._found: dict[int, Tensor] = {}

    def layer(self, index: int, tokens: Tensor) -> None:
        if index in self._layers:
            self._found[index] = F.normalize(tokens[:, self.prefix :], dim=-1)

    def head_inputs(self, features: Features) -> dict[str, HeadInput]:
        found = {}
        for task in self.tasks:
            tokens = self._found[_layer(task)]
            found[task.name] = HeadInput(tokens.mean(1), replace(features.patches, tokens=tokens))
        return found


def _layer(task: TaskInput) -> int:
    assert isinstance(task.method, PatchCore)
    return task.method.layer
