"""Recipe files: the settings that repeat a run, as TOML."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from engram.data.datasets import Splits
from engram.model import MemoryViT
from engram.tasks.settings import TaskSettings
from engram.train.recipe import Recipe


def settings_of(
    model: MemoryViT, splits: Splits, task: TaskSettings, recipe: Recipe, **others: Any
) -> dict[str, Any]:
    """What repeats a run, but for the data itself: trunk, kind, task, recipe, and `others`."""
    about = {"backbone": model.trunk.source, "kind": splits.kind, **asdict(task)}
    about["extends"] = list(task.extends)
    return {**about, **recipe.to_dict(), **others}
