"""One page that says how good tasks are and why: tables, curves, mistakes, where they look.

`write_report` makes one HTML file that needs nothing else: no script, no network, pictures and
style inside. Everything that comes from a user (names of classes, tasks and files) is escaped.
What grows with the data is cut to a fixed number, and the page says so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from engram import __version__
from engram.data.datasets import Dataset
from engram.errors import EngramError
from engram.images.decode import Pixels
from engram.images.preprocessing import normalise
from engram.inference.attention import PARTS, attention
from engram.inference.evaluate import Answers, answers
from engram.model import MemoryViT
from engram.report.findings import FINDINGS, MOST_CLASSES, examples, view_of
from engram.report.pieces import block, charts, facts, paragraph, picture, short, table
from engram.tasks.costs import Costs, task_costs
from engram.tasks.kinds import Kind
from engram.tasks.regimes import REGIMES
from engram.tasks.shape import TrunkShape
from engram.tasks.spec import TaskSpec
from engram.train.plots import learning_curves, validation_metric
from engram.util.charts import STYLE
from engram.util.files import write_atomically
from engram.util.text import summarise_names, utf8

MOST_LOOKS = 4
MOST_IMAGES = 1000  # that a task is asked about for a report after training

_GLOW = np.array([255, 170, 40])  # the colour of attention
_FACTS = {  # metrics by their name for people
    "top5": "top 5",
    "macro_f1": "macro F1",
    "micro_f1": "micro F1",
    "ece": "calibration error",
    "mae": "mean absolute error",
    "rmse": "RMSE",
    "pixel_accuracy": "pixel accuracy",
}


@dataclass(frozen=True)
class Section:
    """A part of the page: a title and its HTML, made by the functions below."""

    key: str
    title: str
    html: str


@dataclass(frozen=True)
class TaskPart:
    """What is known about one task: its answers on a split, and how it was learned."""

    said: Answers
    history: Sequence[Mapping[str, float]] = ()
    settings: Sequence[Mapping[str, Any]] = ()  # of a sweep


def write_report(
    path: str | Path,
    model: MemoryViT,
    parts: Sequence[TaskPart],
    *,
    title: str,
    lead: str = "",
    first: Sequence[Section] = (),
) -> Path:
    """Write the page about these tasks, `first` sections before them, and give its path."""
    sections = [*first]
    for part in parts:
        sections.append(_task_section(model, part))
    specs = [model.task(part.said.task).spec for part in parts]
    sections.append(Section("regimes", "What it costs", _regimes(model, specs)))
    links = "".join(f'<a href="#{escape(s.key)}">{escape(s.title)}</a>' for s in sections)
    body = "".join(
        f'<section id="{escape(s.key)}"><h2>{escape(s.title)}</h2>{s.html}</section>'
        for s in sections
    )
    style = (resources("engram.report") / "report.css").read_text(encoding="utf-8")
    rules = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    source = model.trunk.source
    source = Path(source).name if os.path.isabs(source) else source  # the page may be sent away
    html = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{rules}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{STYLE}{style}</style></head><body>"
        f"<header><h1>{escape(title)}</h1>{paragraph(lead) if lead else ''}"
        f"<nav>{links}</nav></header><main>{body}</main>"
        f'<footer><p class="quiet">Made by engram {escape(__version__)} on the trunk '
        f"{escape(source)}, fingerprint {model.trunk.fingerprint[:12]}.</p></footer>"
        "</body></html>\n"
    )
    write_atomically(path, utf8(html))
    return Path(path)


def answers_for_report(model: MemoryViT, dataset: Dataset, task: str, workers: int = 0) -> Answers:
    """Answers about the pictures of a split, or about a thousand of them, chosen by chance."""
    if len(dataset) > MOST_IMAGES:
        chosen = np.random.default_rng(0).permutation(len(dataset))[:MOST_IMAGES]
        dataset = dataset.subset(np.sort(chosen))
    return answers(model, dataset, task, workers=workers)


# One task


def _task_section(model: MemoryViT, part: TaskPart) -> Section:
    said = part.said
    task, name, kind = model.task(said.task), said.task, said.kind
    metrics = said.metrics()
    told = [
        (f"{said.dataset.split} {kind.title}", kind.shown(metrics[kind.score])),
        ("pictures", f"{metrics['images']:,}"),
        (kind.nouns[1], f"{len(task.spec.classes):,}"),
        ("parameters", f"{sum(p.numel() for p in task.parameters()):,}"),
        ("regime", task.spec.regime),
        ("cells a layer", str(task.spec.cells)),
    ]
    for key in kind.columns[1:]:
        if key in metrics and key in _FACTS:
            told.append((_FACTS[key], f"{metrics[key]:.4g}"))
    if task.spec.extends:
        told.append(("extends", ", ".join(task.spec.extends)))
    if said.failed:
        told.append(("unreadable", f"{len(said.failed):,}"))
    names = [f"\u2068{name}\u2069" for name in task.spec.classes]  # whichever way they are written
    html = paragraph(
        f"Data: {said.dataset.name}, {said.dataset.split} split. {kind.name.capitalize()}, "
        f"{summarise_names(names, 12, kind.nouns)}."
    ) + facts(told)
    if part.settings:
        html += block(
            f"settings-{name}", "Settings that were tried", _settings(kind, part.settings)
        )
    if part.history:
        html += block(
            f"curves-{name}", "Learning curves", charts(learning_curves(part.history, kind.title))
        )
    if len(said.labels):
        for key, title, found in FINDINGS[kind.name](model, said):
            html += block(f"{key}-{name}", title, found)
        if task.spec.parts.masked or not kind.per_pixel:  # else the answer is from no token
            html += _looks(model, said)
    return Section(f"task-{name}", f"Task {name}", html)


def _looks(model: MemoryViT, said: Answers) -> str:
    """Two blocks: attention over patches on some pictures, and shares of what is read."""
    name, chosen = said.task, examples(said)[:MOST_LOOKS]
    views = [view_of(model, said.dataset, int(said.samples[i])) for i, _ in chosen]
    pixels = normalise(torch.from_numpy(np.stack(views)), model.preprocessing)
    try:
        seen = attention(model, name, pixels.to(model.trunk.position.device))
    except EngramError as error:
        return block(f"looks-{name}", "Where it looks", paragraph(str(error)))
    depth = seen.shares.shape[0]
    layers = sorted({max(0, math.ceil(depth * share) - 1) for share in (0.25, 0.5, 0.75, 1)})
    head = "".join(f'<th scope="col">layer {layer + 1}</th>' for layer in layers)
    rows = []
    for row, ((_, label), view) in enumerate(zip(chosen, views, strict=True)):
        lit = [
            picture(_lit(view, seen.patches[row, layer]), f"attention at layer {layer + 1}")
            for layer in layers
        ]
        cells = "".join(f"<td>{one}</td>" for one in (picture(view, label), *lit))
        rows.append(f"<tr><td>{escape(short(label, 40))}</td>{cells}</tr>")
    pictures = (
        paragraph(
            "The class token's attention over the patches, averaged over heads: the more it "
            "glows, the more is read there.",
            quiet=True,
        )
        + '<div class="wide"><table class="looks"><thead><tr><th></th><th scope="col">picture</th>'
        + f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
    used = [p for p in range(len(PARTS)) if float(seen.shares[:, p].max()) > 0]
    key = "".join(f'<li><i class="p{p}"></i>{PARTS[p]}</li>' for p in used)
    layers_read = []
    for layer in range(depth):
        shares = [float(seen.shares[layer, p]) for p in used]
        stack = "".join(
            f'<u class="p{p}" style="width:{100 * share:.2f}%" title="{PARTS[p]}: {share:.1%}"></u>'
            for p, share in zip(used, shares, strict=True)
        )
        cell_share = float(seen.shares[layer, PARTS.index("its cells")])
        layers_read.append(
            f"<span>layer {layer + 1}</span><i>{stack}</i><b>cells {cell_share:.0%}</b>"
        )
    reads = (
        paragraph(
            "Shares of the class token's attention, averaged over heads and the pictures above.",
            quiet=True,
        )
        + f'<ul class="key">{key}</ul><div class="bars">{"".join(layers_read)}</div>'
    )
    return block(f"looks-{name}", "Where it looks", pictures) + block(
        f"reads-{name}", "What it reads, layer by layer", reads
    )


def _settings(kind: Kind, settings: Sequence[Mapping[str, Any]]) -> str:
    key = f"val_{validation_metric(settings[0])}"
    best = max(settings, key=lambda one: one[key])
    ordered = sorted(settings, key=lambda one: -one[key])
    cut = ordered[: 2 * MOST_CLASSES]
    rows = [
        (
            f"{one['lr']:g}",
            str(one["cells"]),
            f"{one['weight_decay']:g}",
            f"{kind.shown(one[key])} ± {kind.shown(one['deviation'])}",
            str(len(one.get("accuracies", one.get("scores")))),
        )
        for one in cut
    ]
    note = f"The best first, by validation {kind.title}."
    if len(cut) < len(settings):
        note = f"The best {len(cut)} of {len(settings)}, by validation {kind.title}."
    columns = ("learning rate", "cells", "weight decay", f"validation {kind.title}", "seeds")
    return table(columns, rows, note, chosen=cut.index(best))


# Costs


def costs_of(model: MemoryViT) -> dict[str, Costs]:
    """What every attached task costs, with all that it reads."""
    shape, size = TrunkShape.of(model.trunk), model.preprocessing.size
    ancestors: dict[str, dict[str, TaskSpec]] = {}
    costs = {}
    for name, task in model.tasks.items():  # parents before children
        ancestors[name] = {}
        for parent in task.spec.extends:
            ancestors[name] |= {**ancestors[parent], parent: model.task(parent).spec}
        costs[name] = task_costs(shape, task.spec, list(ancestors[name].values()), size)
    return costs


def _regimes(model: MemoryViT, specs: Sequence[TaskSpec]) -> str:
    shape = TrunkShape.of(model.trunk)
    size = model.preprocessing.size
    spec = specs[0]
    plain = replace(spec, extends=(), update="fresh", after_norm=False)
    rows, used = [], list(REGIMES).index(spec.regime)
    for name, regime in REGIMES.items():
        tokens = spec.does.tokens(len(spec.classes), regime.masked)
        cells = (spec.cells or 5) if regime.cells else 0
        one = replace(plain, regime=name, cells=cells, tokens=tokens)
        cost = task_costs(shape, one, (), size)
        total = cost.macs + cost.head_macs
        rows.append(
            (
                name,
                regime.about,
                f"{cost.parameters + cost.head_parameters:,}",
                f"{total / 1e6:,.2f}",
                f"{2 * total / 1e6:,.2f}",
                f"{cost.share:.2%}",
                "no" if cost.own_pass else "yes",
            )
        )
    columns = (
        "regime",
        "what trains",
        "parameters",
        "MMAC",
        "MFLOP",
        "of the ViT",
        "shares a pass",
    )
    trunk = task_costs(shape, plain, (), size).trunk_macs
    note = (
        f"A task like {spec.name} ({len(spec.classes):,} {spec.does.nouns[1]}, "
        f"{spec.cells or 5} cells a layer) in every regime: "
        "what it adds to one picture's pass through the ViT, which takes "
        f"{trunk / 1e6:,.1f} MMAC, and the parameters it trains, head included. A MAC is one "
        "multiplication and one addition, so two FLOP; norms and activations are not counted. "
        "A regime that shares no pass takes the whole ViT once more."
    )
    html = table(columns, rows, note, chosen=used, words=2)
    if len(specs) > 1:
        mine, costs = [], costs_of(model)
        for one in specs:
            cost = costs[one.name]
            total = cost.macs + cost.head_macs
            mine.append(
                (
                    one.name,
                    one.regime,
                    f"{cost.parameters + cost.head_parameters:,}",
                    f"{total / 1e6:,.2f}",
                    f"{2 * total / 1e6:,.2f}",
                    f"{cost.share:.2%}",
                )
            )
        html += table(
            ("task", "regime", "parameters", "MMAC", "MFLOP", "of the ViT"),
            mine,
            "The tasks of this page.",
            words=2,
        )
    return html


def _lit(view: Pixels, weights: Tensor) -> Pixels:
    """The picture in gray, with a glow where the weights (rows, columns) are high."""
    peak = (weights / weights.max().clamp(min=1e-12)).float().cpu().numpy()
    light = Image.fromarray(peak).resize(view.shape[1::-1], Image.Resampling.BILINEAR)
    glow = 0.85 * np.clip(np.asarray(light), 0, 1)[..., None]
    gray = 30 + 0.5 * view.mean(-1, keepdims=True)
    lit: Pixels = np.rint((1 - glow) * gray + glow * _GLOW).astype(np.uint8)
    return lit
