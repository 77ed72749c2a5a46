"""A method that no file of the package knows: learned attention pooling of the final tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from engram import ViT
from engram.methods.method import (
    Batch,
    Branch,
    Features,
    HeadInput,
    Initial,
    Joined,
    Method,
    Needs,
    SharedPassMethod,
    TaskInput,
    TaskShape,
)
from engram.util.settings import setting


@dataclass(frozen=True)
class AttentionPooling(SharedPassMethod):
    """Queries of the task's own pool the backbone's final tokens; the head reads what they find."""

    name: ClassVar[str] = "attention-pooling"
    about: ClassVar[str] = "queries that pool the final tokens + head"
    answers_pixels: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs.FINAL
    rates: ClassVar[Mapping[str, float]] = {"adamw": 3e-3, "sgd": 0.1}

    queries: int = setting(4, "learned queries that pool the tokens", least=1, label="queries")

    def parameters(self, task: TaskShape) -> dict[str, Initial]:
        return {"queries": Initial((self.queries, task.backbone.width), std=1.0)}

    def features(self, task: TaskShape) -> int:
        return self.queries * task.backbone.width

    def macs(self, task: TaskShape, n: int, ancestors: Sequence[Method]) -> tuple[int, int]:
        return 2 * n * self.queries * task.backbone.width, 0

    @classmethod
    def join(cls, tasks: Sequence[TaskInput], backbone: ViT) -> Joined:
        return partial(PoolingBranch, tasks, torch.cat([task.tensors["queries"] for task in tasks]))


class PoolingBranch(Branch):
    """All tasks pool in one product: queries (q, D) of every task, tokens (b, n, D)."""

    def __init__(self, tasks: Sequence[TaskInput], queries: Tensor, batch: Batch) -> None:
        self.tasks, self.queries = tasks, queries

    def head_inputs(self, features: Features) -> dict[str, HeadInput]:
        tokens = features.tokens
        weights = (self.queries @ tokens.mT * tokens.shape[-1] ** -0.5).softmax(-1)  # (b, q, n)
        counts = [len(task.tensors["queries"]) for task in self.tasks]
        pooled = torch.split(weights @ tokens, counts, dim=1)
        pairs = zip(self.tasks, pooled, strict=True)
        return {task.name: HeadInput(own.flatten(1)) for task, own in pairs}
