"""Every training setting, once: this dataclass is the flags, the documentation and the record."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram.errors import EngramError, flag
from engram.tasks.task_settings import TaskSettings
from engram.util.cpus import DECODERS, DECODERS_SHOWN
from engram.util.documents import read_toml, to_toml
from engram.util.files import write_atomically
from engram.util.settings import check, setting, settings_fields
from engram.util.text import nearest, utf8

if TYPE_CHECKING:
    from engram.methods.method import Method
    from engram.tasks.kind import Kind


@dataclass(frozen=True)
class Recipe:
    """The training settings of `fit` and `sweep`, each with a default.

    Every field is a keyword argument, a flag of the commands, and is recorded in the engram. The
    defaults give a good result on a small dataset in minutes; `--recipe paper` is the paper's.
    All fields except the last six decide the weights.

    Raises:
        EngramError: A value is out of range. The message names it.

    Examples:
        >>> recipe = engram.Recipe(epochs=10, lr=0.003, augment="auto")
        >>> longer = recipe.but(epochs=30)
    """

    epochs: int = setting(30, "passes over the training images, unless steps is given", least=1)
    steps: int = setting(0, "optimiser steps; 0: as many as the epochs need")
    batch: int = setting(64, "images per optimiser step, over all processes", least=1)
    optimizer: str = setting("adamw", "optimiser", choices=("adamw", "sgd"))
    lr: float = setting(0.0, "peak learning rate; 0: the default of the regime and optimiser")
    momentum: float = setting(0.9, "momentum of SGD", below=1)
    weight_decay: float = setting(0.01, "weight decay, decoupled with adamw")
    clip: float = setting(1.0, "largest gradient norm; 0: no clipping")
    warmup: int = setting(5, "steps of linear learning-rate warm-up")
    schedule: str = setting(
        "cosine", "learning-rate schedule after the warm-up", choices=("cosine", "constant")
    )
    label_smoothing: float = setting(0.0, "label smoothing", below=1)
    mixup: float = setting(
        0.0, "alpha of mixup: images are mixed in pairs, by shares from Beta(alpha, alpha); 0: none"
    )
    balance: str = setting(
        "none",
        "what evens out classes of unequal size: weights in the loss, or a sampler of batches",
        choices=("none", "weights", "sampler"),
    )
    ema: float = setting(
        0.98, "decay of the moving average of the weights, which is validated; 0: none", below=1
    )
    patience: int = setting(
        4,
        "stop after this many validations without improvement and keep the best weights; 0: keep "
        "the last",
    )
    augment: str = setting(
        "none",
        "random augmentation of training images; auto: what suits the data",
        choices=("none", "inception", "pad-crop", "auto"),
    )
    views: int = setting(0, "augmented views per image, computed once and cached; 0: new ones")
    min_area: float = setting(0.08, "smallest share of an image that a random crop shows", most=1)
    calibrate: str = setting(
        "on",
        "divide logits by a temperature that fits the probabilities to the validation images",
        choices=("on", "off"),
    )
    statistics: str = setting(
        "on",
        "keep means and spread of the training images' features, for familiarity and new classes",
        choices=("on", "off"),
    )
    seed: int = setting(0, "random seed for initialisation")
    data_seed: int = setting(0, "random seed for order, augmentation and the validation split")
    folds: int = setting(
        0,
        "folds of cross-validation, if there is no val split; 0: of a fifth each, five at most, "
        "until about 300 images are held out",
        most=20,
    )
    val_share: float = setting(
        0.0, "share of training images that a single fold holds out; 0: what folds says", below=1
    )
    refit: bool = setting(True, "learn from the held-out images too, once the choice is made")
    precision: str = setting(
        "auto",
        "numeric precision of training",
        choices=("auto", "fp32", "bf16", "fp16"),
        group="Resources",
    )
    micro_batch: int = setting(
        64, "images in memory at once; gradients are accumulated", least=1, group="Resources"
    )

    evaluations: int = setting(0, "number of validations in a run; 0: one an epoch, 10 to 30")
    checkpoint_seconds: float = setting(60.0, "seconds between checkpoints", group="Resources")
    max_bad: float = setting(
        0.01, "share of unreadable images above which the run stops, if they are more than two"
    )
    cache: str = setting(
        "auto",
        "train from a cache of the backbone's tokens; auto: where nothing is random and it fits",
        choices=("auto", "on", "off"),
        group="Resources",
    )
    cache_gb: float = setting(20.0, "largest size of a cache in GB", group="Resources")
    workers: int = setting(
        DECODERS, "processes that decode images", shown=DECODERS_SHOWN, group="Resources"
    )

    def __post_init__(self) -> None:
        check(self)
        if self.views and self.augment == "none":
            raise EngramError(
                f"{flag('views')} is {self.views}, but {flag('augment')} is none, so all views "
                f"would be the same; choose {flag('augment')} inception, pad-crop or auto."
            )
        if self.folds > 1 and self.val_share:
            raise EngramError(
                f"{flag('folds')} is {self.folds}, and {flag('val_share')} holds out one share; "
                "give one of them."
            )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def but(self, **changes: Any) -> Recipe:
        """A copy with some settings changed; an unknown setting is an EngramError."""
        unknown = sorted(set(changes) - {item.name for item in fields(self)})
        if unknown:
            raise EngramError(f"A recipe has no setting {', '.join(unknown)}.")
        return dataclasses.replace(self, **changes)

    def check_for(self, kind: Kind) -> None:
        """Refuse with an EngramError what makes no sense for a kind of task."""
        if self.balance != "none" and self.balance not in kind.balances:
            can = " or ".join(("none", *kind.balances))
            raise EngramError(
                f"{flag('balance')} is {self.balance}, but {kind.name} can only have {can}."
            )
        if self.label_smoothing and not kind.smooths:
            raise EngramError(
                f"{flag('label_smoothing')} is {self.label_smoothing:g}, but {kind.name} learns "
                f"from {'good images' if kind.one_class else 'numbers'}, which cannot be smoothed; "
                "leave it out."
            )
        if kind.one_class and self.augment not in ("none", "auto"):
            raise EngramError(
                f"{flag('augment')} is {self.augment}, but {kind.name} compares images with good "
                "ones as they are; leave it out."
            )
        if self.mixup and not kind.mixes:
            raise EngramError(
                f"{flag('mixup')} is {self.mixup:g}, but in {kind.name} every pixel has a label "
                "of its own, and mixed pixels have none; leave it out."
            )

    def steps_between_evaluations(self, steps: int, per_epoch: int) -> int:
        """After how many of `steps` in all a validation follows, with `per_epoch` in an epoch."""
        if self.evaluations:
            return max(1, steps // self.evaluations)
        fewest, most = _EVALUATIONS
        return max(1, min(max(per_epoch, -(-steps // most)), steps // fewest))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recipe:
        """The training settings of a recipe file, such as the `recipe.toml` of a run.

        What the file says about task, backbone and data is left out: it is for `add_task`,
        `load_backbone` and `data.load`.
        """
        names = {item.name for item in fields(cls)}
        return cls(**{k: v for k, v in read_settings(Path(path)).items() if k in names})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the settings as a recipe file, for `load` and `--recipe`."""
        write_atomically(Path(path), utf8(to_toml(self.to_dict())))

    def per_epoch(self, images: int) -> int:
        """The optimiser steps of an epoch of so many training images."""
        return -(-images // self.batch)

    def steps_for(self, images: int) -> int:
        """The optimiser steps of a run on so many training images."""
        return self.steps or self.epochs * self.per_epoch(images)

    def rate_at(self, step: int, steps: int, lr: float) -> float:
        """The learning rate of a step: linear warm-up, then cosine to zero or constant."""
        if step < self.warmup:
            return lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return lr
        done = (step - self.warmup) / max(1, steps - self.warmup)
        return lr * 0.5 * (1 + math.cos(math.pi * done))


_EVALUATIONS = 10, 30  # in a run, where no number is given

#: What a recipe file may say besides: about the task, the backbone, the data, and a sweep.
_OTHERS = (
    *(item.name for item in settings_fields(TaskSettings)),
    *("backbone", "image_size", "backbone_dtype", "kind", "classes", "ignore"),
    *("image_column", "label", "split_column", "group_column", "seeds", "refit", "soup"),
    "own_pass",
)


def read_settings(path: Path) -> dict[str, Any]:
    """Read a recipe file; a key that no flag has is an EngramError."""
    settings, known = read_toml(path), [*(item.name for item in fields(Recipe)), *_OTHERS]
    for key in settings:
        if key not in known:
            raise EngramError(f"{path} sets {key}, which is no setting; {nearest(key, known)}.")
    return settings


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
        ema=0.0,
        patience=0,
        augment="auto",
        evaluations=20,
    ),
}


def learning_rate(recipe: Recipe, method: type[Method]) -> float:
    """The recipe's rate, or the one that suits the method."""
    return recipe.lr or method.rates[recipe.optimizer]
