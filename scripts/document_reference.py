"""Write the list of all names into docs/reference.md, which is then readable without the site.

python scripts/document_reference.py
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
PLACE = re.compile(r"(?<=<!-- names -->\n\n).*?(?=\n\n<!-- end of names -->)", re.DOTALL)
NAME = re.compile(
    r"^::: (\S+)(?:\n    options:(?:\n      .+)*?\n      members: \[(.+)\])?", re.MULTILINE
)


def names_table(page: str) -> str:
    """The names of the page with their arguments and the first sentence of their docstrings."""
    rows = ["| name | what it is or does |", "|---|---|"]
    for name, members in NAME.findall(page):
        thing = _found(name)
        rows.append(_row(name, thing))
        for member in members.split(", ") if members else ():
            rows.append(_row(f"{name.rpartition('.')[2]}.{member}", getattr(thing, member)))
    return "\n".join(rows)


def _found(name: str) -> Any:
    """What a dotted name means; the longest beginning that is a module is imported."""
    parts = name.split(".")
    thing: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(thing, part):
            importlib.import_module(".".join(parts[:i]))
        thing = getattr(thing, part)
    return thing


def _row(name: str, thing: Any) -> str:
    text = " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())
    return f"| `{name}{_arguments(thing)}` | {text.replace('|', '&#124;')} |"


def _arguments(thing: Any) -> str:
    """The arguments that have to be given, and … if there are others."""
    if not callable(thing) or (isinstance(thing, type) and issubclass(thing, Exception)):
        return ""
    parameters = list(inspect.signature(thing).parameters.values())
    needed = [
        one.name
        for one in parameters
        if one.default is one.empty
        and one.name != "self"
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    others = len(needed) < len([one for one in parameters if one.name != "self"])
    return f"({', '.join([*needed, *(['…'] if others else [])])})"


def written(page: str) -> str:
    """The page with the list of today."""
    return PLACE.sub(lambda _: names_table(page), page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
