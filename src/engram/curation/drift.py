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

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from engram.curation.answer_tables import AnswerTable, TableAnswer
from engram.errors import EngramError
from engram.util.description import Description
from engram.util.text import counted, join_names

SIGNIFICANT = 0.01  # a corrected p-value below it
_EXPECTED = 5  # images of a class from which on the chi-squared distribution holds
_CHANGED = 3  # classes that a sentence names

Numbers = npt.NDArray[np.float64]


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
    for field in ("familiarity", "confidence"):
        values[field] = [_finite([getattr(one, field) for one in answers]) for answers in both]
    numbers = dict.fromkeys(number for answer in both[0] for number in answer.numbers)
    for number in numbers:
        values[number] = [_finite([a.numbers.get(number) for a in answers]) for answers in both]
    for field, (before, now) in values.items():
        if len(before) and len(now):
            size, p = kolmogorov_smirnov(before, now)
            yield Comparison(name, field, before, now, "Kolmogorov-Smirnov", size, size, p)
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
