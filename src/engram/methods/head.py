"""A head on the backbone's pooled token, and `base`, the backbone's own answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from engram.methods.method import Batch, Branch, Features, HeadInput, Joined, Method, TaskInput
from engram.vit import ViT


@dataclass(frozen=True)
class Head(Method):
    """A linear head on the pooled token ("Head only" in the paper's Table 2)."""

    name: ClassVar[str] = "head"
    about: ClassVar[str] = "a linear head"
    solved: ClassVar[bool] = True
    rates: ClassVar[Mapping[str, float]] = {"adamw": 3e-3, "sgd": 0.3}

    @classmethod
    def family(cls) -> type[Method]:
        return Head

    @classmethod
    def join(cls, tasks: Sequence[TaskInput], backbone: ViT) -> Joined:
        return partial(HeadBranch, tasks)


@dataclass(frozen=True)
class MlpHead(Head):
    """An MLP head on the pooled token."""

    name: ClassVar[str] = "mlp-head"
    about: ClassVar[str] = "an MLP head"
    solved: ClassVar[bool] = False
    mlp_head: ClassVar[bool] = True


@dataclass(eq=False)
class HeadBranch(Branch):
    """Every head has the same input: the pooled token, and the patches in segmentation."""

    tasks: Sequence[TaskInput]
    batch: Batch

    def last_tokens(self, n: int) -> int:
        per_pixel = any(task.per_pixel for task in self.tasks)
        return 1 if self.batch.backbone.config.class_token and not per_pixel else n

    def head_inputs(self, features: Features) -> dict[str, HeadInput]:
        return {
            task.name: HeadInput(features.pooled, features.patches_for(task)) for task in self.tasks
        }


@dataclass(frozen=True)
class Base(Method):
    """The backbone's own answer: a task without parameters, which reads the unchanged tokens."""

    name: ClassVar[str] = "base"
    about: ClassVar[str] = "the backbone itself"

    @classmethod
    def join(cls, tasks: Sequence[TaskInput], backbone: ViT) -> Joined:
        return partial(BaseBranch, tasks)


@dataclass(eq=False)
class BaseBranch(Branch):
    """The original head takes the last tokens before and after the final norm."""

    tasks: Sequence[TaskInput]
    batch: Batch

    def last_tokens(self, n: int) -> int:
        config = self.batch.backbone.config
        if not config.class_token:
            return n
        if config.head is None:  # an embedding of the class token
            return 1
        return config.prefix if config.head.pooling in ("class", "distilled") else n

    def head_inputs(self, features: Features) -> dict[str, HeadInput]:
        return {task.name: HeadInput(features.tokens, raw=features.raw) for task in self.tasks}
