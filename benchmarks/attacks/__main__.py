"""Hostile files, pictures, requests and kills, over loopback only: what Engram survives.

    OMP_NUM_THREADS=1 python -m benchmarks.attacks [--quick] [--only headers,backbones]
    OMP_NUM_THREADS=1 python -m benchmarks.attacks --only soak [--minutes 60]

Every section keeps its record in build/attacks, so an interrupted run continues with the section
that it was in; `--again` starts anew. It takes about 36 minutes and writes
benchmarks/results/attacks.md. The long load, soak, runs only where it is named. `--quick` tries a
few cases of each section, only prints its table and keeps nothing. The exit code is 1 if a case was
lost.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.attacks import (
    archives,
    backbones,
    bulk,
    connections,
    headers,
    http,
    kills,
    lists,
    load,
    pictures,
    soak,
    v2,
)
from benchmarks.attacks.record import Record
from benchmarks.paths import BUILD
from benchmarks.report import markdown_table, write_report
from engram.util.files import write_atomically

#: By name: what runs it, how many cases (or seconds of load) it has, and how many with --quick.
SECTIONS: dict[str, tuple[Callable[[int], Record], int, int]] = {
    "headers": (headers.run, 5000, 60),
    "backbones": (backbones.run, 500, 12),
    "pictures": (pictures.run, 200, 12),
    "http": (http.run, 200, 16),
    "connections": (connections.run, 7500, 300),
    "v2": (v2.run, 150, 20),
    "kills": (kills.run, 40, 1),
    "bulk": (bulk.run, 40, 2),
    "archives": (archives.run, 210, 21),
    "lists": (lists.run, 45, 4),
    "load": (load.run, load.SECONDS, 3),
    "soak": (soak.run, soak.SECONDS, 12),
}
WHAT = {
    "headers": "engrams with odd headers and correct hashes: inspected, attached, asked",
    "backbones": "backbones with odd configurations: loaded and run",
    "pictures": "hostile pictures, a good request after each",
    "http": "raw abuses of HTTP, a good request after each",
    "connections": "good requests while a client holds connections: silent, slow, not reading",
    "v2": "requests of /v2 that cost too much to read or to answer, a good request after each",
    "kills": "SIGKILLs of fit and sweep, resumed to the same weights, no worker left",
    "bulk": "SIGKILLs of predict --out and pairs of jobs on one output, tables compared",
    "archives": "damaged and hostile archives in predict --out, repaired and continued",
    "lists": "lists, tables and folders with hostile entries: the good images are answered",
    "load": "requests under load, every answer compared",
    "soak": "good answers in a long load of good and hostile requests, kills and bulk jobs",
}
MOST_HEALTH = 0.2  # seconds that /healthz may take


def run_section(name: str, quick: bool, count: int | None = None) -> Record:
    """The record of a section; `count` is another number of its cases, or seconds."""
    work, whole, few = SECTIONS[name]
    print(f"{name} ...", flush=True)
    began = time.monotonic()
    record = work((few if quick else whole) if count is None else count)
    record.seconds = time.monotonic() - began
    print(f"{name}: {record.survived} of {record.tried} in {record.seconds:.0f} s", flush=True)
    return record


def kept_record(path: Path) -> Record | None:
    return Record(**json.loads(path.read_bytes())) if path.exists() else None


def lines_of(records: Mapping[str, Record]) -> list[str]:
    """The table of all sections, and the first cases that were lost."""
    rows = []
    for name, record in records.items():
        slowest = record.slowest_health
        health = "" if slowest is None else f"{1000 * slowest:.0f} ms"
        counts = (f"{n:,}" for n in (record.tried, record.survived, len(record.lost)))
        rows.append([f"{name}: {WHAT[name]}", *counts, health, f"{record.seconds:.0f} s"])
    head = ("attack", "tried", "survived", "lost", "slowest /healthz", "time")
    lines = markdown_table(head, rows)
    lines += ["", *(f"{name}: {r.details}." for name, r in records.items() if r.details)]
    for name, record in records.items():
        if record.lost:
            lines += ["", f"Lost in {name}:", ""]
            lines += [f"- {' '.join(sentence.split())}" for sentence in record.lost[:10]]
    return lines


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attacks", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="a few cases of each section")
    usual = [name for name in SECTIONS if name != "soak"]
    parser.add_argument("--only", default=",".join(usual), help="sections, with commas")
    parser.add_argument("--minutes", type=float, help="how long soak takes (default: 60)")
    parser.add_argument("--again", action="store_true", help="run sections that have a record too")
    given = parser.parse_args(arguments)
    given.only = given.only.split(",")
    if unknown := set(given.only) - SECTIONS.keys():
        parser.error(f"there is no section {', '.join(sorted(unknown))}")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    seconds = {} if given.minutes is None else {"soak": round(60 * given.minutes)}
    if given.quick:
        quick = {name: run_section(name, True, seconds.get(name)) for name in given.only}
        print("\n".join(lines_of(quick)))
        return int(any(record.lost for record in quick.values()))
    records = {}
    for name in SECTIONS:
        path = BUILD / "attacks" / f"{name}.json"
        record = None if given.again and name in given.only else kept_record(path)
        if record is None and name in given.only:
            if given.again and name == "soak":
                soak.forget()
            record = run_section(name, False, seconds.get(name))
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(asdict(record)).encode())
        if record is not None:
            records[name] = record
    command = "Written by `OMP_NUM_THREADS=1 python -m benchmarks.attacks`."
    write_report("attacks", "Attacks", [command, "", *lines_of(records)])
    slow = [r for r in records.values() if (r.slowest_health or 0) > MOST_HEALTH]
    return int(bool(slow or any(record.lost for record in records.values())))


if __name__ == "__main__":
    raise SystemExit(main())
