"""The package is laid out as docs/architecture.md says, and stays easy to find one's way in."""

import ast
import io
import re
import tokenize
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
from tests.support.paths import ROOT

PACKAGE = ROOT / "src" / "engram"
MODULES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({module.parent for module in MODULES})
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")

MOST_LINES = 400
ALIKE = 6  # lines of code that two places may not share


def docstring(module: Path) -> str:
    return ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_folder_says_what_it_is_for(folder: Path) -> None:
    assert (folder / "__init__.py").is_file()
    assert len(docstring(folder / "__init__.py").split()) >= 12


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_is_short_or_says_why_not(module: Path) -> None:
    lines = len(module.read_text(encoding="utf-8").splitlines())
    reason = re.search(r"^Long because ", docstring(module), re.MULTILINE)
    assert lines <= MOST_LINES or reason, f"{lines} lines: split it, or state 'Long because …'"


def test_no_code_is_there_twice() -> None:
    assert "\n".join(repeated(MODULES)) == ""


def test_the_page_shows_the_layers_in_their_order() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    shown = [name.removesuffix(".py") for name in re.findall(r"^\| `([a-z_.]+)/?` \|", PAGE, re.M)]
    assert shown == [layer for layer in contract["layers"] if layer != "__main__"]


def test_the_docstring_of_the_package_shows_the_same_map() -> None:
    shown = re.findall(r"^    ([a-z_.]+)  ", docstring(PACKAGE / "__init__.py"), re.M)
    assert shown == [name.rstrip("/") for name in re.findall(r"^\| `([a-z_./]+)` \|", PAGE, re.M)]


def test_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"(?<![\w/])((?:[a-z_]+/)+(?:[a-z_]+\.py)?|[a-z_]+\.py)\b", PAGE))
    places = (PACKAGE, ROOT, PACKAGE.parent)
    assert [name for name in sorted(named) if not any((p / name).exists() for p in places)] == []


def repeated(modules: list[Path], alike: int = ALIKE) -> list[str]:
    """Places that share so many lines of code in a row: neither comments, docstrings nor imports.

    Lines without a letter, such as a closing bracket, do not count as shared.
    """
    seen: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for module in modules:
        code = code_lines(module.read_text(encoding="utf-8"))
        for i in range(len(code) - alike + 1):
            window = code[i : i + alike]
            place = f"{module.parent.name}/{module.name}:{window[0][0]}"
            seen[tuple(text for _, text in window)].append(place)
    return [" = ".join(places) for places in seen.values() if len(places) > 1]


def code_lines(source: str) -> list[tuple[int, str]]:
    """Lines of code with their numbers, without what is no code or says nothing by itself."""
    tree = ast.parse(source)
    left_out: set[int] = set()
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, (ast.Import, ast.ImportFrom)):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: dict[int, list[str]] = defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            lines[token.start[0]].append(token.string)
    return [
        (number, " ".join(parts).strip())
        for number, parts in sorted(lines.items())
        if number not in left_out and re.search(r"[A-Za-z]", " ".join(parts))
    ]


def test_repetition_is_found(tmp_path: Path) -> None:
    body = "".join(f"    x{i} = {i}  # comment\n" for i in range(ALIKE - 1))
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text(f'"""Doc."""\nimport os\n\ndef f():\n{body}\n    return x0\n')
    second.write_text(f"import os\n\ndef g():\n    '''Doc.'''\n{body}    # other\n    return x0\n")
    (found,) = repeated([first, second])
    assert re.fullmatch(r"\S+/first.py:5 = \S+/second.py:5", found)
    second.write_text(f"def g():\n{body}    return x1\n")
    assert repeated([first, second]) == []
