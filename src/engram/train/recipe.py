"""Every training setting, once: this dataclass is the flags, the documentation and the record."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from engram.errors import EngramError


def _setting(default: Any, about: str, least: float = 0, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"about": about, "least": least, "choices": choices})


@dataclass(frozen=True)
class Recipe:
    """How a task is trained. A value out of range is an EngramError that names it.

    The defaults give a good result on a small dataset in minutes; `RECIPES["paper"]` is the
    paper's. Everything here but the settings of the last group decides the weights.
    """

    epochs: int = _setting(30, "passes over the training images; ignored when steps is given", 1)
    steps: int = _setting(0, "optimiser steps; 0: as many as the epochs make")
    batch: int = _setting(64, "images in a step, over all processes", 1)
    optimizer: str = _setting("adamw", "the optimiser", choices=("adamw", "sgd"))
    lr: float = _setting(0.0, "highest learning rate; 0: what suits the regime and the optimiser")
    momentum: float = _setting(0.9, "of sgd")
    weight_decay: float = _setting(0.01, "decoupled with adamw, plain with sgd")
    clip: float = _setting(1.0, "largest norm of the gradient; 0: not clipped")
    warmup: int = _setting(5, "steps of linear warm-up")
    schedule: str = _setting("cosine", "after the warm-up", choices=("cosine", "constant"))
    label_smoothing: float = _setting(0.0, "share of the target spread over all classes")
    ema: float = _setting(0.0, "decay of an average of the weights that is kept; 0: none")
    patience: int = _setting(0, "stop after this many evaluations without a better one; 0: never")
    augment: str = _setting(
        "none",
        "random views of training images; auto: what suits the data",
        choices=("none", "inception", "pad-crop", "auto"),
    )
    views: int = _setting(0, "augmented views of each image, made once and cached; 0: new ones")
    min_area: float = _setting(0.08, "smallest part of a picture that an inception crop shows")
    seed: int = _setting(0, "of the first weights")
    data_seed: int = _setting(0, "of the order, the augmentation and the validation split")
    val_share: float = _setting(0.1, "of the training images, where the data has no val split")
    precision: str = _setting("auto", "of the products", choices=("auto", "fp32", "bf16", "fp16"))
    micro_batch: int = _setting(64, "images in memory at once; the batch is accumulated", 1)

    evaluations: int = _setting(10, "how often to validate in a run", 1)
    checkpoint_seconds: float = _setting(60.0, "time between checkpoints")
    max_bad: float = _setting(0.01, "share of unreadable images above which the run stops")
    cache: str = _setting(
        "auto",
        "keep what the trunk feeds to tasks: auto does where nothing is random and it fits",
        choices=("auto", "on", "off"),
    )
    cache_gb: float = _setting(20.0, "disk that one cache may take")
    workers: int = _setting(2, "processes that decode images")

    def __post_init__(self) -> None:
        for item in fields(self):
            value, about = getattr(self, item.name), item.metadata
            if about["choices"]:
                if value not in about["choices"]:
                    raise EngramError(
                        f"{item.name} is {value!r}; it can be {', '.join(about['choices'])}."
                    )
            elif (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not about["least"] <= value < math.inf
                or (str(item.type) == "int" and not isinstance(value, int))
            ):
                kind = "a whole number" if str(item.type) == "int" else "a number"
                raise EngramError(
                    f"{item.name} is {value!r}; it must be {kind}, at least {about['least']:g}."
                )
        for name in ("momentum", "label_smoothing", "ema", "val_share"):
            if getattr(self, name) >= 1:
                raise EngramError(f"{name} is {getattr(self, name)}; it must be below 1.")
        if self.min_area > 1:
            raise EngramError(f"min_area is {self.min_area}; it can be 1 at most.")
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
