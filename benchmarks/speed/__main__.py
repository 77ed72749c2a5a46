"""Measure everything in one run, and write RESULTS.md, its plots and docs/scale.md.

    python -m benchmarks.speed                      all of it: about 17 minutes on two free cores
    python -m benchmarks.speed --quick              a small trunk and few rounds: a look, no figures
    python -m benchmarks.speed --resume             go on with a run that was interrupted
    python -m benchmarks.speed --only growth        one section again
    python -m benchmarks.speed --write              only write, from what was measured before

Every section leaves measured/SECTION.json as soon as it is done. What to expect is in RESULTS.md.
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

from benchmarks.speed import plots, results, scale
from benchmarks.speed.measure import SECTIONS
from benchmarks.speed.plan import PLANS, Plan
from engram.experiments.timing import machine
from engram.util.files import write_atomically

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main(given: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(given)
    unknown = set(arguments.only) - set(SECTIONS)
    if unknown:
        print(f"There is no section {min(unknown)!r}; there are {', '.join(SECTIONS)}.")
        return 2
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    look = ROOT / "build" / "speed"  # which is to leave the figures alone
    out: Path = arguments.out or (HERE if arguments.plan == "full" else look)
    kept = out / "measured"
    kept.mkdir(parents=True, exist_ok=True)
    if not arguments.write:
        wanted = arguments.only or list(SECTIONS)
        if not (arguments.only or arguments.resume):
            for name in SECTIONS:
                (kept / f"{name}.json").unlink(missing_ok=True)
        plan = PLANS[arguments.plan]
        plan = replace(plan, haste=plan.haste * arguments.haste)
        _measure(plan, wanted, kept, resume=arguments.resume)
    found = read(kept)
    missing = [name for name in SECTIONS if name not in found]
    if missing:
        print(f"Nothing is written yet: {', '.join(missing)} not measured; run with --resume.")
        return 0
    plots.draw(found, out)
    write_atomically(out / "RESULTS.md", results.page(found).encode())
    guide = ROOT / "docs" / "scale.md" if out == HERE else None
    if guide is not None:
        write_atomically(guide, scale.filled(guide.read_text(encoding="utf-8"), found).encode())
    print(f"Written: {out / 'RESULTS.md'}" + (f" and {guide}" if guide else ""))
    return 0


def read(kept: Path) -> dict[str, dict[str, Any]]:
    """What was measured, by section."""
    files = {name: kept / f"{name}.json" for name in SECTIONS}
    return {name: json.loads(f.read_text()) for name, f in files.items() if f.exists()}


def _measure(plan: Plan, wanted: list[str], kept: Path, *, resume: bool) -> None:
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.0f} s] {text}", file=sys.stderr, flush=True)

    for number, name in enumerate(wanted, start=1):
        file = kept / f"{name}.json"
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
    add("--quick", dest="plan", action="store_const", const="quick", default="full")
    add("--plan", choices=sorted(PLANS), help="full, quick, or tiny, which tests run")
    add("--only", type=lambda text: text.split(","), default=[], metavar="A,B", help="sections")
    add("--haste", type=float, default=1, metavar="N", help="divide the time of every table by N")
    add("--resume", action="store_true", help="leave out sections that are there")
    add("--write", action="store_true", help="measure nothing")
    add("--threads", type=int, help="of torch, if not its own choice")
    add("--out", type=Path, help="where RESULTS.md goes: here; of a quick run, build/speed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
