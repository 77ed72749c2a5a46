"""A dataclass becomes flags: their defaults, choices, types and panels."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

import pytest
import typer
from tests.support.commands import Output, run
from typer.testing import CliRunner

from engram import EngramError
from engram.cli.flags import PANELS, numbers, option
from engram.cli.shared import command
from engram.methods import METHODS
from engram.methods.method_flags import REGIMES, MethodFlags
from engram.util.settings import Given, setting


@dataclass(frozen=True)
class Oven:
    mode: str = setting("fan", "how it heats", choices=("fan", "grill"))
    minutes: int = setting(30, "how long it is on", group="Output")
    degrees: float = setting(180.0, "how hot it gets")
    clean: bool = setting(False, "clean it first")
    dishes: tuple[str, ...] = setting((), "what is in it; repeatable", metavar="DISH")
    shelf: int | None = setting(None, "which shelf to use")


@dataclass(frozen=True)
class Kitchen:
    name: str = setting("home", "where it is")


@pytest.fixture
def seen() -> list[Given]:
    return []


def app_of(seen: list[Given], defaults: Any = None) -> typer.Typer:
    app = typer.Typer(rich_markup_mode="rich")

    @command("bake", {Oven: "Training", Kitchen: "Data"}, defaults, group=app)
    def bake(
        recipe: str = typer.Argument(),
        task: str = option("Task", "What to bake.", "--task", default="cake"),
        *,
        flags: Given,
    ) -> None:
        """Bake."""
        seen.append(flags)

    return app


def bake(seen: list[Given], *arguments: str) -> Given:
    result = CliRunner().invoke(app_of(seen), ["cake", *arguments])
    assert result.exit_code == 0, result.output
    return seen[-1]


def help_of(seen: list[Given], defaults: Any = None) -> str:
    result = CliRunner().invoke(app_of(seen, defaults), ["--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    return result.output


def test_only_what_was_given_arrives(seen: list[Given]) -> None:
    given = bake(seen, "--minutes", "45", "--name", "away")
    assert given == {Oven: {"minutes": 45, "clean": False}, Kitchen: {"name": "away"}}
    assert Oven(**given[Oven]) == Oven(minutes=45)
    assert bake(seen)[Kitchen] == {}


def test_flags_have_the_types_of_their_fields(seen: list[Given]) -> None:
    arguments = [
        "--degrees",
        "20",
        "--clean",
        "--dishes",
        "pie",
        "--dishes",
        "soup",
        "--shelf",
        "2",
        "--mode",
        "grill",
    ]
    oven = Oven(**bake(seen, *arguments)[Oven])
    assert oven == Oven("grill", 30, 20.0, True, ("pie", "soup"), 2)
    assert isinstance(oven.degrees, float)
    refused = CliRunner().invoke(app_of(seen), ["cake", "--minutes", "long"])
    assert refused.exit_code == 2


def test_the_help_says_the_default_and_the_choices(seen: list[Given]) -> None:
    text = " ".join(help_of(seen).split())
    assert "How it heats (fan, grill; default: fan)." in text
    assert "How long it is on (default: 30)." in text
    assert "Clean it first." in text  # of a flag that is off there is nothing to say
    assert "Which shelf to use." in text
    assert re.search(r"--dishes +DISH", text)


def test_the_help_shows_the_defaults_of_an_instance() -> None:
    @dataclass(frozen=True)
    class Both(Oven, Kitchen):
        pass

    text = " ".join(help_of([], Both(minutes=5, name="away")).split())
    assert "How long it is on (default: 5)." in text
    assert "Where it is (default: away)." in text


def panels(text: str) -> dict[str, str]:
    """The panels of a help text, with what each lists."""
    parts = re.split(r"╭─ (\w+) ─+╮\n", text)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_a_setting_is_in_the_panel_of_its_class_or_its_own(seen: list[Given]) -> None:
    shown = panels(help_of(seen))
    assert [name for name in shown if name in PANELS] == ["Data", "Task", "Training", "Output"]
    assert "--name" in shown["Data"]
    assert "--task" in shown["Task"]
    assert "--mode" in shown["Training"]
    assert "--minutes" in shown["Output"]


@pytest.mark.parametrize("command", ["fit", "sweep"])
def test_panels_come_in_one_order(
    command: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(command, "--help") == 0
    shown = panels(capsys.readouterr().out)
    named = [name for name in shown if name not in ("Arguments", "Options")]
    assert named == ["Data", "Task", "Training", "Resources", "Output"]


# Lists with commas


def test_numbers_are_split_at_commas() -> None:
    assert numbers("--lr", "0.1,1e-3, 2", float) == [0.1, 0.001, 2.0]
    assert numbers("--cells", "", int) == []
    with pytest.raises(EngramError, match=r"--cells is '1\.5'; give numbers with commas between"):
        numbers("--cells", "1.5", int)


def test_the_flags_that_are_known_without_torch_are_those_of_the_methods() -> None:
    assert [method for method in METHODS if method in REGIMES] == list(REGIMES)
    own = [item for name in REGIMES for item in fields(METHODS[name]) if item.metadata["flag"]]
    known = {item.name: (item.type, item.default, item.metadata) for item in fields(MethodFlags)}
    assert {item.name: (item.type, item.default, item.metadata) for item in own} == known
