"""The result of a command: a document for machines, rows and a table for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Description:
    document: Any  # as JSON has it
    rows: list[tuple[str, str]]  # a label and what it says
    columns: tuple[str, ...] = ()  # of a table below, if there is one
    table: tuple[tuple[str, ...], ...] = ()
    legend: tuple[str, ...] = ()  # lines below the table
