"""Options of commands: written out, or made of settings, where a dataclass is flags and help."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import Field
from inspect import Parameter
from pathlib import Path
from typing import Any, TypeVar

import typer

from engram.errors import EngramError
from engram.util.documents import MAX_BYTES, parse_json, read_header

#: The panels of `--help`, in their order.
PANELS = ("Data", "Model", "Task", "Training", "Hub", "Resources", "Output")

N = TypeVar("N", int, float)


def argument(metavar: str, about: str, default: Any = ..., **others: Any) -> Any:
    """An argument of a command, which is required unless it has a default."""
    return typer.Argument(default, metavar=metavar, help=about, **others)


def option(panel: str | None, about: str, *names: str, default: Any = None, **others: Any) -> Any:
    """An option of a command, with its panel and line of `--help`; with `...` it is required."""
    return typer.Option(default, *names, help=about, rich_help_panel=panel, **others)


def switch(panel: str | None, about: str, name: str) -> Any:
    """An option that is off unless it is given."""
    return option(panel, about, name, default=False)


def out_option(about: str, metavar: str | None = None, default: Any = None) -> Any:
    """The option `-o`, which names what a command writes."""
    return option("Output", about, "-o", "--out", default=default, metavar=metavar)


def setting_flags(
    items: Iterable[Field[Any]], panel: str, defaults: Any = None
) -> Iterator[Parameter]:
    """A parameter for each setting, listed in this panel, unless the setting names another.

    The help shows the values of `defaults`, an instance of their class, in place of its own.
    """
    for item in items:
        about, choices = item.metadata["about"], item.metadata["choices"]
        default = item.default if defaults is None else getattr(defaults, item.name)
        notes = [", ".join(choices)] if choices else []
        called, kind = item.name.replace("_", "-"), item.metadata["kind"]
        kind = list[str] if kind is tuple else kind
        if kind is not bool and not (default in ("", ()) or default is None):
            shown = item.metadata["shown"] if default == item.default else default
            notes.append(f"default: {shown}")
        plain = kind is bool and not default
        flag = option(
            item.metadata["group"] or panel,
            help_line(about, *notes),
            f"--{called}/--no-{called}" if default is True else f"--{called}",
            default=False if plain else None,
            show_default=False,
            metavar=item.metadata["metavar"] or None,
            autocompletion=among(item.metadata["offers"]) if item.metadata["offers"] else None,
        )
        hint = kind if plain else kind | None
        yield Parameter(item.name, Parameter.KEYWORD_ONLY, default=flag, annotation=hint)


def help_line(about: str, *notes: str) -> str:
    """The help of a flag: what the setting is about as a sentence, with notes at its end."""
    note = f" ({'; '.join(notes)})" if notes else ""
    return f"{about[0].upper()}{about[1:]}{note}."


def place_in_help(parameter: Parameter) -> int:
    """The place of a parameter in `--help`: arguments, then the panels in their order."""
    if isinstance(parameter.default, typer.models.ArgumentInfo):
        return -1
    panel = getattr(parameter.default, "rich_help_panel", None)
    return PANELS.index(panel) if panel in PANELS else len(PANELS)


def take_given(values: dict[str, Any], items: Iterable[Field[Any]]) -> Iterator[tuple[str, Any]]:
    """Remove the values of these settings, and yield those that were given."""
    for item in items:
        value = values.pop(item.name)
        if value is not None:
            yield item.name, tuple(value) if isinstance(value, list) else value


def numbers(flag: str, given: str | float | Sequence[float] | None, kind: type[N]) -> list[N]:
    """The numbers of a flag, with commas between them; anything else is an EngramError.

    A recipe file gives one number, or a list.
    """
    parts = given if isinstance(given, list) else str("" if given is None else given).split(",")
    try:
        return [kind(part) for part in map(str, parts) if part.strip()]
    except ValueError:
        raise EngramError(
            f"{flag} is {given!r}; give numbers with commas between them, such as 1,5."
        ) from None


# Shell completion: it has to be quick, so nothing here imports torch


def among(values: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes to one of these values."""
    known = tuple(values)

    def complete(incomplete: str) -> list[str]:
        return [value for value in known if value.startswith(incomplete)]

    return complete


def task_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes to a task of the engrams and bundles that the command line names so far."""
    given = [ctx.params.get(name) for name in ("sources", "bundle")]
    lists = [one if isinstance(one, (list, tuple)) else [one] for one in [*given, ctx.args]]
    paths = [path for one in lists for path in one]
    names = {name for path in paths if path for name in _tasks_in(Path(path))}
    return sorted(name for name in names if name.startswith(incomplete))


def _tasks_in(path: Path) -> Iterator[str]:
    """The tasks that a bundle lists, or the one in an engram's header; unverified."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        if path.is_dir():
            with open(path / "bundle.json", "rb") as file:
                entries = parse_json(file.read(MAX_BYTES + 1))["engrams"]
            yield from (str(entry["task"]) for entry in entries)
        else:
            with open(path, "rb") as file:
                header = read_header(file)["__metadata__"]["engram"]
            yield str(parse_json(header.encode())["task"]["name"])
