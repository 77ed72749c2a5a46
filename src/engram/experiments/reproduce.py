"""The paper's tables in its own setting: `engram reproduce`, which needs its data and a GPU.

Every row of a table is a sweep over learning rates with the paper's recipe (`RECIPES["paper"]`:
SGD with momentum, clipping, 5 steps of warm-up, batch 512, 20,000 steps). The paper chose the rate
of each row from a grid that it does not print; here the best rate on validation images is tested,
once. A row that is complete is not trained again, and an interrupted one resumes from its
checkpoint.

Two tables are no tables of the paper, but what its text says: `rates`, how much each method depends
on the learning rate, with a figure, and `4.4`, its section on concatenation. There, cells of tasks
that were trained on other data (`beside`) are put next to a task's own, with the mask and without.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram.backbones.load import load_backbone
from engram.data.datasets import Splits
from engram.errors import EngramError, flag
from engram.inference.evaluate import evaluate
from engram.methods import FullAdapter, FullMemory, Head, Masked, MaskedAdapter, Method
from engram.methods.full_attention import ClassToken, FullMemoryAdapter, FullTuning
from engram.model import MemoryViT
from engram.store.engram import BackboneInfo, Engram
from engram.store.format import read_engram
from engram.tasks.task_settings import TaskSettings
from engram.train.recipe import RECIPES, Recipe
from engram.train.runs.run import run_folder
from engram.train.search.sweep import sweep
from engram.train.search.variants import grid_of
from engram.util.charts import Chart, Line, line_chart, side_by_side
from engram.util.files import write_atomically
from engram.util.processes import ProcessGroup
from engram.util.progress import Progress, labelled, silent
from engram.util.text import Description
from engram.vit import ViT

#: Of the adapters. Table 4 says "bottleneck 5" and counts 737K parameters for a B/16, which is what
#: this gives with one adapter for attention and one for the MLP.
ADAPTER_WIDTH = 20


@dataclass(frozen=True)
class TableRow:
    """A row of a table: a method, its settings, and the learning rates to try."""

    method: type[Method]
    cells: int = 0
    update: str = "fresh"
    lrs: tuple[float, ...] = ()  # the grid of the method, if empty

    @property
    def name(self) -> str:
        cells = [str(self.cells)] if "cells" in self.method.setting_names() else []
        update = [] if self.update == "fresh" else [self.update]
        return "-".join([self.method.name, *cells, *update])

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its method, apart from the cells."""
        given = {"update": self.update, "adapter_width": ADAPTER_WIDTH}
        return {k: v for k, v in given.items() if k in self.method.setting_names()}

    @property
    def rates(self) -> tuple[float, ...]:
        """Full fine-tuning needs small learning rates; memory is stable at large ones."""
        small = self.method.rates["sgd"] < 0.1
        return self.lrs or ((0.003, 0.01, 0.03, 0.1) if small else (0.03, 0.1, 0.3, 1.0))


_FIVE = TableRow(FullMemory, 5)
#: The same for all rows of the table that compares them.
_RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
TABLES: Mapping[str, Sequence[TableRow]] = {
    "2": (
        *(TableRow(method) for method in (FullTuning, Head, ClassToken)),
        *(TableRow(FullMemory, m) for m in (1, 5, 10, 20)),
    ),
    "4": (_FIVE, TableRow(FullAdapter), TableRow(FullMemoryAdapter, 5)),
    "poster": (
        *(_FIVE, TableRow(Masked, 5), TableRow(Masked, 0), TableRow(ClassToken)),
        TableRow(MaskedAdapter, 5),
    ),
    "2b": (_FIVE, TableRow(FullMemory, 5, "propagate"), TableRow(FullMemory, 5, "add")),
    "4.4": (_FIVE, TableRow(Masked, 5)),
    "rates": tuple(
        TableRow(method, cells, lrs=_RATES)
        for method, cells in ((FullTuning, 0), (FullMemory, 5), (Head, 0))
    ),
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


@dataclass(frozen=True)
class Reproduction:
    """A table of the paper on a dataset, and how its rows are trained."""

    dataset: str
    table: str = "2"
    recipe: Recipe = RECIPES["paper"]
    lrs: Sequence[float] = ()  # in place of each row's own
    seeds: int = 1
    #: Folders that this command wrote for other data, whose cells table 4.4 adds one by one.
    beside: Sequence[Path] = ()

    def __post_init__(self) -> None:
        if self.table not in TABLES:
            choices = ", ".join(TABLES)
            raise EngramError(f"There is no table {self.table!r}; choose one of {choices}.")
        if self.beside and self.table != "4.4":
            raise EngramError(
                f"{flag('beside')} names other tasks for table 4.4, and the table is {self.table}; "
                "leave it out."
            )

    def _rates(self, row: TableRow) -> list[float]:
        return list(self.lrs or row.rates)

    def _paper(self, name: str) -> float | None:
        return PAPER.get(self.dataset.partition(":")[0], {}).get(name)

    def plan(self) -> Description:
        """Describe what would be trained; needs neither data nor backbone."""
        recipe, document, table = self.recipe, list[dict[str, Any]](), list[tuple[str, ...]]()
        length = f"{recipe.steps:,} steps" if recipe.steps else f"{recipe.epochs} epochs"
        for row in TABLES[self.table]:
            rates, task = self._rates(row), TaskSettings(row.method.name)
            runs = len(grid_of(recipe, task, lrs=rates, cells=[row.cells], seeds=self.seeds))
            paper = self._paper(row.name)
            document.append(
                {
                    "row": row.name,
                    "regime": row.method.name,
                    "cells": row.cells,
                    "update": row.update,
                    "rates": rates,
                    "seeds": self.seeds,
                    "runs": runs,
                    "steps": recipe.steps or None,
                    "paper": paper,
                }
            )
            shown = ", ".join(f"{rate:g}" for rate in rates)
            table.append((row.name, shown, f"{runs} x {length}", _percent(paper)))
        about = [
            ("dataset", self.dataset),
            ("recipe", f"{recipe.optimizer}, batch {recipe.batch}, augmentation {recipe.augment}"),
            ("trained", "nothing: this is the plan"),
        ]
        columns = ("row", "learning rates", "runs", "paper, %")
        return Description({"dataset": self.dataset, "rows": document}, about, columns, table)

    def run(
        self,
        splits: Splits,
        backbone: str,
        out: Path,
        image_size: int | None = None,
        progress: Progress = silent,
    ) -> Description:
        """Train the rows of the table that are missing, and return it with the paper's figures.

        `out` holds an engram for each row, `results.json` and `results.md`, which are rewritten
        after every row.
        """
        processes, vit = ProcessGroup(), load_backbone(backbone, image_size=image_size)
        paths = {row: out / f"{row.name}.safetensors" for row in TABLES[self.table]}
        existing = {row: self._read(path, row, splits, vit) for row, path in paths.items()}
        done: dict[str, Engram] = {}
        more: list[dict[str, Any]] = []
        for row, engram in existing.items():
            if engram is None:
                resume, test = run_folder(paths[row]).exists(), splits.test is not None
                sweep(
                    MemoryViT(vit), "task", splits, self.recipe,
                    lrs=self._rates(row), cells=[row.cells], seeds=self.seeds, out=paths[row],
                    resume=resume, test=test, processes=processes,
                    progress=labelled(progress, row.name),
                    regime=row.method.name, **row.settings,
                )  # fmt: skip
                processes.wait()
                engram = read_engram(paths[row])
            done[row.name] = engram
            if self.table == "rates":
                more += [
                    {"row": f"{row.name} at {rate:g}", "lr": rate, "val": score}
                    for rate, score in _scores(paths[row])
                ]
            more += self._beside(row, engram, splits, vit)
            result = self._describe(vit, done, more)
            if processes.main:
                _write_results(out, result)
        if self.table == "rates" and processes.main:
            write_atomically(out / "rates.svg", _figure(paths).encode())
        return result

    def _read(self, path: Path, row: TableRow, splits: Splits, backbone: ViT) -> Engram | None:
        """The engram of a row, if it exists; one of another command is an EngramError."""
        if not path.exists():
            return None
        engram = read_engram(path)
        engram.check_backbone(BackboneInfo.from_backbone(backbone), backbone.preprocessing)
        was, wanted = dict(engram.recipe or {}), self.recipe.to_dict()
        other = sorted(k for k in wanted if k not in _FREE and was.get(k) != wanted[k])
        same = engram.spec.classes == splits.classes and engram.spec.regime == row.method.name
        if other or not same:
            raise EngramError(
                f"{path} was trained with other {', '.join(other) or 'classes or regime'}; repeat "
                "the command that made it, or choose another -o."
            )
        return engram

    def _beside(
        self, row: TableRow, engram: Engram, splits: Splits, backbone: ViT
    ) -> list[dict[str, Any]]:
        """The accuracy of a task as cells of others are added: every token reads all of them.

        Unless the row is masked: then no token reads those of another task.
        """
        if not self.beside:
            return []
        model = MemoryViT(backbone, unmasked=not row.method.shares_pass).eval()
        model.attach(engram)
        found: list[dict[str, Any]] = []
        for i, folder in enumerate(self.beside):
            path = folder / f"{row.name}.safetensors"
            if not path.exists():
                raise EngramError(
                    f"There is no {path}; {flag('beside')} takes folders that this command wrote "
                    f"for other data, with {flag('table', '4.4')}."
                )
            model.attach(read_engram(path).renamed(f"beside-{i}"))
            split = "val" if splits.test is None else "test"
            score = evaluate(model, splits, engram.spec.name, split=split)["accuracy"]
            named = ", ".join(one.name for one in self.beside[: i + 1])
            found.append({"row": f"{row.name}, beside {named}", "lr": None, split: score})
        return found

    def _describe(
        self, backbone: ViT, done: Mapping[str, Engram], more: Sequence[dict[str, Any]] = ()
    ) -> Description:
        document: list[dict[str, Any]] = []
        for name, engram in done.items():
            metrics = {split: values["accuracy"] for split, values in engram.metrics.items()}
            rate = (engram.recipe or {}).get("lr")
            document.append({"row": name, "lr": rate, **metrics, "paper": self._paper(name)})
        extra = [{**row, "paper": None} for row in more]
        table = tuple(
            (
                row["row"],
                "" if row["lr"] is None else f"{row['lr']:g}",
                *(f"{100 * row[split]:.1f}" if split in row else "" for split in ("val", "test")),
                _percent(row["paper"]),
            )
            for row in (*document, *extra)
        )
        about = [("dataset", self.dataset), ("backbone", backbone.source)]
        columns = ("row", "learning rate", "validation, %", "test, %", "paper, B/32, %")
        found = {**dict(about), "rows": document, **({"more": extra} if extra else {})}
        return Description(found, about, columns, table)


def _scores(path: Path) -> list[tuple[float, float]]:
    """The validation accuracy of a row at every learning rate, the lowest first."""
    with open(run_folder(path) / "sweep.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return sorted((float(row["lr"]), float(row["val_accuracy"])) for row in rows)


def _figure(paths: Mapping[TableRow, Path]) -> str:
    """Validation accuracy over the logarithm of the learning rate, a line for each row."""
    lines = []
    for row, path in paths.items():
        rates, scores = zip(*_scores(path), strict=True)
        lines.append(Line(row.name, [math.log10(r) for r in rates], [100 * s for s in scores]))
    title = "Validation accuracy, %, over the logarithm (base 10) of the learning rate"
    return side_by_side([Chart(title, line_chart(lines, title))])


def _percent(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.1f}"


def _write_results(out: Path, result: Description) -> None:
    lines = [*(f"{label}: {text}" for label, text in result.rows), ""]
    for cells in (result.columns, ("---",) * len(result.columns), *result.table):
        lines.append(f"| {' | '.join(cells)} |")
    write_atomically(out / "results.md", ("\n".join(lines) + "\n").encode())
    write_atomically(out / "results.json", json.dumps(result.document, indent=1).encode())
