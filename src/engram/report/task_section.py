"""Sections about tasks: metrics, how each was trained, its predictions, its attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engram.errors import EngramError
from engram.inference.evaluate import Answers
from engram.methods.attention_maps import SOURCES, AttentionMaps
from engram.model import MemoryViT
from engram.report.contents import (
    AttentionShares,
    Charts,
    Content,
    Facts,
    ImageRow,
    ImageTable,
    LayerShares,
    Section,
    Text,
)
from engram.report.costs_section import costs_section
from engram.report.findings import FINDINGS
from engram.report.images import backbone_views, paint_attention, thumbnail
from engram.store.portable import data_name
from engram.tasks.metrics import TITLES, shown
from engram.train.runs.plots import learning_curves, validation_metric
from engram.util.text import summarise_names

MAX_EXAMPLES = 4  # images with maps of attention
_FAMILIAR_IMAGES, _BATCH = 128, 16


@dataclass(frozen=True)
class TaskPart:
    """One task on a page: its answers on a split, and how it was trained."""

    answers: Answers
    history: Sequence[Mapping[str, float]] = ()
    history_note: str = ""
    tried: Section | None = None  # what auto or a sweep compared


def task_sections(model: MemoryViT, parts: Sequence[TaskPart]) -> list[Section]:
    """The sections of a page about tasks: how good each of them is and why, and what they cost."""
    specs = [model.task(part.answers.task).spec for part in parts]
    return [*(task_section(model, part) for part in parts), costs_section(model, specs)]


def task_section(model: MemoryViT, part: TaskPart) -> Section:
    answers, name, kind = part.answers, part.answers.task, part.answers.kind
    spec = model.task(name).spec
    contents: list[Content] = [Text(_data(model, answers)), Facts(_facts(model, answers))]
    if part.tried is not None:
        contents.append(part.tried)
    if part.history:
        metric = kind.metric_title(validation_metric(part.history[0]))
        charts = Charts(learning_curves(part.history, metric), part.history_note)
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


# Attention: maps over some images, and for a class token shares layer by layer

_MAPS = "Attention maps"
_NOTE = (
    "How much each patch contributes to what the class token reads, over all heads: the brighter, "
    "the more."
)


def attention_sections(model: MemoryViT, answers: Answers) -> list[Section]:
    """Maps and shares, or the reason why there are none."""
    examples = _examples(answers)
    samples = [int(answers.samples[i]) for i, _ in examples]
    views, pixels = backbone_views(model, answers.dataset, samples)
    try:
        found = model.attention_maps(answers.task, pixels)
    except EngramError as error:
        return [Section(f"attention-{answers.task}", _MAPS, [Text(str(error))])]
    shown = _shown_maps(found)
    rows = []
    for view, layers, (_, label) in zip(views, found.contribution, examples, strict=True):
        maps = [
            thumbnail(paint_attention(view, layers[i]), f"attention {where}")
            for i, (_, where) in shown.items()
        ]
        rows.append(ImageRow(label, [thumbnail(view, label), *maps]))
    columns = ("image", *(title for title, _ in shown.values()))
    note = _pooled_note(found) if found.pooled else _NOTE
    sections = [Section(f"attention-{answers.task}", _MAPS, [ImageTable(columns, rows, note)])]
    if not found.pooled:
        title = "Attention shares, layer by layer"
        sections.append(Section(f"shares-{answers.task}", title, [_shares(found)]))
    return sections


def _shown_maps(found: AttentionMaps) -> dict[int, tuple[str, str]]:
    """The maps to show, each with its title and with words that say where it comes from."""
    if found.pooled:
        return {0: ("pooled", "of the queries that pool the tokens")}
    depth = found.shares.shape[0]
    layers = sorted({max(0, math.ceil(depth * share) - 1) for share in (0.25, 0.5, 0.75, 1)})
    return {i: (f"layer {i + 1}", f"at layer {i + 1}") for i in layers}


def _pooled_note(found: AttentionMaps) -> str:
    share = float(found.shares[0, SOURCES.index("the picture's patches")])
    return (
        "How much each patch contributes to what the task's queries pool after the last layer. The "
        "brighter, the more. On average "
        f"{share:.0%} of the queries' weight is on patches and {1 - share:.0%} on the ViT's other "
        "tokens."
    )


def _examples(answers: Answers) -> list[tuple[int, str]]:
    """Images to show, as rows of the answers, each with a label.

    For classification they are the first image of each class that was predicted correctly; the
    first of all if none was.
    """
    if answers.labels.ndim == 1 and not answers.kind.per_pixel:
        first: dict[int, int] = {}
        right = answers.logits.argmax(1) == answers.labels
        for i in torch.nonzero(right).flatten().tolist():
            first.setdefault(int(answers.labels[i]), i)
        rows = [first[label] for label in sorted(first)] or range(len(right))
        names = answers.dataset.classes
        return [(i, names[int(answers.labels[i])]) for i in rows[:MAX_EXAMPLES]]
    samples = answers.samples[:MAX_EXAMPLES].tolist()
    return [(i, Path(answers.dataset.sample_name(sample)).name) for i, sample in enumerate(samples)]


def _shares(found: AttentionMaps) -> AttentionShares:
    shown = [p for p in range(len(SOURCES)) if float(found.shares[:, p].max()) > 0]
    cells = SOURCES.index("its cells")
    layers = [
        LayerShares(i, [(p, float(shares[p])) for p in shown], f"cells {float(shares[cells]):.0%}")
        for i, shares in enumerate(found.shares, start=1)
    ]
    note = "Shares of the class token's attention, averaged over heads and the images above."
    return AttentionShares(SOURCES, layers, note)
