"""The table of families on the page says what is read and what it was compared with."""

from __future__ import annotations

import re

from safetensors import safe_open
from tests.support.backbones import FAMILIES as MODELS
from tests.support.backbones import RECORDS
from tests.support.paths import ROOT

from engram.backbones.configs import READABLE
from engram.backbones.layouts import FAMILIES

PAGE = (ROOT / "docs" / "backbones.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("| family |")[2].partition("\n\n")[0].splitlines()[2:]
]


def test_every_model_type_that_is_read_is_in_the_table() -> None:
    listed = {kind for _, kinds, *_ in ROWS for kind in re.findall(r"`(\w+)`", kinds)}
    assert listed == set(FAMILIES)


def test_what_was_compared_has_a_model_to_compare_with() -> None:
    """By the first word of names: `dinov3` of `dinov3-gated`."""
    made = {name.split("-")[0] for name in (*MODELS, "mae")}
    recorded = {name.split("-")[0] for name in RECORDS}
    for family, *_, compared_with in ROWS:
        name = family.lower().replace(" ", "").replace("-", "").replace("core", "")
        assert compared_with
        if "transformers" in compared_with:
            assert name in made or name == "dino"  # the tensors and layers of a ViT
        if "timm" in compared_with:
            assert name in recorded


def test_the_records_are_of_the_version_that_the_table_names() -> None:
    versions = set(re.findall(r"timm ([\d.]+)", " ".join(row[-1] for row in ROWS)))
    for path in RECORDS.values():
        with safe_open(path, "pt") as file:
            assert {file.metadata()["timm"]} == versions


def test_refusals_name_all_families() -> None:
    assert READABLE.replace(" and ", ", ").split(", ") == [family for family, *_ in ROWS]
