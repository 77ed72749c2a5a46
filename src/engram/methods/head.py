"""Heads on the backbone's pooled token or its own embedding, and `base`, its own answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch.nn.functional as F

from engram.errors import EngramError
from engram.methods.method import (
    Batch,
    Branch,
    Features,
    HeadInput,
    Joined,
    Needs,
    SharedPassMethod,
    TaskInput,
    TaskShape,
)
from engram.util.settings import setting
from engram.util.tensors import tensors_hash
from engram.vit import ViT


@dataclass(frozen=True)
class Head(SharedPassMethod):
    """A linear head on the pooled token ("Head only" in the paper's Table 2)."""

    name: ClassVar[str] = "head"
    about: ClassVar[str] = "a linear head"
    solved: ClassVar[bool] = True
    rates: ClassVar[Mapping[str, float]] = {"adamw": 3e-3, "sgd": 0.3}

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
class Base(SharedPassMethod):
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


@dataclass(frozen=True)
class CosineHead(SharedPassMethod):
    """A linear head on the backbone's own embedding, normalised to length 1.

    The embedding is the output of the backbone's own head: CLIP's projection, SigLIP's attention
    pooling. With the embeddings of texts as weights, the output is their cosine with the image, as
    in zero-shot classification (Radford et al. 2021, arXiv:2103.00020).
    """

    name: ClassVar[str] = "cosine-head"
    about: ClassVar[str] = "a linear head on the normalised embedding of the backbone"
    solved: ClassVar[bool] = True
    keeps_start: ClassVar[bool] = True
    answers_pixels: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs.FINAL

    width: int = setting(1, "numbers in the embedding", least=1, most=1_000_000, flag=False)
    #: A linear layer of the backbone's own head is no part of its fingerprint.
    embedding: str = setting("", "hash of the backbone's own head", flag=False)

    @classmethod
    def of(cls, backbone: ViT) -> CosineHead:
        """The method for a backbone, which must have a head of its own."""
        width, embedding = _embedding(backbone)
        return cls(width, embedding)

    def check_backbone(self, backbone: ViT) -> None:
        if _embedding(backbone) != (self.width, self.embedding):
            raise EngramError(
                f"it reads the embedding that another head made than the one of {backbone.source}; "
                "load the model that its words were embedded with."
            )

    def features(self, task: TaskShape) -> int:
        return self.width

    @classmethod
    def join(cls, tasks: Sequence[TaskInput], backbone: ViT) -> Joined:
        return partial(CosineBranch, tasks)


class CosineBranch(BaseBranch):
    """Every head has the same input: the embedding of the image, of length 1."""

    def head_inputs(self, features: Features) -> dict[str, HeadInput]:
        head = self.batch.backbone.head
        assert head is not None
        raw = features.raw if head.config.raw else features.tokens
        own = F.normalize(head(raw, features.tokens), dim=-1)
        return {task.name: HeadInput(own) for task in self.tasks}


def _embedding(backbone: ViT) -> tuple[int, str]:
    """The width of what the backbone's own head gives, and the hash of its tensors."""
    head = backbone.head
    if head is None:
        raise EngramError(f"{backbone.source} has no head of its own, which makes the embedding.")
    width = backbone.config.width if head.linear is None else head.linear.out_features
    return width, tensors_hash(dict(head.state_dict()))[:16]
