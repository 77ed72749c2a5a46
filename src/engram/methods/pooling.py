"""Learned attention pooling: a few queries attend over the final tokens, and a linear head reads.

Each of m learned queries weighs the backbone's final normed tokens by a softmax, and takes D / m
numbers of their weighted mean through a map of its own; the head sees these D numbers, normalised,
beside the pooled token. This is efficient probing (Psomas et al., "Attention, Please! Revisiting
Attentive Probing Through the Lens of Efficiency", ICLR 2026): multi-query cross-attention without
key projections. It reads the final tokens alone, so its cache is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.methods.attention_maps import AttentionMaps, pooling_maps
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
from engram.methods.method_flags import shared_setting
from engram.vit import ViT


@dataclass(frozen=True)
class LearnedPooling(SharedPassMethod):
    """Learned queries that pool the final tokens, and a head."""

    name: ClassVar[str] = "pooling"
    about: ClassVar[str] = "queries that pool the final tokens + head"
    answers_pixels: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs.FINAL

    queries: int = shared_setting("queries")

    def parameters(self, task: TaskShape) -> dict[str, Initial]:
        width, each = task.backbone.width, self._each(task)
        return {
            "queries": Initial((self.queries, width), std=1.0),
            "values": Initial((self.queries, width, each), std=width**-0.5),
        }

    def _each(self, task: TaskShape) -> int:
        """The numbers that a query takes in."""
        return max(1, task.backbone.width // self.queries)

    def features(self, task: TaskShape) -> int:
        return task.backbone.width + self.queries * self._each(task)

    def macs(self, task: TaskShape, n: int, ancestors: Sequence[Method]) -> tuple[int, int]:
        width = task.backbone.width
        return self.queries * width * (2 * n + self._each(task)), 0

    @classmethod
    def join(cls, tasks: Sequence[TaskInput], backbone: ViT) -> Joined:
        return partial(PoolingBranch, tasks, JoinedQueries(tasks))

    def attention_maps(
        self, tasks: Sequence[TaskInput], task: TaskInput, backbone: ViT, pixels: Tensor
    ) -> AttentionMaps:
        tokens = backbone.norm(backbone.encode(backbone.embed(pixels), pixels.shape[-2:]))
        weights = JoinedQueries([task]).weights(tokens)
        return pooling_maps(weights, tokens, backbone, pixels)


class JoinedQueries:
    """The queries of all tasks, stacked (q, D), and the values of each."""

    def __init__(self, tasks: Sequence[TaskInput]) -> None:
        width = tasks[0].tensors["queries"].shape[1]
        self.queries = torch.cat([task.tensors["queries"] for task in tasks]) * width**-0.5
        self.values = [task.tensors["values"] for task in tasks]  # (m, D, numbers) each

    def weights(self, tokens: Tensor) -> Tensor:
        """Attention of every query over tokens (b, n, D): (b, q, n)."""
        weights: Tensor = (tokens @ self.queries.mT.to(tokens)).softmax(1)
        return weights.mT

    def __call__(self, tokens: Tensor) -> list[Tensor]:
        """The pooled vectors of each task: (b, numbers) each."""
        counts = [len(values) for values in self.values]
        read = torch.split(self.weights(tokens) @ tokens, counts, dim=1)  # (b, m, D) each
        taken = (
            torch.einsum("bmD,mDk->bmk", own, values.to(own)).flatten(1)
            for own, values in zip(read, self.values, strict=True)
        )
        return [F.layer_norm(own, own.shape[1:]) for own in taken]


class PoolingBranch(Branch):
    """Pooled vectors of learned queries, behind the pooled token."""

    def __init__(self, tasks: Sequence[TaskInput], joined: JoinedQueries, batch: Batch) -> None:
        self.tasks, self.joined = tasks, joined

    def head_inputs(self, features: Features) -> dict[str, HeadInput]:
        pooled, found = features.pooled, self.joined(features.tokens)
        pairs = zip(self.tasks, found, strict=True)
        return {task.name: HeadInput(torch.cat([pooled, own], 1)) for task, own in pairs}
