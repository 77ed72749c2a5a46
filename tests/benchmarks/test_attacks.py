"""benchmarks/attacks: a few cases of every section, and that a section counts what it loses."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.support.benches import forked_services
from tests.support.nursery import Nursery

from benchmarks.attacks import __main__ as attacks
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
from benchmarks.attacks.isolated import run_isolated
from benchmarks.attacks.record import Record
from benchmarks.attacks.service import attacked_service
from benchmarks.attacks.soak_clients import Event, differs, run_jobs
from engram.errors import EngramError


def test_odd_headers_are_read_or_refused() -> None:
    record = headers.run(300)
    assert (record.tried, record.lost) == (300, [])


def test_odd_backbones_are_loaded_or_refused() -> None:
    record = backbones.run(60)
    assert (record.tried, record.lost) == (60, [])


@pytest.fixture
def forked(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attacked service does not import torch anew."""
    monkeypatch.setattr("benchmarks.attacks.service.Service", forked_services(nursery))


def test_the_service_survives_pictures_abuses_and_load(
    forked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, seen, tally = Record(), Record(), soak.Tally()
    monkeypatch.setattr(soak, "IMAGES", 2)
    monkeypatch.setattr(soak, "EVERY", 1.0)
    monkeypatch.setattr(soak, "KILL_EVERY", 1.0)
    monkeypatch.setattr(soak, "CLIENTS", [c for c in soak.CLIENTS if c is not run_jobs])
    with attacked_service(record, "--timeout", str(http.TIMEOUT)) as service:
        pictures.attack(service, record, 12)
        http.attack(service, record, 32)  # every abuse once
        load.attack(service, seen, seconds=1, clients=4)
        soak.load(service, tally, 3, tmp_path / "kept.json")
    assert (record.tried, record.lost, seen.lost) == (44, [], [])
    assert seen.tried > 4
    assert record.slowest_health is not None
    assert (tally.problems, tally.count("answers", "different")) == ([], 0)
    assert tally.count("answers", "equal") > 0
    assert tally.count("kills", "killed") > 0
    assert soak.Tally(**json.loads((tmp_path / "kept.json").read_bytes())).seen == tally.seen


def test_the_service_answers_while_connections_are_held(forked: None) -> None:
    record = connections.run(300)
    assert record.tried > 100
    assert record.lost == []


def test_no_request_of_v2_costs_more_than_it_is_worth() -> None:
    record = v2.run(9)
    assert (record.tried, record.lost) == (11, [])  # with a good one, and their memory


def test_a_killed_run_resumes_to_the_same_weights() -> None:
    record = kills.run(1)
    assert (record.tried, record.lost) == (1, [])


def test_killed_and_rival_jobs_write_the_table_of_an_undisturbed_one() -> None:
    record = bulk.run(2)
    assert (record.tried, record.lost) == (2, [])


def test_damaged_and_hostile_archives_lose_no_image() -> None:
    record = archives.run(21)  # every damage of every archive
    assert (record.tried, record.lost) == (27, [])


def test_hostile_entries_of_lists_cost_no_good_image() -> None:
    record = lists.run(1)
    assert (record.tried, record.lost) == (1, [])
    assert "peak memory" in record.details


# The machinery


def test_a_long_load_that_was_cut_off_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was seen before is in the record, and no time is spent twice."""
    monkeypatch.setattr(soak, "BUILD", tmp_path)
    kept = soak.checkpoint(600)
    kept.parent.mkdir()
    tally = soak.Tally(600.0, samples=[[(float(t), 100.0 + t, 10, 3) for t in range(600)]])
    for event in (Event("answers", "equal"), Event("answers", "different", "other")):
        tally.add(event)
    for seconds in (0.005, 0.1):
        tally.add(Event("healthz", "200", None, seconds))
    kept.write_text(json.dumps(asdict(tally)))
    record = soak.run(600)
    assert (record.tried, record.survived) == (2, 1)
    assert any("memory grew" in sentence for sentence in record.lost)
    assert record.slowest_health == 0.1
    assert "p99 100 ms" in record.details
    assert not kept.exists()


def test_answers_differ_by_more_than_the_last_bits() -> None:
    before = {"a": [1.0, {"class": "x"}], "b": None}
    assert not differs(before, {"a": [1.0 + 1e-6, {"class": "x"}], "b": None})
    for other in (1.01, "1.0", None):
        assert differs(before, {"a": [other, {"class": "x"}], "b": None})
    assert differs(before, {"a": [1.0], "b": None})
    assert differs(before, {"a": [1.0, {"class": "y"}], "b": None})


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

    fake = {"headers": section("headers", []), "backbones": section("backbones", ["a: b"])}
    monkeypatch.setattr(attacks, "SECTIONS", fake)
    monkeypatch.setattr(attacks, "BUILD", tmp_path)
    monkeypatch.setattr("benchmarks.report.RESULTS", tmp_path)
    assert attacks.main(["--only", "headers"]) == 0
    assert attacks.main(["--only", "headers,backbones"]) == 1
    assert ran == ["headers", "backbones"]
    page = (tmp_path / "attacks.md").read_text()
    assert "| headers: " in page
    assert "| 5 | 4 | 1 |" in page
    assert "- a: b" in page
    assert attacks.main(["--quick", "--only", "headers"]) == 0
    assert (tmp_path / "attacks.md").read_text() == page
