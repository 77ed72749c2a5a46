"""Measure everything in one run, then write speed.md, its plots and the tables of docs/scale.md.

    python -m benchmarks.speed                 everything: about 45 minutes on two idle cores
    python -m benchmarks.speed --quick         a small backbone and few rounds: no valid figures
    python -m benchmarks.speed --resume        continue an interrupted run
    python -m benchmarks.speed --only busy     measure one section (again)
    python -m benchmarks.speed --write         only write the pages, from the last measurements

The results are in benchmarks/results: speed.md, its plots and the measured numbers of each section
in speed/. A section is written as soon as it is done.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.paths import BUILD, RESULTS, ROOT
from benchmarks.speed import page, plots, scale
from benchmarks.speed.measure import SECTIONS
from benchmarks.speed.plan import PLANS, Plan
from engram.experiments.timing import machine
from engram.util.files import write_atomically

PAGE = "speed.md"


def main(given: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(given)
    unknown = set(arguments.only) - set(SECTIONS)
    if unknown:
        print(f"There is no section {min(unknown)!r}; there are {', '.join(SECTIONS)}.")
        return 2
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    # a quick run must not replace the real figures
    out: Path = arguments.out or (RESULTS if arguments.plan == "full" else BUILD / "speed")
    folder = measurements(out)
    folder.mkdir(parents=True, exist_ok=True)
    if not arguments.write:
        if not (arguments.only or arguments.resume):
            for name in SECTIONS:
                (folder / f"{name}.json").unlink(missing_ok=True)
        plan = PLANS[arguments.plan]
        plan = replace(plan, haste=plan.haste * arguments.haste)
        _measure(plan, arguments.only or list(SECTIONS), folder, resume=arguments.resume)
    _write(out)
    return 0


def measurements(out: Path) -> Path:
    """The folder of measured numbers and plots that belongs to the page in `out`."""
    return out / "speed"


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The measured numbers by section."""
    files = {name: folder / f"{name}.json" for name in SECTIONS}
    return {name: json.loads(f.read_text()) for name, f in files.items() if f.exists()}


def _write(out: Path) -> None:
    """Write the page and plots, and docs/scale.md if these are the real figures."""
    found = read(measurements(out))
    missing = [name for name in SECTIONS if name not in found and name not in page.LATER]
    if missing:
        print(f"No page is written: {', '.join(missing)} not measured yet; run with --resume.")
        return
    plots.draw(found, measurements(out))
    write_atomically(out / PAGE, page.page(found).encode())
    guide = ROOT / "docs" / "scale.md" if out == RESULTS else None
    if guide is not None:
        write_atomically(guide, scale.filled(guide.read_text(encoding="utf-8"), found).encode())
    print(f"Written: {out / PAGE}" + (f" and {guide}" if guide else ""))


def _measure(plan: Plan, wanted: list[str], folder: Path, *, resume: bool) -> None:
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.0f} s] {text}", file=sys.stderr, flush=True)

    for number, name in enumerate(wanted, start=1):
        file = folder / f"{name}.json"
        say(f"{name} ({number} of {len(wanted)})")
        if resume and file.exists() and json.loads(file.read_text())["plan"] == plan.name:
            say(f"{name} was measured before")
            continue
        torch.manual_seed(0)
        start = time.perf_counter()
        document = SECTIONS[name](plan, say)
        about = {
            "plan": plan.name,
            "haste": plan.haste / PLANS[plan.name].haste,
            "machine": machine(),
            "date": time.strftime("%Y-%m-%d"),
            "took": round(time.perf_counter() - start, 1),
        }
        write_atomically(file, json.dumps({**about, **document}, indent=1).encode() + b"\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", dest="plan", action="store_const", const="quick", default="full",
        help="a small backbone and few rounds, to see that everything runs")  # fmt: skip
    add("--plan", choices=sorted(PLANS), help="full, quick, or tiny (for tests)")
    add("--only", type=lambda text: text.split(","), default=[], metavar="A,B",
        help=f"sections to measure: {', '.join(SECTIONS)}")  # fmt: skip
    add("--haste", type=float, default=1, metavar="N", help="divide the time of every table by N")
    add("--resume", action="store_true", help="skip sections that were measured before")
    add("--write", action="store_true", help="measure nothing and write the pages")
    add("--threads", type=int, help="number of torch threads; default: torch's own choice")
    add("--out", type=Path, metavar="DIR",
        help="folder of the results; default: benchmarks/results or build/speed")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
