"""Run the paper's experiments, print their tables, and write the tables of the pages.

    python -m benchmarks.paper --list               what is done and what is missing
    OMP_NUM_THREADS=1 python -m benchmarks.paper    run what is missing, the most valuable first
    python -m benchmarks.paper table2               run what one experiment misses, print its table
    python -m benchmarks.paper table2 --table       only print its table
    python -m benchmarks.paper --write              write the tables and plots of docs/results.md
                                                    and benchmarks/results/paper.md
    python -m benchmarks.paper --check              exit with 1 if a page has other numbers

Start one process per core: they share the work, and each can be stopped and started at any time.
A finished run is recorded in benchmarks/results/paper and never repeated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.paper import page
from benchmarks.paper.experiments import EXPERIMENTS
from benchmarks.paper.queue import all_jobs
from benchmarks.paper.records import FOLDER
from benchmarks.paper.worker import Job, work_through
from benchmarks.paths import require_backbone
from engram.errors import EngramError


def main(given: Sequence[str] | None = None) -> None:
    parser = _parser()
    arguments = parser.parse_args(given)
    names: list[str] = arguments.experiments
    if unknown := set(names) - set(EXPERIMENTS):
        parser.error(f"there is no {min(unknown)!r}; choose from {', '.join(EXPERIMENTS)}")
    jobs = [job for job in _jobs(names) if arguments.only in job.name]
    if arguments.check:
        _check_page()
    elif arguments.write:
        page.write()
    elif arguments.table:
        _print_tables(names or list(EXPERIMENTS))
    elif arguments.list:
        _print_list(jobs)
    else:
        require_backbone()
        work_through(jobs, arguments.limit)
        _print_tables(names)


def _jobs(names: Sequence[str]) -> list[Job]:
    """The jobs of some experiments, or all."""
    return [job for name in names for job in EXPERIMENTS[name].jobs()] if names else all_jobs()


def _check_page() -> None:
    if old := page.outdated():
        sys.exit(f"{old[0]} differs from {FOLDER}; run `python -m benchmarks.paper --write`.")


def _print_list(jobs: Sequence[Job]) -> None:
    for job in jobs:
        print("missing" if job.missing() else "done   ", job.name)
    print(f"{sum(not job.missing() for job in jobs)} of {len(jobs)} done")


def _print_tables(names: Sequence[str]) -> None:
    for name in names:
        print(f"{name}: {EXPERIMENTS[name].title}\n")
        print("\n".join(EXPERIMENTS[name].table()), end="\n\n")


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, EXPERIMENTS))
    experiments = [f"  {name:{width}}  {one.title}" for name, one in EXPERIMENTS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper",
        description=__doc__,
        epilog="\n".join(["experiments:", *experiments]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("experiments", nargs="*", metavar="EXPERIMENT", help="experiments to run; default: all")
    add("--list", action="store_true", help="list the runs, done or missing, and run nothing")
    add("--only", default="", metavar="TEXT", help="only runs whose name contains TEXT")
    add("--limit", type=int, default=0, metavar="N", help="stop after N runs; 0: at the end")
    add("--table", action="store_true", help="print the tables and run nothing")
    add("--write", action="store_true", help="write the pages and plots; run nothing")
    add("--check", action="store_true", help="check that the pages have the recorded numbers")
    return parser


if __name__ == "__main__":
    try:
        main()
    except EngramError as error:
        sys.exit(str(error))
