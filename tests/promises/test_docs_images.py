"""The pictures of the documentation are those that its script draws, and say what Table 1 says."""

import xml.etree.ElementTree

from scripts import draw_docs


def test_the_pictures_are_up_to_date() -> None:
    for name, draw in draw_docs.PICTURES.items():
        drawn = draw()
        xml.etree.ElementTree.fromstring(drawn)
        assert (draw_docs.IMAGES / name).read_text(encoding="utf-8") == drawn, name


def test_the_matrix_is_table_1() -> None:
    for extends, expected in ((False, "111100000000"), (True, "111100000000")):
        for reader in ("patch", "CLS"):
            assert row(reader, extends) == expected
    assert row("C₁", False) == row("C₁", True) == "111110111000"
    assert row("C₂", False) == "111101000111"
    assert row("C₂", True) == "111111111111"


def row(reader: str, extends: bool) -> str:
    return "".join(str(int(draw_docs.reads(reader, read, extends))) for read in draw_docs.COLUMNS)
