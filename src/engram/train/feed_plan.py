"""Plan of the batches of a run: their order, whether a cache can be used, and what it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engram.backbones.shape import BackboneShape
from engram.data.datasets import Splits
from engram.data.folds import Integers
from engram.data.loader import Transform, balanced, shuffled
from engram.errors import flag
from engram.methods.forward import reads_tokens
from engram.methods.method import Needs
from engram.model import MemoryViT
from engram.tasks.costs import backbone_macs
from engram.tasks.spec import TaskSpec
from engram.train.cache import Cache, Keeps, View, row_bytes, tokens_of
from engram.train.recipe import Recipe
from engram.util.processes import cpu_has_bf16, dtype_for

#: Multiplications of a pass that is long enough for a trial of the CPU, which takes two seconds:
#: 180 images on a DINOv2-small, 800 on a ViT-Ti.
_LONG_PASS = 1e12


@dataclass(frozen=True)
class FeedPlan:
    """The tasks that are to train, on which data and how; no image is read."""

    model: MemoryViT
    specs: Sequence[TaskSpec]
    splits: Splits  # with a validation split
    recipe: Recipe
    transform: Transform | None = None

    @property
    def augment(self) -> str:
        return self.splits.augment if self.recipe.augment == "auto" else self.recipe.augment

    @property
    def per_epoch(self) -> int:
        """Optimiser steps in an epoch."""
        return -(-len(self.splits["train"]) // self.recipe.batch)

    def order(self, epoch: int, even: bool) -> Integers:
        """The training samples of an epoch; `even` where a sampler may balance the classes."""
        train, seed = self.splits["train"], self.recipe.data_seed
        if even and self.recipe.balance == "sampler":
            return balanced(train.labels, seed, epoch)
        return shuffled(len(train), seed, epoch)

    @property
    def only_pooled(self) -> bool:
        """Whether every task reads nothing but the backbone's pooled token."""
        return not any(spec.method.needs for spec in self.specs)

    @property
    def keeps(self) -> Keeps:
        """Kind of row that these tasks need."""
        needs = Needs.POOLED
        for spec in self.specs:
            needs |= spec.method.needs
            needs |= Needs.FINAL if spec.kind_object.per_pixel else Needs.POOLED
        if needs is Needs.STATISTICS:
            return "statistics"
        if needs is Needs.FINAL:
            return "final"
        if needs & (Needs.FINAL | Needs.STATISTICS):
            return "all"
        return "keys" if self._reads_keys and self._fits("keys") else "layers"

    @property
    def _reads_keys(self) -> bool:
        """Whether every step would make the keys and values of the backbone, once for all tasks.

        They take more disk than tokens, and a sixth of a pass to make: with them a step of many
        masked tasks takes a fifth less time.
        """
        backbone = self.model.backbone
        streams = [spec for spec in self.specs if spec.method.streams]
        shape = BackboneShape.measure(backbone)
        tokens = sum(spec.shapes(shape)["class_token"][0] for spec in streams)
        n = tokens_of(backbone, self.model.preprocessing)
        return bool(streams) and not reads_tokens(backbone, n, tokens, passes=2)

    def cache(self, view: View | None = None) -> Cache:
        """The cache for these tasks, of images as they are or as augmentation shows them."""
        model = self.model
        dtype = self._pass_dtype
        return Cache(model.backbone, model.preprocessing, view, keeps=self.keeps, dtype=dtype)

    @property
    def _pass_dtype(self) -> torch.dtype:
        """The type that the pass which fills the cache computes in.

        By default that is bf16 for a long pass on a CPU that has it: tasks learn as much from such
        features (benchmarks/cache_precision.py).
        """
        backbone, auto = self.model.backbone, self.recipe.precision == "auto"
        shape, size = BackboneShape.measure(backbone), self.model.preprocessing.size
        macs = self._images * backbone_macs(shape, size)
        if auto and backbone.device.type == "cpu" and macs > _LONG_PASS and cpu_has_bf16():
            return torch.bfloat16
        return dtype_for(self.recipe.precision, backbone.device)

    def reason_against(self) -> str | None:
        """Why the cache cannot be used, known from the settings alone; None if it can."""
        if not all(spec.method.shares_pass for spec in self.specs):
            return "the regime changes the backbone's own tokens"
        if self.transform is not None:
            return "what a transform of your own does cannot be known"
        if self.augment != "none" and not self.recipe.views:
            return (
                f"{flag('augment')} is {self.augment}, which is random every time (give "
                f"{flag('views')} to fix some)"
            )
        return None

    @property
    def bytes(self) -> int:
        """The disk that all images take, those included that are stored already."""
        return self._bytes_of(self.keeps)

    @property
    def _images(self) -> int:
        """Rows of the cache: images, and views of them."""
        images = len(self.splits["train"])
        if self.augment != "none":
            return images * self.recipe.views + len(self.splits.held_out)
        if self.splits.folds is None:  # else validation images are training images
            images += len(self.splits["val"])
        return images

    def _bytes_of(self, keeps: Keeps) -> int:
        return self._images * row_bytes(self.model.backbone, self.model.preprocessing, keeps)

    def _fits(self, keeps: Keeps) -> bool:
        return self._bytes_of(keeps) <= self.recipe.cache_gb * 1e9

    def too_large(self) -> str | None:
        """Why the whole cache would be too large for `cache_gb`; None if it is not."""
        if self._fits(self.keeps):
            return None
        return (
            f"it would take {self.bytes / 1e9:.2g} GB, and {flag('cache_gb')} is "
            f"{self.recipe.cache_gb:g}"
        )
