"""Tests mirror the package, so that whoever opens a module finds its tests."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.paths import ROOT

PACKAGE, TESTS = ROOT / "src" / "engram", ROOT / "tests"
#: Modules in which there is nothing to run.
DECLARATIONS = {Path("util/description.py")}
#: Folders of tests that are about no folder of the package.
OTHERS = {"benchmarks", "deploy", "promises", "support"}


def modules() -> Iterator[Path]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name not in ("__init__.py", "__main__.py"):
            yield path.relative_to(PACKAGE)


def files_of_tests() -> Iterator[Path]:
    yield from sorted(path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))


@pytest.mark.parametrize("module", sorted(set(modules()) - DECLARATIONS), ids=str)
def test_a_module_has_tests_of_its_own(module: Path) -> None:
    assert (TESTS / module.with_name(f"test_{module.name}")).is_file()


@pytest.mark.parametrize("path", [p for p in files_of_tests() if p.parts[0] not in OTHERS], ids=str)
def test_a_test_file_is_about_a_module(path: Path) -> None:
    """Or about a folder."""
    folder, name = PACKAGE / path.parent, path.stem.removeprefix("test_")
    places = (folder / f"{name}.py", folder / name, folder / f"__{name}__.py")
    assert name == folder.name or any(place.exists() for place in places)


def imported(path: Path) -> set[str]:
    """The modules that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def test_no_test_is_imported() -> None:
    """What tests share is in tests/support, or a fixture in a conftest.py."""
    wrong = {
        str(path.relative_to(TESTS)): sorted(names)
        for path in sorted(TESTS.rglob("*.py"))
        if (names := {n for n in imported(path) if is_test(n)})
    }
    assert wrong == {}


def is_test(module: str) -> bool:
    return module.split(".")[0] == "tests" and not module.startswith("tests.support")
