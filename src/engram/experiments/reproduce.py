"""The paper's tables in its own setting: `engram reproduce`, which needs its data and a GPU.

Every row of a table is a sweep over learning rates with the paper's recipe (`RECIPES["paper"]`:
SGD with momentum, clipping, 5 steps of warm-up, batch 512, 20,000 steps). The paper chose the rate
of each row from a grid that it does not print; here the best rate on validation images is tested,
once. A row that is complete is not trained again, and an interrupted one resumes from its
checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram.backbones.load import load_backbone
from engram.data.datasets import Splits, load
from engram.errors import EngramError
from engram.methods import METHODS
from engram.model import MemoryViT
from engram.store.engram import BackboneInfo, Engram
from engram.store.format import read_engram
from engram.train.recipe import RECIPES, Recipe
from engram.train.run import run_folder
from engram.train.sweep import sweep
from engram.train.variants import Grid
from engram.util.description import Description
from engram.util.files import write_atomically
from engram.util.processes import ProcessGroup
from engram.util.progress import Progress, silent
from engram.vit import ViT


@dataclass(frozen=True)
class TableRow:
    """A row of a table: a regime and how much of it."""

    regime: str
    cells: int = 0
    update: str = "fresh"
    #: Of the adapters. Table 4 says "bottleneck 5" and counts 737K parameters for a B/16, which is
    #: what width 20 gives with one adapter for attention and one for the MLP.
    width: int = 20

    @property
    def name(self) -> str:
        words = [self.regime] + (
            [str(self.cells)] if "cells" in METHODS[self.regime].setting_names() else []
        )
        return "-".join(words + ([] if self.update == "fresh" else [self.update]))

    @property
    def settings(self) -> dict[str, Any]:
        """Those of its method, apart from the cells."""
        known = METHODS[self.regime].setting_names()
        given = {"update": self.update, "adapter_width": self.width}
        return {name: value for name, value in given.items() if name in known}

    @property
    def rates(self) -> tuple[float, ...]:
        """Full fine-tuning needs small learning rates; memory is stable at large ones."""
        return (0.003, 0.01, 0.03, 0.1) if self.regime == "full" else (0.03, 0.1, 0.3, 1.0)


_FIVE = TableRow("memory", 5)
TABLES: Mapping[str, Sequence[TableRow]] = {
    "2": (
        TableRow("full"),
        TableRow("head"),
        TableRow("class"),
        *(TableRow("memory", m) for m in (1, 5, 10, 20)),
    ),
    "4": (_FIVE, TableRow("adapter"), TableRow("memory+adapter", 5)),
    "poster": (
        _FIVE,
        TableRow("masked", 5),
        TableRow("masked", 0),
        TableRow("class"),
        TableRow("masked+adapter", 5),
    ),
    "2b": (_FIVE, TableRow("memory", 5, "propagate"), TableRow("memory", 5, "add")),
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
#: What may differ between the command that started a run and the one that resumes it.
_FREE = ("lr", "seed", "weight_decay", "evaluations", "checkpoint_seconds", "max_bad", "cache",
         "cache_gb", "workers")  # fmt: skip


def rows_of(table: str) -> Sequence[TableRow]:
    if table not in TABLES:
        raise EngramError(f"There is no table {table!r}; choose one of {', '.join(TABLES)}.")
    return TABLES[table]


def plan(dataset: str, table: str, recipe: Recipe, lrs: Sequence[float], seeds: int) -> Description:
    """What `reproduce` would train; needs neither data nor backbone."""
    known = PAPER.get(_preset(dataset), {})
    document: list[dict[str, Any]] = []
    for row in rows_of(table):
        rates = list(lrs) or list(row.rates)
        variants = Grid(rates, [row.cells], seeds=seeds).variants(recipe, row.regime)
        document.append(
            {
                "row": row.name,
                "regime": row.regime,
                "cells": row.cells,
                "update": row.update,
                "rates": rates,
                "seeds": seeds,
                "runs": len(variants),
                "steps": recipe.steps or None,
                "paper": known.get(row.name),
            }
        )
    length = f"{recipe.steps:,} steps" if recipe.steps else f"{recipe.epochs} epochs"
    table_rows = tuple(
        (
            str(row["row"]),
            ", ".join(f"{rate:g}" for rate in row["rates"]),
            f"{row['runs']} x {length}",
            _percent(row["paper"]),
        )
        for row in document
    )
    about = [
        ("dataset", dataset),
        ("recipe", f"{recipe.optimizer}, batch {recipe.batch}, {recipe.augment} crops"),
        ("trained", "nothing: this is the plan"),
    ]
    columns = ("row", "learning rates", "runs", "paper, %")
    return Description({"dataset": dataset, "rows": document}, about, columns, table_rows)


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
    splits: Splits | None = None,
    team: ProcessGroup | None = None,
    progress: Progress = silent,
) -> Description:
    """Train the rows of a table that are missing, and return it with the paper's figures.

    `splits` is the dataset, if it is loaded already. `out` holds an engram for each row,
    `results.json` and `results.md`, which are rewritten after every row.
    """
    recipe, team, rows = recipe or RECIPES["paper"], team or ProcessGroup(), rows_of(table)
    splits, vit = splits or load(dataset), load_backbone(backbone, image_size=image_size)
    paths = {row: out / f"{row.name}.safetensors" for row in rows}
    existing = {row: _read(path, row, splits, vit, recipe) for row, path in paths.items()}
    done: dict[str, Engram] = {}
    for row, engram in existing.items():
        if engram is None:
            rates = tuple(lrs) or row.rates
            _train(
                row, vit, splits, recipe,
                rates=rates, seeds=seeds, path=paths[row], team=team, progress=progress,
            )  # fmt: skip
            engram = read_engram(paths[row])
        done[row.name] = engram
        if team.main:
            _write_results(out, _description(dataset, vit, done))
    return _description(dataset, vit, done)


def _train(
    row: TableRow,
    backbone: ViT,
    splits: Splits,
    recipe: Recipe,
    *,
    rates: Sequence[float],
    seeds: int,
    path: Path,
    team: ProcessGroup,
    progress: Progress,
) -> None:
    """Train a row of the table, or resume its training, and write its engram."""

    def named(what: str, done: int, total: int, note: str = "") -> None:
        progress(f"{row.name}: {what}", done, total, note)

    sweep(
        MemoryViT(backbone), "task", splits, recipe,
        lrs=rates, cells=[row.cells], seeds=seeds, out=path, resume=run_folder(path).exists(),
        test=splits.test is not None, team=team, progress=named,
        regime=row.regime, **row.settings,
    )  # fmt: skip
    team.wait()


def _read(
    path: Path, row: TableRow, splits: Splits, backbone: ViT, recipe: Recipe
) -> Engram | None:
    """The engram of a row, if it exists; one of another command is an EngramError."""
    if not path.exists():
        return None
    engram = read_engram(path)
    engram.check_backbone(BackboneInfo.from_backbone(backbone), backbone.preprocessing)
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


def _percent(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.1f}"


def _description(dataset: str, backbone: ViT, done: Mapping[str, Engram]) -> Description:
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
            _percent(row["paper"]),
        )
        for row in document
    )
    about = [("dataset", dataset), ("backbone", backbone.source)]
    columns = ("row", "learning rate", "validation, %", "test, %", "paper, B/32, %")
    return Description(
        {"dataset": dataset, "backbone": backbone.source, "rows": document}, about, columns, table
    )


def _write_results(out: Path, result: Description) -> None:
    lines = [f"{label}: {text}" for label, text in result.rows]
    for cells in (result.columns, ("---",) * len(result.columns), *result.table):
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(len(result.rows), "")
    write_atomically(out / "results.md", ("\n".join(lines) + "\n").encode())
    write_atomically(out / "results.json", json.dumps(result.document, indent=1).encode())
