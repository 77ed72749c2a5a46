"""One row of a table on one dataset: the regime, its size, the images and the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.paper.records import RATES, RUNS, Record
from benchmarks.paper.runs import datasets
from engram.methods import METHODS, Method, create_method
from engram.model import MemoryViT
from engram.train.recipe import Recipe
from engram.vit.vit import ViT

EPOCHS, BATCH = 10, 32  # of training through the backbone
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Setting:
    """The fields are stored in every record; fields at their default are not part of the name."""

    set: str  # the dataset
    regime: str
    cells: int = 5
    update: str = "fresh"
    width: int = 32  # of the adapters
    pixels: int = 112
    images: int = 1_000  # at most; pets and flowers have fewer
    epochs: int = EPOCHS
    batch: int = BATCH
    after_norm: bool = False  # cells join after the layer's norm
    place: str = "both"  # of the adapters: parallel to "attention", to the "mlp", or "both"
    head_rate: float = 1.0  # learning rate of the head, as a multiple of the others'
    views: int = 0  # augmented views in the cache
    augment: str = "auto"  # augmentation of the views; auto: the dataset's own
    precision: str = "fp32"  # of the passes in training
    backbone: str = datasets.VIT_TI

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", self.cells if self.has("cells") else 0)
        object.__setattr__(self, "width", self.width if self.has("adapter_width") else 0)

    def has(self, name: str) -> bool:
        """Whether the regime has such a setting; PEFT's LoRA and `auto` are no regimes."""
        return self.regime in METHODS and name in METHODS[self.regime].setting_names()

    def method(self) -> Method:
        own = {
            "cells": self.cells,
            "adapter_width": self.width,
            "update": self.update,
            "after_norm": self.after_norm,
        }
        return create_method(self.regime, {n: value for n, value in own.items() if self.has(n)})

    @property
    def slug(self) -> str:
        """The name of its record of learning rates."""
        words = [self.set, str(self.pixels), str(self.images), self.regime]
        if self.has("cells"):
            words.append(f"m{self.cells}")
        if self.has("adapter_width"):
            words.append(f"w{self.width}")
        words += [] if self.update == "fresh" else [self.update]
        words += ["after"] if self.after_norm else []
        words += [] if self.place == "both" else [self.place]
        words += [] if self.head_rate == 1 else [f"h{self.head_rate:g}"]
        words += [f"v{self.views}"] if self.views else []
        words += [] if self.augment == "auto" else [self.augment]
        words += [] if self.precision == "fp32" else [self.precision]
        words += [] if self.backbone == datasets.VIT_TI else [self.backbone]
        return "-".join([*words, f"e{self.epochs}", f"b{self.batch}"])

    def run_name(self, seed: int) -> str:
        """The name of the record of one run."""
        return f"{self.slug}-seed{seed}"

    @property
    def plain(self) -> bool:
        """As in the paper, except for the regime and the number of cells."""
        return (self.update, self.after_norm, self.head_rate, self.views) == ("fresh", False, 1, 0)

    @staticmethod
    def label(record: Record) -> str:
        """A short description of a record's setting."""
        setting = Setting(**{i.name: record[i.name] for i in fields(Setting) if i.name in record})
        slug = setting.slug.removesuffix(f"-e{setting.epochs}-b{setting.batch}")
        return slug.replace(f"-{setting.images}-", " px, ", 1).replace("-", " ")

    # Training

    def load_backbone(self, raw: bool = False) -> ViT:
        return datasets.backbone(self.pixels, raw, self.backbone)

    def add_to(self, model: MemoryViT, name: str, seed: int) -> int:
        """Add the untrained task, and return the number of its parameters without the head."""
        splits = datasets.splits(self.set, self.pixels, self.images)
        task = model.add(splits.task_spec(name, self.method()), seed=seed)
        count = sum(p.numel() for n, p in task.named_parameters() if not n.startswith("head."))
        if self.place != "both":
            absent = {"attention": 1, "mlp": 0}[self.place]
            for parameter in task.get_submodule("adapters").parameters():
                _freeze_adapters(parameter, absent)
                count -= parameter[:, absent].numel()
        return count

    def recipe(self, lr: float, seed: int = 0) -> Recipe:
        return Recipe(
            epochs=self.epochs,
            batch=self.batch,
            micro_batch=self.batch,
            lr=lr,
            seed=seed,
            data_seed=seed,
            evaluations=1,
            patience=0,
            ema=0.0,
            workers=0,
            views=self.views,
            augment=self.augment if self.views else "none",
            min_area=0.35,
            precision=self.precision,
        )


def _freeze_adapters(parameter: Tensor, place: int) -> None:
    """Adapters at this place never learn; `up` starts at zero, so they have no effect."""

    def without(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[:, place] = 0
        return gradient

    parameter.register_hook(without)  # type: ignore[no-untyped-call]


# Results


def engram_path(setting: Setting, seed: int) -> Path:
    return datasets.WORK / "engrams" / f"{setting.run_name(seed)}.safetensors"


def run_records(setting: Setting) -> list[Record]:
    """The records of every seed that was run."""
    found = [RUNS.get(setting.run_name(seed)) for seed in SEEDS]
    return [record for record in found if record is not None]


def scores(
    lr: float, seed: int, val: Mapping[str, Any], test: Mapping[str, Any], parameters: int
) -> Record:
    """The part of a run's record that is the same for every way of training."""
    return {
        "lr": lr,
        "seed": seed,
        "val": val["accuracy"],
        "val_loss": round(val["loss"], 4),
        "test": test["accuracy"],
        "test_images": test["images"],
        "parameters": parameters,
    }


def chosen_rate(setting: Setting) -> float:
    """The best learning rate of those that were tried for this setting."""
    record = RATES.get(setting.slug)
    assert record is not None, f"no rates were tried for {setting.slug}"
    return best_rate(record)


def best_rate(record: Record) -> float:
    """The rate with the best mean validation accuracy; of equal ones, the one with lower loss."""

    def score(lr: str) -> tuple[float, float]:
        tried = record["val"][lr]
        mean = sum(one["accuracy"] for one in tried) / len(tried)
        return round(mean, 6), -sum(one["loss"] for one in tried) / len(tried)

    return float(max(record["val"], key=score))
