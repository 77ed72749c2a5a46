"""The model that a command is given, and `--data NAME=DATA:split` to measure a task on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram.errors import EngramError, Notice
from engram.train.options import ColumnOptions, named, split_data
from engram.util.text import counted

if TYPE_CHECKING:
    from engram.data.datasets import Splits
    from engram.inference.evaluate import Answers
    from engram.model import MemoryViT
    from engram.util.hub import PathOrHubId


def model_of(
    engrams: Sequence[PathOrHubId], backbone: str | None, backbone_dtype: str, neither: str
) -> MemoryViT:
    """The model of engrams, or a backbone alone; `neither` is the sentence if there is none."""
    from engram.backbones.load import load_backbone
    from engram.inference.engine import load_model
    from engram.model import MemoryViT

    if engrams:
        return load_model(engrams, backbone, backbone_dtype=backbone_dtype)
    if backbone is None:
        raise EngramError(neither)
    return MemoryViT(load_backbone(backbone, dtype=backbone_dtype))


@dataclass(frozen=True)
class LabelledTask:
    """A task, and the data of `--data NAME=DATA:split` to measure it on."""

    name: str
    splits: Splits
    split: str
    leaked: Sequence[int] = ()  # samples of the split that are in train, too

    def answers(self, model: MemoryViT, **settings: Any) -> Answers:
        """A model's answers about the data, with the settings of `inference.evaluate.answers`."""
        from engram.inference.evaluate import answers

        return answers(model, self.splits[self.split], self.name, **settings)


def labelled_task(
    model: MemoryViT, tasks: Sequence[str], text: str, split: str, columns: ColumnOptions
) -> LabelledTask:
    """Read `--data NAME=DATA:split`; DATA alone is enough for a single task."""
    from engram.data.datasets import load
    from engram.data.overview import find_leaks

    name, rest = named(text, tasks)
    source, split = split_data(rest, split)
    if not name and len(tasks) != 1:
        raise EngramError(
            f"--data {text}: which of the tasks {', '.join(tasks)} is it for? Write "
            f"--data {next(iter(tasks), 'NAME')}={text}."
        )
    task = model.task(name or tasks[0])
    if task.spec.name not in tasks:
        raise EngramError(f"--data {text} is for none of the tasks {', '.join(tasks)}.")
    splits = load(source, split=split, like=task.spec, **columns.columns())
    if splits.unsplit:
        notice = (
            f"{source} has no splits, so all of it is measured, "
            f"{counted(len(splits[split]), 'image')}; if {task.spec.name!r} learned from them, "
            "that is no test."
        )
        warnings.warn(notice, Notice, stacklevel=2)
    leaked: Sequence[int] = ()
    if not splits.unsplit and Path(source).exists():  # of a dataset on the Hub, train is not loaded
        leaked = find_leaks(load(source, like=task.spec, **columns.columns()), split)
    return LabelledTask(task.spec.name, splits, split, leaked)
