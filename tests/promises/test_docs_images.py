"""The pictures of the documentation are those that its script draws, and say what Table 1 says."""

import importlib.util
import xml.etree.ElementTree
from types import ModuleType

import pytest
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_docs", ROOT / "scripts" / "draw_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_up_to_date(script: ModuleType) -> None:
    for name, draw in script.PICTURES.items():
        drawn = draw()
        xml.etree.ElementTree.fromstring(drawn)
        assert (script.IMAGES / name).read_text(encoding="utf-8") == drawn, name


def test_the_matrix_is_table_1(script: ModuleType) -> None:
    for extends, expected in ((False, "111100000000"), (True, "111100000000")):
        for reader in ("patch", "CLS"):
            assert row(script, reader, extends) == expected
    assert row(script, "C₁", False) == row(script, "C₁", True) == "111110111000"
    assert row(script, "C₂", False) == "111101000111"
    assert row(script, "C₂", True) == "111111111111"


def row(script: ModuleType, reader: str, extends: bool) -> str:
    return "".join(str(int(script.reads(reader, read, extends))) for read in script.COLUMNS)
