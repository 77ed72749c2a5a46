"""`engram drift`: whether tasks see other images than before, from two tables of answers.

Of every task, the familiarity of images, the confidence of answers and the numbers of a regression
are compared by the two-sample Kolmogorov-Smirnov test, and the classes that are answered by
Pearson's chi-squared test. The p-values of all tests are corrected together (Holm, 1979).

With enough images any difference is significant, so a size is next to every p-value, from 0 to 1:
the largest difference between the two cumulative distributions, or the share of images whose class
would have to change for both to have the same classes (total variation distance). Drift is what is
significant *and* not small.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engram.data.tables import csv_rows, open_text
from engram.errors import EngramError
from engram.util.files import open_regular
from engram.util.parquet import batches, open_parquet
from engram.util.progress import Progress, silent
from engram.util.text import Description, counted, explained, first_line, join_names

SIGNIFICANT = 0.01  # a corrected p-value below it
_EXPECTED = 5  # images of a class from which on the chi-squared distribution holds
_CHANGED = 3  # classes that a sentence names

Numbers = npt.NDArray[np.float64]


# Tables of answers that `engram predict --out` wrote; `Kind.table_columns` says their columns

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


# Comparisons


@dataclass(frozen=True)
class Comparison:
    """One property of a task's images or answers in both tables, and the test of it."""

    task: str
    name: str  # familiarity, confidence, answers, or the name of a number
    reference: Numbers  # the values, or the number of images of every class
    new: Numbers
    test: str
    statistic: float
    size: float
    p: float
    classes: Sequence[str] = ()  # of counts
    images: tuple[int, int] = (0, 0)  # of both tables, of which the counts are shares
    corrected: float = math.nan  # the p-value among all tests

    def drifts(self, least: float) -> bool:
        """Whether it is significant, and at least so large."""
        return self.corrected < SIGNIFICANT and self.size >= least

    @property
    def change(self) -> str:
        """A sentence about the change."""
        if not self.classes:
            medians = (float(np.median(values)) for values in (self.reference, self.new))
            return "median {:.3g} → {:.3g}".format(*medians)
        rows = sorted(self.shares(), key=lambda row: -abs(row[2] - row[1]))[:_CHANGED]
        return ", ".join(f"{name} {before:.1%} → {now:.1%}" for name, before, now in rows)

    def shares(self) -> list[tuple[str, float, float]]:
        """Share of each class among the images, before and now."""
        pairs = zip((self.reference, self.new), self.images, strict=True)
        before, now = (counts / images for counts, images in pairs)
        return [(name, float(before[i]), float(now[i])) for i, name in enumerate(self.classes)]


@dataclass(frozen=True)
class Drift:
    """Two tables, compared; differences of at least the size `least` count."""

    reference: AnswerTable
    new: AnswerTable
    comparisons: Sequence[Comparison]
    least: float

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(c.task for c in self.comparisons if c.drifts(self.least)))

    @property
    def table(self) -> tuple[tuple[str, ...], ...]:
        """A row for each comparison, for people; `COLUMNS` are its columns."""
        return tuple(
            (c.task, c.name, "yes" if c.drifts(self.least) else "no", c.change,
             f"{c.size:.3f}", _shown(c.corrected))
            for c in self.comparisons
        )  # fmt: skip


COLUMNS = ("task", "compared", "drift", "change", "size", "p")


def _shown(p: float) -> str:
    return f"{p:.2g}" if p >= 1e-12 else "< 1e-12"


def compare(reference: AnswerTable, new: AnswerTable, least: float) -> Drift:
    """Compare all tasks that both tables have; an EngramError if there is none."""
    common = [name for name in reference.tasks if name in new.tasks]
    if not common:
        raise EngramError(
            f"{reference.path} has answers of {', '.join(reference.tasks)}, and {new.path} of "
            f"{', '.join(new.tasks)}; they have no task in common, so there is nothing to compare."
        )
    found = [one for name in common for one in _task(name, reference, new)]
    corrected = holm([one.p for one in found])
    found = [replace(one, corrected=p) for one, p in zip(found, corrected, strict=True)]
    return Drift(reference, new, found, least)


def describe(drift: Drift) -> Description:
    """The comparison as a document, rows and a table."""
    tables = {"reference": drift.reference, "new": drift.new}
    tasks = [set(table.tasks) for table in tables.values()]
    alone = sorted(tasks[0] ^ tasks[1])
    fields = ("task", "name", "test", "statistic", "size", "p", "corrected", "change")
    document = {
        "drift": drift.tasks,
        "tables": {
            title: {"path": str(one.path), "rows": one.rows, "unreadable": one.unreadable}
            for title, one in tables.items()
        },
        "in_one_table": alone,
        "comparisons": [
            {name: getattr(c, name) for name in fields} | {"drift": c.drifts(drift.least)}
            for c in drift.comparisons
        ],
    }
    rows = [
        (title, f"{one.path}, {counted(one.rows, 'row')}, {one.unreadable:,} unreadable")
        for title, one in tables.items()
    ]
    rows.append(("drift", join_names(drift.tasks) or "none"))
    if alone:
        rows.append(("not compared", f"{join_names(alone)}: in one table only"))
    known = {c.task for c in drift.comparisons if c.name == "familiarity"}
    without = sorted((tasks[0] & tasks[1]) - known)
    legend = [f"drift: p (corrected for all tests) below {SIGNIFICANT} and size {drift.least:g} up"]
    if without:
        legend.append(f"no familiarity of {join_names(without)}: not in both tables")
    return Description(document, rows, COLUMNS, drift.table, tuple(legend))


def _task(name: str, reference: AnswerTable, new: AnswerTable) -> Iterator[Comparison]:
    """The comparisons of one task; what a table does not have is not compared."""
    both = [list(table.tasks[name].values()) for table in (reference, new)]
    values = {}
    for measure in ("familiarity", "confidence"):
        values[measure] = [_finite([getattr(one, measure) for one in answers]) for answers in both]
    numbers = dict.fromkeys(number for answer in both[0] for number in answer.numbers)
    for number in numbers:
        values[number] = [_finite([a.numbers.get(number) for a in answers]) for answers in both]
    for measure, (before, now) in values.items():
        if len(before) and len(now):
            size, p = kolmogorov_smirnov(before, now)
            yield Comparison(name, measure, before, now, "Kolmogorov-Smirnov", size, size, p)
    if not numbers:
        yield _answers(name, both[0], both[1], name in reference.several | new.several)


def _answers(
    task: str, reference: Sequence[TableAnswer], new: Sequence[TableAnswer], several: bool
) -> Comparison:
    """The comparison of classes. With several labels an image, every class is tested by itself."""
    counts = [Counter(label for a in rows for label in a.labels or ("none",))
              for rows in (reference, new)]  # fmt: skip
    classes = sorted({*counts[0], *counts[1]})
    before, now = (np.array([one[c] for c in classes], dtype=np.float64) for one in counts)
    images = len(reference), len(new)
    differences = np.abs(before / images[0] - now / images[1])
    if not several:
        statistic, p = chi_squared(before, now)
        size = float(differences.sum() / 2)
    else:
        pairs = zip(before, now, strict=True)
        tests = [chi_squared(*(np.array([x, n - x]) for x, n in zip(pair, images, strict=True)))
                 for pair in pairs]  # fmt: skip
        statistic = max(statistic for statistic, _ in tests)
        p = min(1.0, len(tests) * min(p for _, p in tests))
        size = float(differences.max())
    return Comparison(
        task, "answers", before, now, "chi-squared", statistic, size, p, classes, images
    )


def _finite(values: Sequence[float | None]) -> Numbers:
    return np.array([value for value in values if value is not None], dtype=np.float64)


# Tests


def kolmogorov_smirnov(one: Numbers, other: Numbers) -> tuple[float, float]:
    """The two-sample statistic, and its p-value by the asymptotic distribution."""
    one, other = np.sort(one), np.sort(other)
    every = np.concatenate([one, other])
    shares = [np.searchsorted(x, every, side="right") / len(x) for x in (one, other)]
    largest = float(np.abs(shares[0] - shares[1]).max())
    images = len(one) * len(other) / (len(one) + len(other))
    # Stephens (1970): the distribution of the limit, closer for few images.
    scaled = (math.sqrt(images) + 0.12 + 0.11 / math.sqrt(images)) * largest
    if scaled < 0.2:
        return largest, 1.0
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * k * k * scaled * scaled) for k in range(1, 101))
    return largest, min(1.0, max(0.0, math.fsum(terms)))


def chi_squared(one: Numbers, other: Numbers) -> tuple[float, float]:
    """Pearson's statistic of two rows of counts, and its p-value; rare classes are one class."""
    counts = np.stack([one, other])
    expected = counts.sum(1, keepdims=True) * counts.sum(0) / counts.sum()
    rare = (expected < _EXPECTED).any(0)
    counts = np.concatenate([counts[:, ~rare], counts[:, rare].sum(1, keepdims=True)], axis=1)
    counts = counts[:, counts.sum(0) > 0]
    expected = counts.sum(1, keepdims=True) * counts.sum(0) / counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.shape[1] - 1
    if not freedom:
        return 0.0, 1.0
    halves = (torch.tensor(x / 2, dtype=torch.float64) for x in (freedom, statistic))
    return statistic, float(torch.special.gammaincc(*halves))


def holm(values: Sequence[float]) -> list[float]:
    """P-values corrected for their number, by Holm's step-down method."""
    corrected, largest = [1.0] * len(values), 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[i]))
        corrected[i] = largest
    return corrected


# Images


def changed_answers(
    reference: Mapping[str, TableAnswer], new: Mapping[str, TableAnswer]
) -> list[tuple[str, TableAnswer, TableAnswer]]:
    """Images of both tables whose labels differ, with both answers; the surest answers first."""
    found = [
        (image, reference[image], now)
        for image, now in new.items()
        if image in reference and reference[image].labels != now.labels
    ]
    return sorted(found, key=lambda row: -sum(a.confidence or 0 for a in row[1:]))


def least_familiar(new: Mapping[str, TableAnswer]) -> list[tuple[str, TableAnswer]]:
    """Images with a familiarity, the least familiar first."""
    known = [(image, one) for image, one in new.items() if one.familiarity is not None]
    return sorted(known, key=lambda row: row[1].familiarity or 0.0)
