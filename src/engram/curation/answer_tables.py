"""Tables of answers that `engram predict --out` wrote, read for comparison: .parquet, .jsonl, .csv.

A row becomes one `TableAnswer` for each task. `Kind.table_columns` says which columns a task has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from engram.data.tables import csv_rows, open_text
from engram.errors import EngramError
from engram.util.files import open_regular
from engram.util.parquet import batches, open_parquet
from engram.util.progress import Progress, silent
from engram.util.text import explained, first_line

FAMILIARITY, PROBABILITY, SHARE, TOP = ".familiarity", ".probability", ".share", ".top"
_UNUSED = (".logits", ".embedding", ".mask")
_OTHERS = (FAMILIARITY, PROBABILITY, SHARE, TOP, *_UNUSED)  # columns next to that of an answer
_EVERY = 1000  # rows between two reports of progress


class TableAnswer(NamedTuple):
    """The answer of a task about one image."""

    labels: tuple[str, ...]  # the likeliest class, or all that are present
    confidence: float | None  # the probability of the likeliest class
    numbers: Mapping[str, float]  # of a regression
    familiarity: float | None

    @property
    def words(self) -> str:
        if self.numbers:
            return ", ".join(f"{name} {value:.5g}" for name, value in self.numbers.items())
        shown = f" {self.confidence:.0%}" if self.confidence is not None else ""
        return (", ".join(self.labels) or "none") + shown


@dataclass(eq=False)
class AnswerTable:
    """A table: the answers of each task by image, in the order of the rows."""

    path: Path
    tasks: dict[str, dict[str, TableAnswer]] = field(default_factory=dict)
    several: set[str] = field(default_factory=set)  # tasks whose images may have several labels
    rows: int = 0
    unreadable: int = 0


def read_answers(path: Path, progress: Progress = silent) -> AnswerTable:
    """Read a table of answers; an EngramError if it is none."""
    table = AnswerTable(path)
    with explained(
        lambda error: (
            f"{path} cannot be read as a table of answers ({first_line(error)}); give one that "
            "engram predict --out wrote: .parquet, .jsonl or .csv, or a folder of parquet files."
        )
    ):
        if not path.exists():
            raise EngramError(f"There is no {path}; give a table of engram predict --out.")
        for row in _rows(path):
            _add(table, row)
            if table.rows % _EVERY == 0:
                progress(f"reading {path.name}", table.rows, 0, f"{table.rows:,} rows")
    if not table.rows:
        raise EngramError(f"{path} has no rows.")
    if not table.tasks:
        raise EngramError(
            f"{path} has no answers; give a table that engram predict --out wrote, and whose "
            "images can be read."
        )
    return table


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    suffix = path.suffix.lower()
    if path.is_dir():
        for part in sorted(path.glob("*.parquet")):
            yield from _rows(part)
    elif suffix == ".parquet":
        with open_regular(path) as file:
            names = open_parquet(file).schema_arrow.names
            columns = [name for name in names if not name.endswith(_UNUSED)]
            yield from (row for batch in batches(file, columns) for row in batch.to_pylist())
    elif suffix == ".jsonl":
        with open_regular(path) as file:
            yield from map(json.loads, file)
    elif suffix == ".csv":
        with open_regular(path) as file:
            yield from csv_rows(open_text(file, "surrogateescape"))
    else:
        raise ValueError(f"its name ends in {suffix or 'no suffix'}")


def _add(table: AnswerTable, row: Mapping[str, Any]) -> None:
    image, found = row["image"], dict[str, TableAnswer]()
    table.rows += 1
    for name, value in row.items():
        if value in (None, "") or name in ("image", "error"):
            continue
        if name.endswith(TOP):  # every answer with classes has it
            task = name.removesuffix(TOP)
            found[task] = _classes(table, task, row)
        elif not name.endswith(_OTHERS) and name + TOP not in row:
            # One number of a regression is its task's own column, several are TASK.NAME.
            task, _, number = name.rpartition(".")
            task = task or number
            numbers = {**(found[task].numbers if task in found else {}), number: float(value)}
            found[task] = TableAnswer((), None, numbers, _number(row.get(task + FAMILIARITY)))
    for task, answer in found.items():
        table.tasks.setdefault(task, {})[image] = answer
    table.unreadable += not found


def _classes(table: AnswerTable, task: str, row: Mapping[str, Any]) -> TableAnswer:
    """An answer with classes: one of an image or of most of its pixels, or all that are present."""
    value, confidence = row.get(task), _number(row.get(task + PROBABILITY))
    familiarity = _number(row.get(task + FAMILIARITY))
    if task + PROBABILITY in row or task + SHARE in row:
        return TableAnswer((str(value),), confidence, {}, familiarity)
    table.several.add(task)
    top = row[task + TOP]
    top = json.loads(top) if isinstance(top, str) else top
    if isinstance(value, str):  # a cell of CSV
        value = value.split("; ") if value else []
    return TableAnswer(tuple(value or ()), _number(top[0]["probability"]), {}, familiarity)


def _number(value: Any) -> float | None:
    number = math.nan if value in (None, "") else float(value)
    return number if math.isfinite(number) else None
