"""The recipe file that every run writes: the settings that repeat it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from engram.data.datasets import Splits
from engram.model import MemoryViT
from engram.tasks.task_settings import TaskSettings
from engram.train.callbacks import Callback, RunStart
from engram.train.recipe import Recipe
from engram.util.documents import to_toml
from engram.util.files import write_atomically
from engram.util.text import utf8

NAME = "recipe.toml"


def settings_of(
    model: MemoryViT, splits: Splits, task: TaskSettings, recipe: Recipe, **others: Any
) -> dict[str, Any]:
    """Settings that repeat a run on the same data: backbone, kind, task, recipe, and `others`."""
    source = model.backbone.source
    backbone = os.path.abspath(source) if source != "pico" and os.path.exists(source) else source
    about = {"backbone": backbone, "kind": splits.kind, **task.to_dict(), **recipe.to_dict()}
    return {**about, **others}


class RecipeFile(Callback):
    """Writes `recipe.toml` into the run's folder: with `--recipe`, the file repeats the run.

    Args:
        more: What a run does not know of itself, such as how its data was read.
    """

    def __init__(self, more: Mapping[str, Any] | None = None) -> None:
        self.more = more or {}

    def started(self, start: RunStart) -> None:
        path = start.file(NAME, "RecipeFile")
        settings = {**start.settings, **self.more}
        given = {name: value for name, value in settings.items() if value not in (None, "", (), [])}
        command = "sweep" if "seeds" in settings else "fit"
        lead = (
            "# The settings of this run. The same data and this command repeat it:\n"
            f"# engram {command} DATA --task {start.task} --recipe {NAME} -o FILE.safetensors\n"
        )
        write_atomically(path, utf8(lead + to_toml(given)), owner_only=True)
