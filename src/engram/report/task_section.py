"""The section of one task: its metrics, how it was trained, its predictions, its attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engram.inference.evaluate import Answers
from engram.model import MemoryViT
from engram.report.attention_section import attention_sections
from engram.report.contents import (
    MAX_CLASSES,
    Charts,
    Content,
    Facts,
    Section,
    Table,
    Text,
)
from engram.report.findings import FINDINGS
from engram.report.images import backbone_views
from engram.store.portable import data_name
from engram.tasks.kind import Kind
from engram.tasks.metrics import TITLES, shown
from engram.train.plots import learning_curves, validation_metric
from engram.util.text import summarise_names

_TRIED = (
    "The best on held-out images first. Of those that tie, the one with the lowest loss was kept. "
    "Short trainings, which chose what was trained to the end, come last: they are measured on the "
    "first fold alone, where there are folds."
)
_TOGETHER = (
    "Of the tasks that were trained, not solved: at each step the one that was best then. Where "
    "another takes over, a curve may jump."
)


_FAMILIAR_IMAGES, _BATCH = 128, 16


@dataclass(frozen=True)
class TaskPart:
    """One task on a page: its answers on a split, and how it was trained."""

    answers: Answers
    history: Sequence[Mapping[str, float]] = ()
    settings: Sequence[Mapping[str, Any]] = ()  # of a sweep
    tried: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None  # by auto: columns, rows


def task_section(model: MemoryViT, part: TaskPart) -> Section:
    answers, name, kind = part.answers, part.answers.task, part.answers.kind
    spec = model.task(name).spec
    contents: list[Content] = [Text(_data(model, answers)), Facts(_facts(model, answers))]
    if part.settings:
        table = _settings(kind, part.settings)
        contents.append(Section(f"settings-{name}", "Settings that were tried", [table]))
    if part.tried is not None:
        columns, rows = part.tried
        kept = next(i for i, row in enumerate(rows) if row[-1].startswith("kept"))
        table = Table(columns, rows, _TRIED, highlighted=kept)
        contents.append(Section(f"tried-{name}", "Regimes that were tried", [table]))
    if part.history:
        metric = kind.metric_title(validation_metric(part.history[0]))
        note = "" if part.tried is None else _TOGETHER
        charts = Charts(learning_curves(part.history, metric), note)
        contents.append(Section(f"curves-{name}", "Learning curves", [charts]))
    if len(answers.labels):
        contents += _familiarity(model, answers)
        contents += FINDINGS[kind.name](model, answers)
        patches = kind.per_pixel or kind.one_class  # then no token reads the answer
        if spec.method.streams or not patches:
            contents += attention_sections(model, answers)
    return Section(f"task-{name}", f"Task {name}", contents)


def _data(model: MemoryViT, answers: Answers) -> str:
    kind, dataset = answers.kind, answers.dataset
    # Isolated, so that a name in a right-to-left script leaves the order of the others alone.
    names = [f"\u2068{name}\u2069" for name in model.task(answers.task).spec.classes]
    return (
        f"Data: {data_name(dataset.name)}, {dataset.split} split. {kind.name.capitalize()}, "
        f"{summarise_names(names, 12, kind.nouns)}."
    )


def _facts(model: MemoryViT, answers: Answers) -> list[tuple[str, str]]:
    task, kind, metrics = model.task(answers.task), answers.kind, answers.metrics()
    facts = [
        (f"{answers.dataset.split} {kind.title}", kind.shown(metrics[kind.score])),
        ("images", f"{metrics['images']:,}"),
        (kind.nouns[1], f"{len(task.spec.classes):,}"),
        ("parameters", f"{sum(p.numel() for p in task.parameters()):,}"),
        ("regime", task.spec.regime),
        *task.method.details(),
    ]
    for key in kind.columns[1:]:
        if key in metrics and key in TITLES:
            facts.append((TITLES[key], shown(key, metrics[key])))
    if task.spec.extends:
        facts.append(("extends", ", ".join(task.spec.extends)))
    if answers.failed:
        facts.append(("unreadable", f"{len(answers.failed):,}"))
    return facts


def _familiarity(model: MemoryViT, answers: Answers) -> list[Content]:
    """A sentence about how familiar images of the split look."""
    if model.task(answers.task).statistics is None:
        return []
    known = answers.familiarity
    values = (_measured_familiarity(model, answers) if known is None else known).double()
    low, middle, high = values.quantile(values.new_tensor([0.05, 0.5, 0.95])).tolist()
    strange = float((values < 0).double().mean())
    return [
        Text(
            f"Familiarity of {len(values):,} images: {middle:.2f} in the middle, nine of ten "
            f"between {low:.2f} and {high:.2f}; {strange:.0%} are below 0 and look unlike what the "
            "task learned from. Usual are 1 and 5%."
        )
    ]


def _measured_familiarity(model: MemoryViT, answers: Answers) -> Tensor:
    """Familiarity of images of the split, evenly spaced ones if there are many."""
    samples = answers.samples[:: -(-len(answers.samples) // _FAMILIAR_IMAGES)]
    found = []
    for some in torch.split(samples, _BATCH):
        _, pixels = backbone_views(model, answers.dataset, some.tolist())
        with torch.inference_mode():
            found.append(model.with_familiarity(pixels, [answers.task])[1][answers.task].cpu())
    return torch.cat(found)


def _settings(kind: Kind, settings: Sequence[Mapping[str, Any]]) -> Table:
    """The settings of a sweep, the best first."""
    metric = validation_metric(settings[0])
    key, title = f"val_{metric}", kind.metric_title(metric)
    shown = sorted(settings, key=lambda setting: -setting[key])[: 2 * MAX_CLASSES]
    rows = [
        (
            f"{setting['lr']:g}",
            str(setting["cells"]),
            f"{setting['weight_decay']:g}",
            f"{kind.shown(setting[key])} ± {kind.shown(setting['deviation'])}",
            str(len(setting["values"])),
        )
        for setting in shown
    ]
    note = f"The best first, by validation {title}."
    if len(shown) < len(settings):
        note = f"The best {len(shown)} of {len(settings)}, by validation {title}."
    columns = ("learning rate", "cells", "weight decay", f"validation {title}", "seeds")
    return Table(columns, rows, note, highlighted=0)
