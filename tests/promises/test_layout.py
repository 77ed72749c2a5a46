"""Whoever looks for something in the package is told where it is, and what is told is true."""

import ast
import re
from pathlib import Path

from tests.support.paths import ROOT

PACKAGE = ROOT / "src" / "engram"


def test_every_folder_says_what_it_is_for() -> None:
    def words(folder: Path) -> int:
        source = (folder / "__init__.py").read_text(encoding="utf-8")
        return len((ast.get_docstring(ast.parse(source)) or "").split())

    folders = sorted({module.parent for module in PACKAGE.rglob("*.py")})
    assert [str(folder.relative_to(ROOT)) for folder in folders if words(folder) < 12] == []


def test_files_that_the_map_names_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w/])((?:[a-z_]+/)+(?:[a-z_]+\.py)?|[a-z_]+\.py)\b", page))
    places = (PACKAGE, ROOT, PACKAGE.parent)
    assert [name for name in sorted(named) if not any((p / name).exists() for p in places)] == []
