"""Which split each row of a table belongs to, as one of its columns says.

A column says it if its cells are nothing but names of splits (train, Validation, TEST, …), whatever
the column is called, or if it is a flag: is_train, is_val or is_test with true and false in it. So
no table trains on its test rows because of the name of a column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engram.data.labels import find_column, truth
from engram.data.source import DataRequest, match_splits, usual_split
from engram.errors import EngramError, flag

#: The value of `--split-column` for a table without splits, whatever its columns look like.
NO_COLUMN = "none"

_FLAG = re.compile(r"is[ _-]?([a-z]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Division:
    """The split of every row, None for a row that is left out, and the columns that say it."""

    splits: Sequence[str | None]
    columns: tuple[str, ...]

    @property
    def by(self) -> str:
        """The columns, for sentences."""
        noun = "the column " if len(self.columns) == 1 else "the columns "
        return noun + " and ".join(map(repr, self.columns))


def divide_rows(
    source: str,
    columns: Iterable[str],
    cells: Callable[[str], Sequence[Any]],
    request: DataRequest,
    taken: Collection[str] = (),
) -> Division | None:
    """The splits of rows, from the column that the caller names or else from those that have them.

    `cells` gives the cells of a column; `taken` columns hold images and labels.
    """
    available, given = list(columns), request.split_column
    if given == NO_COLUMN and given not in available:
        return None
    if given is not None:
        column = find_column(source, available, "split", given)
        marked = None if request.split_names else _read_flag(column, cells(column))
        if marked is not None:
            return _combined(source, {column: marked})
        return _named(source, column, cells(column), request.split_names)
    free = [column for column in available if column not in taken]
    usual = find_column(source, free, "split", None, needed=False)
    found: list[Division] = []
    flags: dict[str, tuple[str, list[bool]]] = {}
    for column in free:
        values = cells(column)
        if _holds_names(values):
            _refuse_gaps(source, column, values, usual)
            found.append(_named(source, column, values, {}))
        elif (marked := _read_flag(column, values)) is not None:
            flags[column] = marked
    if flags:
        found.append(_combined(source, flags))
    if not found:
        return _named(source, usual, cells(usual), request.split_names) if usual else None
    if any(division.splits != found[0].splits for division in found):
        *names, last = [column for division in found for column in division.columns]
        raise EngramError(
            f"{source}: the columns {', '.join(map(repr, names))} and {last!r} say different "
            "things about which rows are for training and which for test; choose one with "
            f"{flag('split_column', names[0])}, or none of them with "
            f"{flag('split_column', NO_COLUMN)}."
        )
    return found[0]


def could_divide(column: str, cells: Sequence[Any]) -> bool:
    """Whether a column may be one that `divide_rows` looks for, by some of its cells."""
    empty = all(map(_is_empty, cells))
    return empty or _holds_names(cells) or _read_flag(column, cells) is not None


# Columns of names


def _holds_names(cells: Iterable[Any]) -> bool:
    """Whether there are names of splits in the cells, and nothing else but empty cells."""
    full = {cell if isinstance(cell, str) else None for cell in cells if not _is_empty(cell)}
    return bool(full) and all(cell is not None and usual_split(cell) for cell in full)


def _refuse_gaps(source: str, column: str, cells: Sequence[Any], usual: str) -> None:
    """Ask about empty cells where the name of the column promises nothing."""
    empty = sum(map(_is_empty, cells))
    if empty and column != usual:
        raise EngramError(
            f"{source}: the column {column!r} names splits, but is empty in {empty:,} of "
            f"{len(cells):,} rows; fill it in, give {flag('split_column', column)} to leave these "
            f"rows out, or {flag('split_column', NO_COLUMN)} if it is about something else."
        )


def _named(source: str, column: str, cells: Sequence[Any], given: Mapping[str, str]) -> Division:
    names = [str(cell) for cell in cells]
    meanings = {name: split for name in set(names) if (split := usual_split(name)) is not None}
    if given or not meanings:
        location = f"{source}, column {column!r},"
        matched = match_splits(sorted(set(names)), given, location)
        meanings = {name: split for split, name in matched.items()}
    return Division([meanings.get(name) for name in names], (column,))


def _is_empty(cell: Any) -> bool:
    return cell is None or (isinstance(cell, str) and not cell.strip())


# Flags: is_train, is_val, is_test


def _read_flag(column: str, cells: Sequence[Any]) -> tuple[str, list[bool]] | None:
    """The split that a column of true and false is about, and the rows; an empty cell is false."""
    match = _FLAG.fullmatch(column.strip())
    split = usual_split(match[1]) if match else None
    if split is None or all(map(_is_empty, cells)):
        return None
    values = [False if _is_empty(cell) else truth(cell) for cell in cells]
    rows = [value for value in values if value is not None]
    return (split, rows) if len(rows) == len(values) else None


def _combined(source: str, flags: Mapping[str, tuple[str, list[bool]]]) -> Division:
    """Combine flags. Rows that none of them marks are the split that has no flag."""
    marked = [split for split, _ in flags.values()]
    rest = next((split for split in ("train", "test", "val") if split not in marked), None)
    rows: list[str | None] = []
    for values in zip(*(values for _, values in flags.values()), strict=True):
        true = {split for split, is_true in zip(marked, values, strict=True) if is_true}
        if len(true) > 1:
            raise EngramError(
                f"{source}, row {len(rows) + 1} is marked for {' and '.join(sorted(true))} by the "
                f"columns {' and '.join(flags)}; mark every row once, or choose a column with "
                f"{flag('split_column', next(iter(flags)))}."
            )
        rows.append(true.pop() if true else rest)
    return Division(rows, tuple(flags))
