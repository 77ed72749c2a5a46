"""The masked ("non-destructive") form of the paper: a task's own class token, cells and head.

Nothing reads the task but itself and the tasks that extend it (Table 1, memory.py), so any number
of such tasks share one pass of an unchanged backbone. `masked+adapter` has bottleneck adapters
besides, which only the task's own class token passes through.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from engram.errors import EngramError
from engram.methods.adapters import adapter_parameters, find_adapters
from engram.methods.attention_maps import AttentionMaps, masked_maps
from engram.methods.memory import Memory, Stream
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
    keys_values_macs,
    parameter_count,
    token_macs,
)
from engram.methods.method_flags import shared_setting
from engram.methods.readout import WithStatistics
from engram.methods.routing import routed_streams, split_routed
from engram.util.settings import setting
from engram.vit import ViT


def class_token(count: int, width: int, init: str) -> Initial:
    """Class tokens (count, D). The paper does not say how they start.

    `backbone`: as copies of the backbone's own, all but the first with noise so that they differ;
    `random`, or where it has none: from N(0, 0.02^2).
    """

    def copy(token: Tensor, backbone: ViT) -> None:
        if init == "backbone" and backbone.class_token is not None:
            token[:1] = backbone.class_token.detach()
            token[1:] += backbone.class_token.detach()

    return Initial((count, width), 0.02, copy)


@dataclass(frozen=True)
class Masked(SharedPassMethod):
    """Cells, class token and head, by Table 1. `cells=0` is a class token and a head."""

    name: ClassVar[str] = "masked"
    about: ClassVar[str] = "cells + class token + head, Table 1"
    extendable: ClassVar[bool] = True
    routes: ClassVar[bool] = True
    streams: ClassVar[bool] = True
    needs: ClassVar[Needs] = Needs.LAYERS
    rates: ClassVar[Mapping[str, float]] = {"adamw": 1e-3, "sgd": 0.3}

    cells: int = shared_setting("cells")
    tokens: int = setting(
        0, "class tokens; 0: as many as the kind of task needs", most=10_000, flag=False
    )
    after_norm: bool = setting(
        False, "cells join after the norm, as in other implementations", flag=False
    )

    def fitted(self, task: TaskShape) -> Method:
        needed = task.classes if task.per_pixel else 1
        return replace(self, tokens=self.tokens or needed)

    def check_task(self, task: TaskShape) -> None:
        super().check_task(task)
        if task.per_pixel and self.tokens != task.classes:
            raise EngramError(
                f"segmentation has one class token a class, not {self.tokens} for {task.classes}."
            )

    def parameters(self, task: TaskShape) -> dict[str, Initial]:
        depth, width = task.backbone.depth, task.backbone.width
        return {
            "cells": Initial((depth, self.cells, width), std=0.02),
            "class_token": class_token(self.tokens, width, task.class_init),
        }

    def macs(self, task: TaskShape, n: int, ancestors: Sequence[Method]) -> tuple[int, int]:
        """Every class token passes through the layers, and reads the backbone and all ancestors."""
        shape = task.backbone
        read = n
        for one in (self, *ancestors):
            assert isinstance(one, Masked)
            read += one.tokens + one.cells
        token = shape.depth * (token_macs(shape) + 2 * shape.width * read)
        return self.tokens * token, keys_values_macs(shape, self.cells)

    def details(self) -> list[tuple[str, str]]:
        after = " after the norm" if self.after_norm else ""
        tokens = [("class tokens", str(self.tokens))] if self.tokens > 1 else []
        return [("cells per layer", f"{self.cells}{after}"), *tokens]

    @classmethod
    def join(cls, tasks: Sequence[TaskInput], backbone: ViT) -> Joined:
        return partial(MaskedBranch, cls.memory(tasks, backbone), tasks)

    @staticmethod
    def memory(tasks: Sequence[TaskInput], backbone: ViT) -> Memory:
        """The memory of tasks that go through a pass together, parents first."""
        reads: dict[str, set[int]] = {}  # by task: itself and all its ancestors
        streams = []
        for i, task in enumerate(tasks):
            reads[task.name] = {i}.union(*(reads[parent] for parent in task.extends))
            assert isinstance(task.method, Masked)
            stream = Stream(
                task.name,
                task.tensors["class_token"],
                task.tensors["cells"],
                sorted(reads[task.name]),
                task.method.after_norm,
                find_adapters(task.tensors),
            )
            streams.append(stream)
        return Memory(backbone, streams)

    def attention_maps(
        self, tasks: Sequence[TaskInput], task: TaskInput, backbone: ViT, pixels: Tensor
    ) -> AttentionMaps:
        return masked_maps(self.memory(tasks, backbone), self.cells, backbone, pixels)


@dataclass(frozen=True)
class MaskedAdapter(Masked):
    """`masked`, and bottleneck adapters that only the task's own stream passes through."""

    name: ClassVar[str] = "masked+adapter"
    about: ClassVar[str] = "masked + adapters on the task's own stream"
    rates: ClassVar[Mapping[str, float]] = {"adamw": 5e-4, "sgd": 0.3}

    adapter_width: int = shared_setting("adapter_width")

    def parameters(self, task: TaskShape) -> dict[str, Initial]:
        depth, width = task.backbone.depth, task.backbone.width
        return super().parameters(task) | adapter_parameters(depth, width, self.adapter_width)

    def macs(self, task: TaskShape, n: int, ancestors: Sequence[Method]) -> tuple[int, int]:
        macs, once = super().macs(task, n, ancestors)
        depth, width = task.backbone.depth, task.backbone.width
        adapters = adapter_parameters(depth, width, self.adapter_width)
        return macs + self.tokens * parameter_count(adapters), once

    def details(self) -> list[tuple[str, str]]:
        return [*super().details(), ("width of its adapters", str(self.adapter_width))]


@dataclass(frozen=True)
class MaskedReadout(WithStatistics, Masked):
    """A masked task and a readout as one."""

    name: ClassVar[str] = "masked+readout"
    about: ClassVar[str] = "masked + a head on every layer"
    composed: ClassVar[bool] = True
    needs: ClassVar[Needs] = Needs.LAYERS | Needs.STATISTICS
    pooled_first: ClassVar[bool] = False


@dataclass(frozen=True)
class MaskedAdapterReadout(WithStatistics, MaskedAdapter):
    """A masked task with adapters and a readout as one."""

    name: ClassVar[str] = "masked+adapter+readout"
    about: ClassVar[str] = "masked + adapters + a head on every layer"
    composed: ClassVar[bool] = True
    needs: ClassVar[Needs] = Needs.LAYERS | Needs.STATISTICS
    pooled_first: ClassVar[bool] = False


class MaskedBranch(Branch):
    """The class tokens of masked tasks, which forward.py takes through the layers."""

    def __init__(self, memory: Memory, tasks: Sequence[TaskInput], batch: Batch) -> None:
        self.memory, self.streams = memory, [memory]
        self.tasks, self.route = tasks, batch.route
        if batch.route is not None:
            patches = (side // batch.backbone.config.patch for side in batch.size)
            tokens = batch.backbone.config.prefix + math.prod(patches)
            self.streams = self.groups = routed_streams(memory, batch.route, tokens)

    def last_tokens(self, n: int) -> int:
        return n if any(task.per_pixel for task in self.tasks) else 0

    def head_inputs(self, features: Features) -> dict[str, HeadInput]:
        if self.route is None:
            found = self.memory.split(self.final[0])
        else:
            found = split_routed(self.groups, self.final, self.route.rows)
        inputs = {}
        for task in self.tasks:
            if task.name in found:
                patches = features.patches_for(task)
                if patches is not None and self.route is not None:
                    rows = features.batch.rows(task.name)
                    patches = replace(patches, tokens=patches.tokens[rows])
                own = features.batch.backbone.norm(found[task.name])
                inputs[task.name] = HeadInput(own, patches)
        return inputs
