"""Pages: HTML from Jinja2 templates, in which every value is escaped, and what goes with it."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined


def render(package: str, template: str, **values: Any) -> str:
    """Fill a template from the folder `templates` of a package, or from `util/page`."""
    return _environment(package).get_template(template).render(values)


def page_files(package: str) -> dict[str, bytes]:
    """Scripts and styles by name: those that pages share, and the folder `page` of a package."""
    found = [file for name in ("engram.util", package) for file in (files(name) / "page").iterdir()]
    kept = [file for file in found if file.name.endswith((".css", ".js"))]
    return {file.name: file.read_bytes() for file in sorted(kept, key=lambda file: file.name)}


@cache
def _environment(package: str) -> Environment:
    return Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("engram.util", "page")]),
        autoescape=True,
        undefined=StrictUndefined,  # a misspelt name is an error, not an empty place
        trim_blocks=True,
        lstrip_blocks=True,
    )
