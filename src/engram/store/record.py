"""Records in the header of an engram, for people: metrics, recipe and lineage.

Metrics and recipe of a stranger's file may be anything that JSON can hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from engram.store.engram import Engram
from engram.tasks.kind import Kind
from engram.tasks.metrics import SHARES, TITLES, shown
from engram.util.text import counted

Rows = list[tuple[str, str]]
_MOST = 100  # metrics of a split, splits, settings, and sources of an engram


def numbers_by_split(metrics: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The numeric metrics by split. Metrics without a split are under ''."""
    by_split = {"": metrics, **{k: v for k, v in metrics.items() if isinstance(v, Mapping)}}
    splits = {}
    for split, values in islice(by_split.items(), _MOST):
        numbers = ((str(name), value) for name, value in values.items() if is_number(value))
        splits[str(split)] = dict(islice(numbers, _MOST))
    return {split: numbers for split, numbers in splits.items() if numbers}


def is_number(value: object) -> bool:
    """Whether this is a number that can be printed: a whole one may be too large for that."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) <= 2**64


def metric_rows(engram: Engram) -> Rows:
    """Metrics, a row for each split: the metric that chooses, then the others."""
    kind, rows = engram.spec.kind_object, []
    for split, values in numbers_by_split(engram.metrics).items():
        known = [name for name in (*kind.columns, "mean", "deviation") if name in values]
        others = [name for name in values if name not in (*known, "images")]
        parts = [
            f"{TITLES.get(name, name)} {_shown(name, values[name], kind)}"
            for name in (*known, *others)
            if name != kind.score
        ]
        if kind.score in values:
            parts.insert(0, f"{kind.title} {kind.shown(values[kind.score])}")
        rows.append((_where(split, values) or "metrics", ", ".join(parts)))
    return rows


def _shown(name: str, value: float, kind: Kind) -> str:
    """A metric as `fit` and `eval` print it; what is no share, in brief."""
    if name in ("mean", "deviation"):  # of the metric that chooses, over the seeds of a sweep
        return kind.shown(value)
    return shown(name, value) if name in SHARES else f"{value:.4g}"


def _where(split: str, values: Mapping[str, float]) -> str:
    """The split, and its number of images."""
    images = values.get("images")
    parts = (split, counted(images, "image") if isinstance(images, int) else "")
    return ", ".join(part for part in parts if part)


def metric_cell(engram: Engram) -> str:
    """The metric that chooses, as a cell: on test, or else on validation; or empty."""
    kind, splits = engram.spec.kind_object, numbers_by_split(engram.metrics)
    for split in ("test", "val", ""):
        values = splits.get(split, {})
        if kind.score in values:
            where = _where(split, values)
            found = f"{kind.title} {kind.shown(values[kind.score])}"
            return f"{found} ({where})" if where else found
    return ""


def lineage_rows(engram: Engram) -> Rows:
    """The engrams that it extends, that it is the average of, and whose classes it has."""
    return [
        *(("extends", f"{name}, content {content}") for name, content in engram.parents.items()),
        *(
            ("merged from", f"{source}, weight {weight:.4g}")
            for source, weight in _sources(engram, "merged", "weight")
        ),
        *(
            ("grown from", f"{source}, its {count:,.0f} classes come first")
            for source, count in _sources(engram, "grown_from", "classes")
        ),
    ]


def _sources(engram: Engram, key: str, number: str) -> list[tuple[str, float]]:
    """Name and content of the engrams that a field of the recipe lists, with a number of each."""
    recorded = engram.recipe.get(key)
    sources = recorded if isinstance(recorded, (list, tuple)) else []
    return [
        (f"{one.get('task', '')}, content {one.get('content', '')}", float(one[number]))
        for one in islice(sources, _MOST)
        if isinstance(one, Mapping) and is_number(one.get(number))
    ]


def summarise_recipe(engram: Engram) -> str:
    """The settings of the recipe, without lists and objects."""
    settings = (
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in engram.recipe.items()
        if not isinstance(value, (list, dict))
    )
    return ", ".join(islice(settings, _MOST))
