"""Attention of a task: maps over some images, and for a class token shares layer by layer."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from engram.errors import EngramError
from engram.inference.evaluate import Answers
from engram.methods.attention_maps import SOURCES, AttentionMaps
from engram.model import MemoryViT
from engram.report.contents import (
    AttentionShares,
    ImageRow,
    ImageTable,
    LayerShares,
    Section,
    Text,
)
from engram.report.images import backbone_views, paint_attention, thumbnail

MAX_EXAMPLES = 4

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
