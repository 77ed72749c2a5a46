"""benchmarks/speed: a whole run at tiny size, and that its pages say what was measured."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.benches import forked_commands, forked_services
from tests.support.nursery import Nursery

pytest.importorskip("matplotlib")

from benchmarks.paths import RESULTS, ROOT
from benchmarks.speed import busy, command, page, plots, processes, scale
from benchmarks.speed.__main__ import main, measurements, read
from benchmarks.speed.busy import SERVICE, SOLVING, STEP
from benchmarks.speed.growth import exponent
from benchmarks.speed.measure import SECTIONS, SIDE_STEP
from engram.cli import main as cli
from engram.experiments.bench import PLAIN

SECTION_TITLES = ("Targets", "Forward", "One training step", "Many variants",
                  "Side network and readouts", "The whole command", "Folds", "Beside other work",
                  "Memory of whole commands", "Start", "Growth")  # fmt: skip


STARTED: list[Sequence[str]] = []
BUSY: list[int] = []


def run_here(*arguments: str | Path, cache: Path) -> None:
    less = ("--epochs", "1") if arguments[0] == "fit" else ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGRAM_CACHE", str(cache))
        assert cli.main([str(one) for one in (*arguments, *less, "--json")]) == 0


def pass_here(backbone: str, folder: Path) -> float:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        command.main(backbone, str(folder))
    return float(printed.getvalue())


@contextlib.contextmanager
def nothing_busy(count: int) -> Iterator[None]:
    BUSY.append(count)
    yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Path:
    """A whole run; its processes are forks or calls, or left out if they only take time."""
    out = tmp_path_factory.mktemp("speed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "_run", STARTED.append)
        patch.setattr(processes, "subprocess", forked_commands(nursery))
        patch.setattr(command, "run_engram", run_here)
        patch.setattr(command, "_plain_pass", pass_here)
        patch.setattr(busy, "busy_threads", nothing_busy)
        for module in (busy, processes):
            patch.setattr(module, "Service", forked_services(nursery))
        assert main(["--plan", "tiny", "--out", str(out)]) == 0
    return out


@pytest.fixture
def found(run: Path) -> dict[str, Any]:
    return copy.deepcopy(read(measurements(run)))


def test_a_run_leaves_every_section_its_page_and_plots(run: Path, found: dict[str, Any]) -> None:
    assert found.keys() == SECTIONS.keys()
    text = (run / "speed.md").read_text()
    assert all(f"## {title}" in text for title in SECTION_TITLES)
    assert all(words in text for *_, words in page.TARGETS)
    assert found["forward"]["machine"]["processor"] in text
    assert f"few rounds: {', '.join(SECTIONS)}" in text  # nobody takes it for the real one
    for name in ("speed", "growth"):
        assert (measurements(run) / f"{name}.svg").read_text().rstrip().endswith("</svg>")


def test_memory_is_measured_in_a_process_of_its_own(found: dict[str, Any]) -> None:
    peaks = [row["peak"] for row in found["training"]["rows"] if "peak" in row]
    assert len(peaks) == 2
    assert all(isinstance(peak, int) for peak in peaks)


def test_an_interrupted_run_goes_on(run: Path, tmp_path: Path) -> None:
    kept = measurements(tmp_path)
    kept.mkdir()
    for name in SECTIONS:
        if name != "decoding":
            (kept / f"{name}.json").write_bytes((measurements(run) / f"{name}.json").read_bytes())
    before = (kept / "forward.json").read_bytes()
    assert main(["--plan", "tiny", "--out", str(tmp_path), "--resume"]) == 0
    assert (kept / "forward.json").read_bytes() == before
    assert (kept / "decoding.json").exists()
    assert (tmp_path / "speed.md").exists()


def test_one_section_alone_writes_no_page_without_the_others(tmp_path: Path) -> None:
    assert main(["--plan", "tiny", "--only", "decoding", "--out", str(tmp_path)]) == 0
    assert not (tmp_path / "speed.md").exists()
    assert main(["--only", "nothing", "--out", str(tmp_path)]) == 2


def test_the_same_numbers_make_the_same_files(run: Path, found: dict[str, Any]) -> None:
    before = (measurements(run) / "speed.svg").read_bytes()
    plots.draw(found, measurements(run))
    assert (measurements(run) / "speed.svg").read_bytes() == before
    assert page.page(found) == (run / "speed.md").read_text()


# What the page says about numbers


def row(what: str, ratio: float, **more: Any) -> dict[str, Any]:
    spread = {"low": ratio - 0.05, "high": ratio + 0.05, "seconds": ratio, "rounds": 5}
    return {"what": what, "ratio": ratio, "limit": None, "note": "", **spread, **more}


def test_targets_are_reached_missed_or_beyond_the_limit(found: dict[str, Any]) -> None:
    assert "| 10 tasks, batch 16 | 1.25 | not measured |" in page.page(found)  # another backbone
    found["forward"]["backbone"] = page.TARGET_BACKBONE
    found["forward"]["rows"] += [
        row("engram", 1.2, tasks=10, batch=16, limit=1.195),
        row("engram", 1.30, tasks=10, batch=1, limit=1.195),
        row("engram", 3.1, tasks=100, batch=16, limit=2.95),
        row("plain backbone", 1.0, tasks=0, batch=16),
    ]
    lines = {line.split("|")[1].strip(): line for line in page.page(found).splitlines()
             if line.startswith("| ")}  # fmt: skip
    assert lines["10 tasks, batch 16"].endswith("| reached |")
    assert lines["10 tasks, batch 1"].endswith("| **missed**, within the spread |")
    assert lines["100 tasks, batch 16"].endswith("by FLOPs it is 2.95 |")


def test_side_patches_readouts_and_the_command_have_targets(found: dict[str, Any]) -> None:
    text = page.page(found)
    assert "| 1,000 side tasks, batch 16 | 5 | not measured |" in text
    assert "`engram fit --regime auto`, the whole command, DINOv2-small | 3 | not" in text
    assert {row["tasks"] for row in found["side"]["rows"] if row["what"] == "side"} == {1, 3}
    assert all(row["limit"] >= 1 for row in found["side"]["rows"] if row["what"] == "readout")
    big = {"backbone": page.TARGET_BACKBONE}
    found["side"]["rows"] += [
        row("side", 4.9, tasks=1000, batch=16, limit=3.5, **big),
        row(SIDE_STEP, 0.2, tasks=1, batch=128, limit=0.008, **big),
    ]
    found["command"]["rows"].append(row("engram fit, auto", 5.5, backbone="ViT-Ti/16", batch=2000))
    lines = page.page(found).splitlines()
    assert "| 1,000 side tasks, batch 16 | 5 | 4.9 | 4.85 to 4.95 | 3.5 | reached |" in lines
    assert any(line.startswith("| a step of a side") and "missed" in line for line in lines)
    assert any("--regime auto" in line and line.endswith("| **missed** |") for line in lines)


def test_folds_are_measured_beside_one_share(found: dict[str, Any]) -> None:
    one, mean = found["folds"]["rows"]
    assert (one["what"], one["batch"], mean["what"]) == ("five folds, noise", 20, command.IN_FOLDS)
    assert one["ratio"] == mean["ratio"] > 0
    assert "| five folds, noise | 20 |" in page.page(found)


def test_side_and_the_command_can_be_measured_later(found: dict[str, Any]) -> None:
    assert [row["what"] for row in found["command"]["rows"]] == [
        PLAIN, "engram fit, masked", "engram fit, auto",
    ]  # fmt: skip
    later = ("busy", "memory", "start")
    for section in ("command", "folds", "side", "route", *later):
        del found[section]
    text = page.page(found)
    assert all(f"Not measured yet (`--only {section}`)." in text for section in later)
    for section in ("command", "folds"):
        assert f"Not measured yet: it needs the assets folder (`--only {section}`)." in text
    assert "Not measured yet (`--only side`)." in text
    assert "Not measured yet (`--only route`)." in text


def test_a_task_per_image_is_measured_beside_all_tasks(found: dict[str, Any]) -> None:
    rows = {row["what"]: row for row in found["route"]["rows"]}
    assert len(rows) == 6
    assert (
        rows["masked, one for each image"]["limit"] < rows["masked, all for every image"]["limit"]
    )
    assert "| 100 tasks, one asked of each image, batch 16 | 1.1 | not measured |" in page.page(
        found
    )


def test_rows_beside_other_work_have_their_time_alone_and_their_targets(
    found: dict[str, Any],
) -> None:
    rows = {row["what"]: row for row in found["busy"]["rows"]}
    assert rows.keys() >= {PLAIN, "3 side tasks", "3 masked tasks", STEP, SOLVING, SERVICE}
    assert all([one["busy"] for one in row["loads"]] == [0, 1, 2] for row in rows.values())
    lines = page.page(found).splitlines()
    assert any(line.startswith(f"| {STEP} |") and line.endswith("| 1.8 / 2.5 |") for line in lines)
    assert any(line.startswith("| 3 side tasks |") and line.endswith("| 1.60 |") for line in lines)


def test_busy_threads_are_processes_that_end(run: Path) -> None:
    assert set(BUSY) == {0, 1, 2}
    before = set(psutil.Process().children())
    with busy.busy_threads(2):
        started = set(psutil.Process().children()) - before
        assert len(started) == 2
    assert not any(process.is_running() for process in started)


def test_memory_and_start_are_of_whole_processes(found: dict[str, Any]) -> None:
    peaks = {row["what"]: row for row in found["memory"]["rows"]}
    assert peaks.keys() == {"engram fit", "engram predict --out", "engram serve"}
    assert all(row["peak"] >= row["own"] > 50e6 for row in peaks.values())
    assert found["start"]["rows"][0]["ratio"] == 1
    assert ("-m", "engram", "--help") in STARTED
    assert "| `engram --help` |" in page.page(found)


def test_a_lost_row_is_told_with_its_reason(found: dict[str, Any]) -> None:
    found["forward"]["rows"] = [
        row("plain backbone", 1.0, tasks=0, batch=1),
        row("engram", 1.2, tasks=1, batch=1, limit=1.02),
        row("separate models", 1.0, tasks=1, batch=1),
        row("straightforward", 1.4, tasks=1, batch=1),
    ]
    text = page.page(found)
    assert "to separate models (1.000 against 1.200): one separate model is the plain" in text
    assert "to straightforward (" not in text


# On paper


def test_the_tables_follow_from_the_measured_numbers(found: dict[str, Any]) -> None:
    found["forward"]["machine"]["threads"] = 2
    grown = found["growth"]["of"]["tasks"]
    grown["about"] = "any, batch 4"
    grown["plain_seconds"] = 2.0
    grown["points"] = [{"x": x, "seconds": 2.2 + 0.04 * x} for x in (1, 10, 100)]
    m = scale.measured(found)
    assert m.plain == pytest.approx(1.0)  # 2 s on 2 threads for 4 images
    assert m.tasks_fixed == pytest.approx(1.1)
    assert m.per_task == pytest.approx(0.02)
    text = scale.tables(found, scale.Job(images=3.6e6, tasks=100, cores=10, hours=10))
    assert "| `fixed + tasks * per_task` | 3,100 | 31 |" in text
    assert "| `tasks * plain` | 100,000 | 1,000 |" in text
    assert "32.3 times fewer machines" in text


def test_the_guide_keeps_its_words_and_gets_new_tables(found: dict[str, Any]) -> None:
    text = f"before\n{scale.BEGIN}\noutdated\n{scale.END}\nafter\n"
    once = scale.filled(text, found)
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert "outdated" not in once
    assert scale.filled(once, found) == once


def test_the_committed_pages_say_what_the_committed_numbers_say() -> None:
    kept = read(measurements(RESULTS))
    assert kept.keys() | page.LATER == SECTIONS.keys()
    assert (RESULTS / "speed.md").read_text(encoding="utf-8") == page.page(kept)
    guide = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert scale.filled(guide, kept) == guide
    assert json.loads((measurements(RESULTS) / "forward.json").read_text())["rows"]


def test_an_exponent_is_found_again() -> None:
    xs = [1, 2, 5, 10, 50, 200]
    assert exponent(xs, [3 * x**1.7 for x in xs]) == pytest.approx(1.7)
    assert exponent(xs, [4.0] * len(xs)) == pytest.approx(0)
    noisy = [x**2 * math.exp(0.01 * (-1) ** i) for i, x in enumerate(xs)]
    assert exponent(xs, noisy) == pytest.approx(2, abs=0.02)
