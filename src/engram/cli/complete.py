"""Shell completion. It has to be quick, so nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import typer

from engram.util.documents import MAX_BYTES, parse_json, read_header


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
