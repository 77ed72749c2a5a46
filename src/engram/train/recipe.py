"""Every training setting, once: this dataclass is the flags, the documentation and the record."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from engram.errors import EngramError
from engram.util.settings import check, setting


@dataclass(frozen=True)
class Recipe:
    """How a task is trained. A value out of range is an EngramError that names it.

    The defaults give a good result on a small dataset in minutes; `RECIPES["paper"]` is the
    paper's. Everything here but the settings of the last group decides the weights.
    """

    epochs: int = setting(
        30, "passes over the training images; ignored when steps is given", least=1
    )
    steps: int = setting(0, "optimiser steps; 0: as many as the epochs make")
    batch: int = setting(64, "images in a step, over all processes", least=1)
    optimizer: str = setting("adamw", "the optimiser", choices=("adamw", "sgd"))
    lr: float = setting(0.0, "highest learning rate; 0: what suits the regime and the optimiser")
    momentum: float = setting(0.9, "of sgd", below=1)
    weight_decay: float = setting(0.01, "decoupled with adamw, plain with sgd")
    clip: float = setting(1.0, "largest norm of the gradient; 0: not clipped")
    warmup: int = setting(5, "steps of linear warm-up")
    schedule: str = setting("cosine", "after the warm-up", choices=("cosine", "constant"))
    label_smoothing: float = setting(0.0, "share of the target spread over all classes", below=1)
    ema: float = setting(0.0, "decay of an average of the weights that is kept; 0: none", below=1)
    patience: int = setting(0, "stop after this many evaluations without a better one; 0: never")
    augment: str = setting(
        "none",
        "random views of training images; auto: what suits the data",
        choices=("none", "inception", "pad-crop", "auto"),
    )
    views: int = setting(0, "augmented views of each image, made once and cached; 0: new ones")
    min_area: float = setting(
        0.08, "smallest part of a picture that an inception crop shows", most=1
    )
    seed: int = setting(0, "of the first weights")
    data_seed: int = setting(0, "of the order, the augmentation and the validation split")
    val_share: float = setting(
        0.1, "of the training images, where the data has no val split", below=1
    )
    precision: str = setting("auto", "of the products", choices=("auto", "fp32", "bf16", "fp16"))
    micro_batch: int = setting(64, "images in memory at once; the batch is accumulated", least=1)

    evaluations: int = setting(10, "how often to validate in a run", least=1)
    checkpoint_seconds: float = setting(60.0, "time between checkpoints")
    max_bad: float = setting(0.01, "share of unreadable images above which the run stops")
    cache: str = setting(
        "auto",
        "keep what the trunk feeds to tasks: auto does where nothing is random and it fits",
        choices=("auto", "on", "off"),
    )
    cache_gb: float = setting(20.0, "disk that one cache may take")
    workers: int = setting(2, "processes that decode images")

    def __post_init__(self) -> None:
        check(self)
        if self.views and self.augment == "none":
            raise EngramError(
                f"views is {self.views}, but augment is none, so all views would be the same; "
                "choose augment inception, pad-crop or auto."
            )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def but(self, **changes: Any) -> Recipe:
        """The same recipe with some settings changed; an unknown setting is an EngramError."""
        unknown = sorted(set(changes) - {item.name for item in fields(self)})
        if unknown:
            raise EngramError(f"A recipe has no setting {', '.join(unknown)}.")
        return dataclasses.replace(self, **changes)

    def rate_at(self, step: int, steps: int, lr: float) -> float:
        """The learning rate of a step: linear warm-up, then cosine to zero or constant."""
        if step < self.warmup:
            return lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return lr
        done = (step - self.warmup) / max(1, steps - self.warmup)
        return lr * 0.5 * (1 + math.cos(math.pi * done))


#: `paper`: SGD, momentum, clipping, 5-step warm-up, batch 512, 20,000 steps, inception crops. The
#: paper chose the learning rate per task from a grid it does not print.
RECIPES: Mapping[str, Recipe] = {
    "default": Recipe(),
    "paper": Recipe(
        steps=20_000,
        batch=512,
        optimizer="sgd",
        momentum=0.9,
        weight_decay=0.0,
        clip=1.0,
        warmup=5,
        augment="auto",
        evaluations=20,
    ),
}

#: What suits a regime when no learning rate is given.
RATES: Mapping[str, Mapping[str, float]] = {
    "adamw": {"full": 1e-4, "adapter": 1e-3, "memory": 1e-3, "head": 3e-3, "masked": 5e-4},
    "sgd": {"full": 1e-2, "adapter": 0.1, "memory": 0.3, "head": 0.3, "masked": 0.3},
}


def learning_rate(recipe: Recipe, regime: str) -> float:
    """The recipe's rate, or the one that suits the regime."""
    if recipe.lr:
        return recipe.lr
    rates = RATES[recipe.optimizer]
    kind = {"mlp-head": "head", "class": "memory", "memory+adapter": "adapter"}.get(regime, regime)
    return rates[kind.split("+")[0]]
