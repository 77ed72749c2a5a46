"""Progress: bars on a terminal, lines in a file, nothing for machines."""

import sys

import pytest
from tests.support.commands import Output
from tests.support.waiting import wait_until

from engram.cli import terminal as module
from engram.cli.terminal import bars

HOSTILE, SHOWN = "a\x1b[2J\u202eb\nc", r"a\x1b[2J\u202eb\nc"


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_machines_and_other_processes_see_nothing(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    for as_json, rank in ((True, "0"), (False, "1")):
        monkeypatch.setenv("RANK", rank)
        with bars(as_json) as progress:
            progress("training", 1, 2, "loss 0.5")
            progress.say([("backbone", "pico")])
    assert capsys.readouterr() == ("", "")


def test_a_file_gets_a_line_every_ten_seconds_and_at_the_end(capsys: Output, clock: Clock) -> None:
    with bars(False) as progress:
        progress("reading the data", 0, 0)
        progress.say([("backbone", "pico"), ("", "more")])
        progress("hashing", 0, 0)
        for step in range(1, 101):
            clock.now += 0.25
            progress("training", step, 100, f"loss {1 / step:.3f}")
        progress("training", 100, 100, "validating 5 of 5")  # is not said twice
        progress("writing the report", 0, 0)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "backbone  pico",
        "          more",
        "hashing",
        "training: 41 of 100, 4.0/s, 15 s left, loss 0.024",
        "training: 81 of 100, 4.0/s, 5 s left, loss 0.012",
        "training: 100 of 100, took 25 s, 4.0/s, loss 0.010",
        "writing the report",
    ]


def test_a_command_that_fails_or_ends_at_once_leaves_stderr_alone(
    capsys: Output, clock: Clock
) -> None:
    with bars(False) as progress:
        progress("loading", 0, 0)
        clock.now = 1.9
        progress("predicting", 3, 3)
    assert capsys.readouterr().err == ""


def test_a_long_silence_at_the_beginning_is_broken(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENCE", 0.05)
    with bars(False) as progress:
        progress("loading the tasks", 0, 0)
        said: list[str] = []
        wait_until(lambda: said.append(capsys.readouterr().err) or "".join(said).endswith("\n"))
    assert "".join(said) == "loading the tasks\n"


def test_work_that_stops_early_says_how_far_it_came(capsys: Output, clock: Clock) -> None:
    with bars(False) as progress:
        progress("training", 0, 100)
        clock.now = 4.0
        progress("training", 40, 100, "loss 0.1")
        progress("testing", 0, 10)
    assert capsys.readouterr().err.splitlines() == [
        "training: 40 of 100, 10.0/s, 6 s left, loss 0.1",
        "testing: 0 of 10",
    ]


def test_work_of_unknown_length_says_now_and_then_that_it_lives(
    capsys: Output, clock: Clock
) -> None:
    with bars(False) as progress:
        for second in range(0, 25, 5):
            clock.now = float(second)
            progress("measuring", 0, 0, f"round {second}")
    assert capsys.readouterr().err.splitlines() == [
        "measuring: round 10",
        "measuring: round 20",
    ]


def test_a_terminal_gets_bars(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with bars(False) as progress:
        progress("reading the data", 0, 0)
        progress.say([("backbone", "pico")])
        progress("training", 1, 2, "loss 0.5")
        progress("training", 2, 2, "loss 0.4")
    said = capsys.readouterr().err
    for text in ("starting", "reading the data", "backbone  pico", "training", "2/2", "loss 0.4"):
        assert text in said
    assert "reading the data" not in said[said.rindex("training") - 20 :]


def test_a_narrow_terminal_cuts_the_note_and_not_the_time(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    with bars(False) as progress:
        progress("hashing images", 100_000, 100_000)
        progress("training", 105, 105, f"loss 0.041, val balanced accuracy 80.00%, {'more ' * 20}")
    last = [line for line in capsys.readouterr().err.splitlines() if "training" in line][-1]
    for text in ("105/105", "00:00", "loss 0.041"):
        assert text in last
    assert last.rstrip().endswith("…")


@pytest.mark.parametrize("terminal", [True, False])
def test_names_are_shown_and_not_obeyed(
    terminal: bool, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(module, "SILENCE", 0.0)
    with bars(False) as progress:
        progress(f"[red]{HOSTILE}", 1, 1, f"[red]{HOSTILE}")
        progress.say([(f"[red]{HOSTILE}", "x")])
    said = capsys.readouterr().err
    assert "\u202e" not in said
    assert said.count(f"[red]{SHOWN}") >= 3
