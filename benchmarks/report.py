"""Result pages: Markdown tables, and the file that a benchmark leaves in benchmarks/results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.paths import RESULTS
from engram.experiments.timing import describe_machine, machine
from engram.util.files import write_atomically


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def write_report(name: str, title: str, lines: Sequence[str]) -> None:
    """Print a page and write it to benchmarks/results/NAME.md."""
    about = f"Measured on {describe_machine(machine())}."
    text = "\n".join([f"# {title}", "", about, "", *lines, ""])
    print(text)
    RESULTS.mkdir(exist_ok=True)
    write_atomically(RESULTS / f"{name}.md", text.encode())
