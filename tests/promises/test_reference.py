"""The reference leaves nothing out: every public name, every command, every flag."""

import importlib.util
import re
from types import ModuleType

import pytest
from tests.support.paths import ROOT

import engram

REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")


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


@pytest.mark.parametrize("name", engram.__all__)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    assert re.search(rf"\bengram\.{name}\b", REFERENCE)


def test_every_command_is_in_the_reference(hook: ModuleType) -> None:
    missing = [name for name, _ in hook.found() if f"`engram {name}" not in REFERENCE]
    assert missing == []


def test_the_site_lists_every_flag(hook: ModuleType) -> None:
    page = hook.on_page_markdown((ROOT / "docs" / "commands.md").read_text(encoding="utf-8"))
    sections = dict(re.findall(r"^## engram (.+?)\n(.+?)(?=^## |\Z)", page, re.M | re.S))
    for name, command in hook.found():
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name != "help":
                for flag in parameter.opts:
                    assert f"`{flag}`" in sections[name], f"engram {name} {flag}"
    assert "| `--epochs` | Passes over the training images" in sections["fit"]
    assert "| `30` |" in sections["fit"]


def test_a_page_without_the_place_stays_as_it_is(hook: ModuleType) -> None:
    assert hook.on_page_markdown("# A page", page=None, config=None, files=None) == "# A page"
