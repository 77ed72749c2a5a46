"""The reference leaves nothing out: every public name, every command, every flag."""

import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts.document_reference import written
from tests.support.paths import ROOT

import engram

REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

ALSO = (
    "list",
    "data.load",
    "data.Splits",
    "data.Dataset",
    "data.Loader",
    "images.Preprocessing",
    "images.normalise",
    "export.export_onnx",
    "export.export_torch",
    "export.export_web",
    "export.OnnxModel",
    "store.legacy.convert",
    "tasks.costs.task_costs",
)


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "document_commands", ROOT / "scripts" / "document_commands.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_in_the_reference() -> None:
    listed = set(re.findall(r"^::: engram\.(\S+)$", REFERENCE, re.MULTILINE))
    assert {*engram.__all__, *ALSO} - listed == set()


def test_the_page_lists_every_name_in_words_of_today() -> None:
    """The page is also read where there is no site: in an editor, or in a clone's web view."""
    same = written(REFERENCE) == REFERENCE
    assert same, "run python scripts/document_reference.py"
    assert "| `engram.fit(model, name, data, …)` | Train" in REFERENCE


def test_members_that_the_reference_lists_exist() -> None:
    lists = re.findall(
        r"^::: engram\.(\S+)\n    options:\n      members: \[(.+)\]", REFERENCE, re.M
    )
    assert len(lists) >= 5
    members = [f"{name}.{member}" for name, found in lists for member in found.split(", ")]
    assert [name for name in members if not reached(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_that_a_page_writes_can_be_reached(page: Path) -> None:
    text = re.sub(r"^from engram\S* import", "", page.read_text(encoding="utf-8"), flags=re.M)
    written = set(re.findall(r"(?<![\w./-])engram\.([A-Za-z_][\w.]*\w)", text))
    assert [name for name in sorted(written) if name != "json" and not reached(name)] == []


def reached(name: str) -> bool:
    """Whether the name can be typed as it is written after `import engram`."""
    thing: Any = engram
    for part in name.split("."):
        if not hasattr(thing, part):
            return False
        thing = getattr(thing, part)
    return True


def test_every_command_is_in_the_reference(hook: ModuleType) -> None:
    missing = [name for name, _ in hook.found() if f"`engram {name}" not in COMMANDS]
    assert missing == []


def test_the_site_lists_every_flag(hook: ModuleType) -> None:
    page = hook.on_page_markdown(COMMANDS)
    sections = dict(re.findall(r"^## engram (.+?)\n(.+?)(?=^## |\Z)", page, re.M | re.S))
    for name, command in hook.found():
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name != "help":
                for flag in parameter.opts:
                    assert f"`{flag}`" in sections[name], f"engram {name} {flag}"
    assert "| `--epochs` | Passes over the training images" in sections["fit"]
    assert "| `30` |" in sections["fit"]


def test_the_site_lists_every_setting_of_a_recipe(hook: ModuleType) -> None:
    page = hook.on_page_markdown(REFERENCE)
    assert [item.name for item in fields(engram.Recipe) if f"| `{item.name}` |" not in page] == []
    assert "| `epochs` | `30` | passes over the training images" in page


def test_a_page_without_the_place_stays_as_it_is(hook: ModuleType) -> None:
    assert hook.on_page_markdown("# A page", page=None, config=None, files=None) == "# A page"
