"""benchmarks/attacks: a few cases of every section, and that a section counts what it loses."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from benchmarks.attacks import __main__ as attacks
from benchmarks.attacks import headers, http, kills, load, pictures, trunks
from benchmarks.attacks.isolated import run_isolated
from benchmarks.attacks.record import Record
from benchmarks.attacks.service import attacked_service
from engram.errors import EngramError


def test_odd_headers_are_read_or_refused() -> None:
    record = headers.run(300)
    assert (record.tried, record.lost) == (300, [])


def test_odd_trunks_are_loaded_or_refused() -> None:
    record = trunks.run(60)
    assert (record.tried, record.lost) == (60, [])


def test_the_service_survives_pictures_abuses_and_load() -> None:
    record, seen = Record(), Record()
    with attacked_service(record, "--timeout", str(http.TIMEOUT)) as service:
        pictures.attack(service, record, 12)
        http.attack(service, record, 32)  # every abuse once
        load.attack(service, seen, seconds=1, clients=4)
    assert (record.tried, record.lost, seen.lost) == (44, [], [])
    assert seen.tried > 4
    assert record.slowest_health is not None


def test_a_killed_run_resumes_to_the_same_weights() -> None:
    record = kills.run(1)
    assert (record.tried, record.lost) == (1, [])


# The machinery


def misbehave(case: str) -> None:
    """What a case may do to its process."""
    if case == "refuse":
        raise EngramError("No.")
    if case == "raise":
        raise IndexError("out of range")
    if case == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "wait":
        time.sleep(60)
    if case == "grow":
        bytearray(10**10)


def test_whatever_a_case_does_is_counted_and_the_next_one_runs() -> None:
    names = ("fine", "raise", "refuse", "die", "fine", "wait", "grow", "fine")
    record = run_isolated([(name, name) for name in names], misbehave, seconds=1)
    assert (record.tried, record.survived) == (8, 4)
    assert record.lost == [
        "raise: IndexError: out of range",
        "die: the process ended with -9",
        "wait: took more than 1 seconds",
        "grow: MemoryError: ",
    ]


def test_an_interrupted_run_continues_with_the_next_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def section(name: str, lost: list[str]) -> object:
        def run(count: int) -> Record:
            ran.append(name)
            return Record(count, count - len(lost), lost)

        return run, 5, 1

    fake = {"headers": section("headers", []), "trunks": section("trunks", ["a: b"])}
    monkeypatch.setattr(attacks, "SECTIONS", fake)
    monkeypatch.setattr(attacks, "BUILD", tmp_path)
    monkeypatch.setattr("benchmarks.report.RESULTS", tmp_path)
    assert attacks.main(["--only", "headers"]) == 0
    assert attacks.main(["--only", "headers,trunks"]) == 1
    assert ran == ["headers", "trunks"]
    page = (tmp_path / "attacks.md").read_text()
    assert "| headers: " in page
    assert "| 5 | 4 | 1 |" in page
    assert "- a: b" in page
    assert attacks.main(["--quick", "--only", "headers"]) == 0
    assert (tmp_path / "attacks.md").read_text() == page
