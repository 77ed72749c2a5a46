"""The paper's own setting, for those who have its data and a GPU: `engram reproduce`.

Every row of a table is a sweep over learning rates with the paper's recipe (`RECIPES["paper"]`:
SGD with momentum, clipping, 5 steps of warm-up, batch 512, 20,000 steps). The paper chose the rate
of each row from a grid it does not print; here the best on validation images is tested, once. A
row that is written is not trained again, and an interrupted one goes on from its checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram.data.datasets import Splits, load
from engram.errors import EngramError
from engram.model import MemoryViT
from engram.store.engram import Engram, TrunkInfo
from engram.store.format import read_engram
from engram.tasks.regimes import REGIMES
from engram.train.recipe import RECIPES, Recipe
from engram.train.sweep import sweep
from engram.trunks.load import load_trunk
from engram.util.description import Description
from engram.util.files import write_atomically
from engram.util.processes import Team
from engram.util.progress import Progress, silent
from engram.vit import ViT


@dataclass(frozen=True)
class Row:
    """A row of a table: a regime and how much of it."""

    regime: str
    cells: int = 0
    update: str = "fresh"
    #: Of the adapters. Table 4 says "bottleneck 5" and counts 737K parameters for a B/16; that
    #: count is what 20 gives with one adapter beside attention and one beside the MLP.
    width: int = 20

    @property
    def name(self) -> str:
        words = [self.regime] + ([str(self.cells)] if REGIMES[self.regime].cells else [])
        return "-".join(words + ([] if self.update == "fresh" else [self.update]))

    @property
    def rates(self) -> tuple[float, ...]:
        """Full tuning wants small rates and is sensitive to them; memory is stable at large."""
        return (0.003, 0.01, 0.03, 0.1) if self.regime == "full" else (0.03, 0.1, 0.3, 1.0)


_FIVE = Row("memory", 5)
TABLES: Mapping[str, Sequence[Row]] = {
    "2": (Row("full"), Row("head"), Row("class"), *(Row("memory", m) for m in (1, 5, 10, 20))),
    "4": (_FIVE, Row("adapter"), Row("memory+adapter", 5)),
    "poster": (_FIVE, Row("masked", 5), Row("masked", 0), Row("class"), Row("masked+adapter", 5)),
    "2b": (_FIVE, Row("memory", 5, "propagate"), Row("memory", 5, "add")),
}
#: Table 2, ViT-B/32, ImageNet-21k.
PAPER: Mapping[str, Mapping[str, float]] = {
    data: dict(zip((row.name for row in TABLES["2"]), figures, strict=True))
    for data, figures in {
        "sun397": (76.9, 75.9, 76.4, 77.0, 76.8, 76.9, 76.9),
        "inaturalist2017": (54.0, 46.3, 48.7, 49.4, 50.1, 50.0, 50.0),
        "cifar100": (91.8, 85.8, 88.6, 90.9, 91.0, 91.1, 90.9),
        "places365": (55.9, 50.9, 52.4, 53.3, 53.8, 53.9, 54.1),
    }.items()
}
#: What may differ between the command that began and the one that goes on.
_FREE = ("lr", "seed", "weight_decay", "evaluations", "checkpoint_seconds", "max_bad", "cache",
         "cache_gb", "workers")  # fmt: skip


def rows_of(table: str) -> Sequence[Row]:
    if table not in TABLES:
        raise EngramError(f"There is no table {table!r} here; choose one of {', '.join(TABLES)}.")
    return TABLES[table]


def plan(dataset: str, table: str, recipe: Recipe, lrs: Sequence[float], seeds: int) -> Description:
    """What `reproduce` would train; needs neither data nor trunk."""
    table_rows, document = [], []
    for row in rows_of(table):
        rates = tuple(lrs) or row.rates
        paper = PAPER.get(_preset(dataset), {}).get(row.name)
        document.append(
            {
                "row": row.name,
                "regime": row.regime,
                "cells": row.cells,
                "update": row.update,
                "rates": list(rates),
                "seeds": seeds,
                "runs": len(rates) * seeds,
                "steps": recipe.steps or None,
                "paper": paper,
            }
        )
        length = f"{recipe.steps:,} steps" if recipe.steps else f"{recipe.epochs} epochs"
        each = f"{len(rates) * seeds} x {length}"
        tried = ", ".join(f"{rate:g}" for rate in rates)
        table_rows.append((row.name, tried, each, "" if paper is None else f"{paper:.1f}"))
    about = [
        ("dataset", dataset),
        ("recipe", f"{recipe.optimizer}, batch {recipe.batch}, {recipe.augment} crops"),
        ("trained", "nothing: this is the plan"),
    ]
    columns = ("row", "learning rates", "runs", "paper, %")
    return Description({"dataset": dataset, "rows": document}, about, columns, tuple(table_rows))


def reproduce(
    dataset: str,
    backbone: str,
    out: Path,
    *,
    table: str = "2",
    recipe: Recipe | None = None,
    lrs: Sequence[float] = (),
    seeds: int = 1,
    image_size: int | None = None,
    team: Team | None = None,
    progress: Progress = silent,
) -> Description:
    """Train what is missing of a table, and give the whole table beside the paper's figures.

    `out` holds an engram for each row, `results.json` and `results.md`, which are written anew
    after every row.
    """
    recipe, team, rows = recipe or RECIPES["paper"], team or Team(), rows_of(table)
    splits, trunk = load(dataset), load_trunk(backbone, image_size=image_size)
    found = [_read(out / f"{row.name}.safetensors", row, splits, trunk, recipe) for row in rows]
    done: dict[str, Engram] = {}
    for row, engram in zip(rows, found, strict=True):
        model = MemoryViT(trunk)
        if engram is None:
            path = out / f"{row.name}.safetensors"
            sweep(
                model, "task", splits, recipe,
                lrs=tuple(lrs) or row.rates, cells=[row.cells], seeds=seeds, out=path,
                resume=True, test=splits.test is not None, team=team,
                progress=lambda what, at, of, note="", row=row: progress(
                    f"{row.name}: {what}", at, of, note
                ),
                regime=row.regime, update=row.update, adapter_width=row.width,
            )  # fmt: skip
            team.wait()
            engram = read_engram(path)
        done[row.name] = engram
        if team.main:
            _write(out, _described(dataset, trunk, done))
    return _described(dataset, trunk, done)


def _read(path: Path, row: Row, splits: Splits, trunk: ViT, recipe: Recipe) -> Engram | None:
    """The row, if it is there already; one of another command is an EngramError."""
    if not path.exists():
        return None
    engram = read_engram(path)
    engram.check_trunk(TrunkInfo.from_trunk(trunk), trunk.preprocessing)
    was, wanted = dict(engram.recipe or {}), recipe.to_dict()
    other = sorted(k for k in wanted if k not in _FREE and was.get(k) != wanted[k])
    if other or engram.spec.classes != splits.classes or engram.spec.regime != row.regime:
        raise EngramError(
            f"{path} was trained with other {', '.join(other) or 'classes or regime'}; repeat the "
            "command that made it, or choose another -o."
        )
    return engram


def _preset(dataset: str) -> str:
    return dataset.partition(":")[0]


def _described(dataset: str, trunk: ViT, done: Mapping[str, Engram]) -> Description:
    known = PAPER.get(_preset(dataset), {})
    document: list[dict[str, Any]] = []
    for name, engram in done.items():
        metrics = {split: values["accuracy"] for split, values in engram.metrics.items()}
        rate = (engram.recipe or {}).get("lr")
        document.append({"row": name, "lr": rate, **metrics, "paper": known.get(name)})
    table = tuple(
        (
            str(row["row"]),
            f"{row['lr']:g}",
            *(f"{100 * row[split]:.1f}" if split in row else "" for split in ("val", "test")),
            "" if row["paper"] is None else f"{row['paper']:.1f}",
        )
        for row in document
    )
    about = [("dataset", dataset), ("trunk", trunk.source)]
    columns = ("row", "learning rate", "validation, %", "test, %", "paper, B/32, %")
    return Description(
        {"dataset": dataset, "trunk": trunk.source, "rows": document}, about, columns, table
    )


def _write(out: Path, result: Description) -> None:
    lines = [f"{label}: {text}" for label, text in result.rows]
    for cells in (result.columns, ("---",) * len(result.columns), *result.table):
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(len(result.rows), "")
    write_atomically(out / "results.md", ("\n".join(lines) + "\n").encode())
    write_atomically(out / "results.json", json.dumps(result.document, indent=1).encode())
