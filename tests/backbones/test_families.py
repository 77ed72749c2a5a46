"""The table of families says what is read and what it was compared with, and no more."""

from __future__ import annotations

from safetensors import safe_open
from scripts.document_backbones import PAGE, written
from tests.support.backbones import FAMILIES as MODELS
from tests.support.backbones import RECORDS

from engram.backbones.configs import READABLE
from engram.backbones.families import BACKBONE_FAMILIES, TIMM, TIMM_VERSION, TRANSFORMERS
from engram.backbones.layouts import FAMILIES


def test_the_page_has_the_table_of_today() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page
    assert all(f"\n| {family.name} |" in page for family in BACKBONE_FAMILIES)


def test_every_model_type_that_is_read_is_in_the_table() -> None:
    assert {kind for family in BACKBONE_FAMILIES for kind in family.transformers} == set(FAMILIES)


def test_what_was_compared_has_a_model_to_compare_with() -> None:
    """By the first word of names: `dinov3` of `dinov3-gated`."""
    made = {name.split("-")[0] for name in (*MODELS, "mae")}
    recorded = {name.split("-")[0] for name in RECORDS}
    for family in BACKBONE_FAMILIES:
        name = family.name.lower().replace(" ", "").replace("-", "").replace("core", "")
        if TRANSFORMERS in family.compared_with:
            assert name in made or name == "dino"  # the tensors and layers of a ViT
        if TIMM in family.compared_with:
            assert name in recorded


def test_the_records_are_of_the_version_that_the_table_names() -> None:
    for path in RECORDS.values():
        with safe_open(path, "pt") as file:
            assert file.metadata()["timm"] == TIMM_VERSION


def test_refusals_name_all_families() -> None:
    assert [family.name in READABLE for family in BACKBONE_FAMILIES] == [True] * len(
        BACKBONE_FAMILIES
    )
