"""One page that says how good tasks are and why: tables, curves, mistakes, where they look.

`write_report` makes one HTML file that needs nothing else: no script, no network, pictures and
style inside. Everything that comes from a user (names of classes, tasks and files) is escaped.
What grows with the data is cut to a fixed number, and the page says so.
"""

from __future__ import annotations

import base64
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
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
from engram.costs import Costs, shape_of, task_costs
from engram.data import Dataset
from engram.errors import EngramError
from engram.evaluate import Answers, answers, preprocessing_of
from engram.files import few, write_atomically
from engram.images import BadImage, Pixels, evaluation_view, normalise
from engram.looks import PARTS, looks
from engram.model import MemoryViT
from engram.regimes import REGIMES, TaskSpec

MOST_CLASSES = 20  # in a confusion matrix and in the list of classes
MOST_MISTAKES = 12
MOST_LOOKS = 4
MOST_IMAGES = 1000  # that a task is asked about for a report after training

_GLOW = np.array([255, 170, 40])  # the colour of attention

Table = Sequence[Sequence[str]]


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
    style = (resources("engram") / "report.css").read_text(encoding="utf-8")
    rules = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    source = model.trunk.source
    source = Path(source).name if os.path.isabs(source) else source  # the page may be sent away
    html = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{rules}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{style}</style></head><body>"
        f"<header><h1>{escape(title)}</h1>{paragraph(lead) if lead else ''}"
        f"<nav>{links}</nav></header><main>{body}</main>"
        f'<footer><p class="quiet">Made by engram {escape(__version__)} on the trunk '
        f"{escape(source)}, fingerprint {model.trunk.fingerprint[:12]}.</p></footer>"
        "</body></html>\n"
    )
    write_atomically(path, html.encode())
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
    task, name = model.task(said.task), said.task
    metrics = said.metrics()
    facts = [
        (f"{said.dataset.split} accuracy", f"{metrics['accuracy']:.1%}"),
        ("pictures", f"{metrics['images']:,}"),
        ("classes", f"{len(task.spec.classes):,}"),
        ("parameters", f"{sum(p.numel() for p in task.parameters()):,}"),
        ("regime", task.spec.regime),
        ("cells a layer", str(task.spec.cells)),
    ]
    for key, label in (("macro_f1", "macro F1"), ("ece", "calibration error")):
        if key in metrics:
            facts.append((label, f"{metrics[key]:.3f}"))
    if task.spec.extends:
        facts.append(("extends", ", ".join(task.spec.extends)))
    if said.failed:
        facts.append(("unreadable", f"{len(said.failed):,}"))
    html = paragraph(
        f"Data: {said.dataset.name}, {said.dataset.split} split. {few(task.spec.classes, 12)}."
    ) + _facts(facts)
    if part.settings:
        html += _block(f"settings-{name}", "Settings that were tried", _settings(part.settings))
    if part.history:
        html += _block(f"curves-{name}", "Learning curves", _curves(part.history))
    if len(said.labels):
        html += _block(f"confusion-{name}", "Confusion matrix", _confusion(said))
        html += _block(f"classes-{name}", "Accuracy of each class", _per_class(said))
        html += _block(f"mistakes-{name}", "Worst mistakes", _mistakes(model, said))
        html += _looks(model, said)
    return Section(f"task-{name}", f"Task {name}", html)


def _confusion(said: Answers) -> str:
    classes, answer = said.dataset.classes, said.logits.argmax(1)
    counts = torch.bincount(said.labels * len(classes) + answer, minlength=len(classes) ** 2).view(
        len(classes), -1
    )
    note = (
        "Rows are the true classes, columns the answers; the stronger the colour, the larger the "
        "share of the row."
    )
    shown = list(range(len(classes)))
    if len(classes) > MOST_CLASSES:
        wrong = counts.sum(1) + counts.sum(0) - 2 * counts.diagonal()
        shown = sorted(wrong.topk(MOST_CLASSES).indices.tolist())
        note += (
            f" Only the {MOST_CLASSES} of {len(classes):,} classes with most mistakes are shown."
        )
    tall = " tall" if len(shown) * max(len(classes[c]) for c in shown) > 60 else ""
    head = "".join(
        f'<th scope="col" title="{escape(classes[c])}">{escape(_short(classes[c], 24))}</th>'
        for c in shown
    )
    rows = []
    for r in shown:
        total = max(1, int(counts[r].sum()))
        cells = []
        for c in shown:
            count = int(counts[r, c])
            share = count / total
            kind = "right" if r == c else ""
            kind += " deep" if share > 0.5 else "" if count else " none"
            what = f"{count} of {total}: {classes[r]}, answered {classes[c]}"
            cells.append(
                f'<td class="{kind}" style="--share:{math.sqrt(share):.2f}" title="{escape(what)}">'
                f"{count}</td>"
            )
        rows.append(
            f'<tr><th scope="row">{escape(_short(classes[r], 24))}</th>{"".join(cells)}</tr>'
        )
    return (
        f'{paragraph(note, quiet=True)}<div class="wide"><table class="matrix{tall}"><thead>'
        f"<tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _per_class(said: Answers) -> str:
    classes = said.dataset.classes
    right = said.logits.argmax(1) == said.labels
    seen = torch.bincount(said.labels, minlength=len(classes))
    hits = torch.bincount(said.labels[right], minlength=len(classes))
    rows = [
        (float(hits[c] / seen[c]), classes[c], int(seen[c]))
        for c in range(len(classes))
        if int(seen[c])
    ]
    note = ""
    if len(rows) > MOST_CLASSES:
        note = paragraph(
            f"The {MOST_CLASSES} worst of {len(rows):,} classes, the worst first.", quiet=True
        )
        rows = sorted(rows)[:MOST_CLASSES]
    return note + bars([(name, share, f"{share:.0%} of {count:,}") for share, name, count in rows])


def _mistakes(model: MemoryViT, said: Answers) -> str:
    probability, answer = said.logits.softmax(1).max(1)
    wrong = torch.nonzero(answer != said.labels).flatten()
    if not len(wrong):
        return paragraph("There are none.")
    worst = wrong[probability[wrong].argsort(descending=True)][:MOST_MISTAKES].tolist()
    classes, figures = said.dataset.classes, []
    for i in worst:
        sample = int(said.samples[i])
        view = _view(model, said.dataset, sample)
        told, true = classes[int(answer[i])], classes[int(said.labels[i])]
        where = said.dataset.where(sample)
        figures.append(
            f"<figure>{picture(view, f'{true}, taken for {told}')}<figcaption>"
            f'<span class="bad">{escape(_short(told, 40))}</span> {float(probability[i]):.0%}, '
            f'is <span class="good">{escape(_short(true, 40))}</span><br>'
            f'<span title="{escape(where)}">{escape(_short(Path(where).name, 30))}</span>'
            "</figcaption></figure>"
        )
    note = (
        f"{len(wrong):,} of {len(answer):,} answers are wrong; "
        + ("these are" if len(worst) == len(wrong) else f"these {len(worst)} are")
        + " the ones it was surest of."
    )
    return paragraph(note, quiet=True) + f'<div class="pictures">{"".join(figures)}</div>'


def _looks(model: MemoryViT, said: Answers) -> str:
    """Two blocks: attention over patches on some pictures, and shares of what is read."""
    name, chosen = said.task, _one_of_each(said)[:MOST_LOOKS]
    views = [_view(model, said.dataset, int(said.samples[i])) for i in chosen]
    pixels = normalise(torch.from_numpy(np.stack(views)), preprocessing_of(model))
    try:
        seen = looks(model, name, pixels.to(model.trunk.position.device))
    except EngramError as error:
        return _block(f"looks-{name}", "Where it looks", paragraph(str(error)))
    depth = seen.shares.shape[0]
    layers = sorted({max(0, math.ceil(depth * share) - 1) for share in (0.25, 0.5, 0.75, 1)})
    head = "".join(f'<th scope="col">layer {layer + 1}</th>' for layer in layers)
    rows = []
    for row, (i, view) in enumerate(zip(chosen, views, strict=True)):
        label = said.dataset.classes[int(said.labels[i])]
        lit = [
            picture(_lit(view, seen.patches[row, layer]), f"attention at layer {layer + 1}")
            for layer in layers
        ]
        cells = "".join(f"<td>{one}</td>" for one in (picture(view, label), *lit))
        rows.append(f"<tr><td>{escape(_short(label, 40))}</td>{cells}</tr>")
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
    return _block(f"looks-{name}", "Where it looks", pictures) + _block(
        f"reads-{name}", "What it reads, layer by layer", reads
    )


def _one_of_each(said: Answers) -> list[int]:
    """The first picture of every class that was answered right; the first ones if none was."""
    labels, answer = said.labels.tolist(), said.logits.argmax(1).tolist()
    first: dict[int, int] = {}
    for i, (label, told) in enumerate(zip(labels, answer, strict=True)):
        if label == told:
            first.setdefault(label, i)
    return [first[label] for label in sorted(first)] or list(range(len(labels)))


def _curves(history: Sequence[Mapping[str, float]]) -> str:
    steps = [row["step"] for row in history]
    loss = chart(
        [
            ("training", steps, [row["loss"] for row in history]),
            ("validation", steps, [row["val_loss"] for row in history]),
        ],
        "Loss over steps",
        from_zero=True,
    )
    accuracy = chart(
        [("", steps, [100 * row["val_accuracy"] for row in history])],
        "Validation accuracy, %, over steps",
    )
    return f'<div class="charts">{loss}{accuracy}</div>'


def _settings(settings: Sequence[Mapping[str, Any]]) -> str:
    best = max(settings, key=lambda one: one["val_accuracy"])
    ordered = sorted(settings, key=lambda one: -one["val_accuracy"])
    cut = ordered[: 2 * MOST_CLASSES]
    rows = [
        (
            f"{one['lr']:g}",
            str(one["cells"]),
            f"{one['weight_decay']:g}",
            f"{one['val_accuracy']:.2%} ± {one['deviation']:.2%}",
            str(len(one["accuracies"])),
        )
        for one in cut
    ]
    note = "The best first, by validation accuracy."
    if len(cut) < len(settings):
        note = f"The best {len(cut)} of {len(settings)}, by validation accuracy."
    columns = ("learning rate", "cells", "weight decay", "validation accuracy", "seeds")
    return table(columns, rows, note, chosen=cut.index(best))


# Costs


def costs_of(model: MemoryViT) -> dict[str, Costs]:
    """What every attached task costs, with all that it reads."""
    shape, size = shape_of(model.trunk), preprocessing_of(model).size
    ancestors: dict[str, dict[str, TaskSpec]] = {}
    costs = {}
    for name, task in model.tasks.items():  # parents before children
        ancestors[name] = {}
        for parent in task.spec.extends:
            ancestors[name] |= {**ancestors[parent], parent: model.task(parent).spec}
        costs[name] = task_costs(shape, task.spec, list(ancestors[name].values()), size)
    return costs


def _regimes(model: MemoryViT, specs: Sequence[TaskSpec]) -> str:
    shape = shape_of(model.trunk)
    size = preprocessing_of(model).size
    spec = specs[0]
    plain = replace(spec, extends=(), update="fresh", tokens=1, after_norm=False)
    rows, used = [], list(REGIMES).index(spec.regime)
    for name, regime in REGIMES.items():
        one = replace(plain, regime=name, cells=(spec.cells or 5) if regime.cells else 0)
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
        f"A task like {spec.name} ({len(spec.classes):,} classes, {spec.cells or 5} cells a layer) "
        "in every regime: "
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


# Pieces of HTML


def paragraph(text: str, quiet: bool = False) -> str:
    return f'<p class="quiet">{escape(text)}</p>' if quiet else f"<p>{escape(text)}</p>"


def table(
    columns: Sequence[str],
    rows: Table,
    note: str = "",
    chosen: int | None = None,
    words: int = 1,
) -> str:
    """A table whose first `words` columns are words; row `chosen` stands out."""

    def cell(kind: str, i: int, text: str) -> str:
        return f"<{kind}{' class=words' if i < words else ''}>{escape(text)}</{kind}>"

    head = "".join(cell("th", i, text) for i, text in enumerate(columns))
    body = "".join(
        f"<tr{' class=chosen' if r == chosen else ''}>"
        + "".join(cell("td", i, text) for i, text in enumerate(row))
        + "</tr>"
        for r, row in enumerate(rows)
    )
    return (
        f"{paragraph(note, quiet=True) if note else ''}"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def bars(rows: Iterable[tuple[str, float, str]], kinds: Sequence[str] = ()) -> str:
    """Horizontal bars: a label, a share from 0 to 1, and what stands at its end."""
    html = ""
    for i, (label, share, text) in enumerate(rows):
        kind = f' class="{kinds[i]}"' if kinds else ""
        width = 100 * min(1.0, max(0.0, share))
        html += (
            f'<span title="{escape(label)}">{escape(_short(label, 40))}</span>'
            f'<i><u{kind} style="width:{width:.1f}%"></u></i><b>{escape(text)}</b>'
        )
    return f'<div class="bars">{html}</div>'


def chart(
    lines: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    title: str,
    from_zero: bool = False,
) -> str:
    """Lines over a common axis, drawn as SVG; what is not finite is left out."""
    points = [
        (x, y) for _, xs, ys in lines for x, y in zip(xs, ys, strict=True) if math.isfinite(y)
    ]
    if not points:
        return ""
    left, right, top, bottom, width, height = 44, 16, 14, 30, 440, 230
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    ticks = _ticks(0 if from_zero else min(y for _, y in points), max(y for _, y in points))
    low_y, high_y = ticks[0], ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        up = (y - low_y) / (high_y - low_y)
        return left + across * (width - left - right), height - bottom - up * (
            height - top - bottom
        )

    svg = ""
    for tick in ticks:
        y = at(low_x, tick)[1]
        svg += f'<path class="axis" d="M{left} {y:.1f}H{width - right}"/>'
        svg += f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
    for x, anchor in ((low_x, "start"), (high_x, "end")):
        place = at(x, low_y)[0]
        svg += f'<text x="{place:.1f}" y="{height - 10}" text-anchor="{anchor}">{x:,g}</text>'
    for i, (label, xs, ys) in enumerate(lines):
        kind = "ab"[i % 2]
        drawn = [at(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
        if not drawn:
            continue
        d = "L".join(f"{x:.1f} {y:.1f}" for x, y in drawn)
        svg += f'<path class="line {kind}" d="M{d}"/>'
        if label:
            svg += (
                f'<text class="{kind}" x="{width - right}" y="{top + 14 + 16 * i}" '
                f'text-anchor="end">{escape(label)}</text>'
            )
        else:
            x, y = drawn[-1]
            svg += f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
            svg += (
                f'<text class="{kind}" x="{x - 6:.1f}" y="{y - 9 if y > 40 else y + 20:.1f}" '
                f'text-anchor="end">{ys[-1]:.1f}</text>'
            )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{svg}</svg>'
        "</figure>"
    )


def picture(pixels: Pixels, alt: str) -> str:
    """A small picture as part of the page: up to 64 pixels as they are, larger ones reduced."""
    image = Image.fromarray(pixels)
    tiny = max(image.size) <= 64
    stream = io.BytesIO()
    if tiny:
        image.save(stream, "PNG")
    else:
        image.thumbnail((160, 160))
        image.save(stream, "JPEG", quality=82)
    data = base64.b64encode(stream.getvalue()).decode()
    kind = "png" if tiny else "jpeg"
    return (
        f'<img{" class=tiny" if tiny else ""} alt="{escape(alt)}" width="{image.width}" '
        f'height="{image.height}" src="data:image/{kind};base64,{data}">'
    )


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd></div>" for a, b in facts)
    return f'<dl class="facts">{rows}</dl>'


def _block(key: str, title: str, html: str) -> str:
    return f'<div id="{escape(key)}"><h3>{escape(title)}</h3>{html}</div>'


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _ticks(low: float, high: float) -> list[float]:
    """Four to six round numbers that span a range."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    step = 10 ** math.floor(math.log10(high - low))
    for factor in (0.2, 0.25, 0.5, 1, 2):
        if (high - low) / (step * factor) <= 4.5:
            step *= factor
            break
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


# Pixels


def _view(model: MemoryViT, dataset: Dataset, sample: int) -> Pixels:
    """The picture as the trunk sees it; gray where it cannot be read any more."""
    preprocessing = preprocessing_of(model)
    try:
        return evaluation_view(dataset.read(sample), preprocessing)
    except BadImage:
        return np.full((*preprocessing.size, 3), 128, dtype=np.uint8)


def _lit(view: Pixels, weights: Tensor) -> Pixels:
    """The picture in gray, with a glow where the weights (rows, columns) are high."""
    peak = (weights / weights.max().clamp(min=1e-12)).float().cpu().numpy()
    light = Image.fromarray(peak).resize(view.shape[1::-1], Image.Resampling.BILINEAR)
    glow = 0.85 * np.clip(np.asarray(light), 0, 1)[..., None]
    gray = 30 + 0.5 * view.mean(-1, keepdims=True)
    lit: Pixels = np.rint((1 - glow) * gray + glow * _GLOW).astype(np.uint8)
    return lit
