"""What a script found: printed, and kept as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engram.experiments.timing import machine, machine_words
from engram.util.files import write_atomically

RESULTS = Path(__file__).parent / "results"


def report(name: str, title: str, lines: Sequence[str]) -> None:
    """Print a table and keep it in benchmarks/results/NAME.md."""
    about = f"Measured on {machine_words(machine())}."
    text = "\n".join([f"# {title}", "", about, "", *lines, ""])
    print(text)
    RESULTS.mkdir(exist_ok=True)
    write_atomically(RESULTS / f"{name}.md", text.encode())
