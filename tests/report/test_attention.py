"""Which tasks have attention maps, of which images, and what is said where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.reports import answered, model_with, noise, write_page

import engram
from engram.inference.evaluate import Answers, answers
from engram.methods.attention_maps import SOURCES
from engram.model import MemoryViT
from engram.report.contents import AttentionShares, ImageTable, Text
from engram.report.task_section import MAX_EXAMPLES, attention_sections


@pytest.mark.parametrize("regime", ["head", "memory", "side"])
def test_only_a_task_with_class_tokens_for_its_masks_has_maps(regime: str, tmp_path: Path) -> None:
    model, found = answered(noise(4, kind="segmentation"), regime=regime)
    _, page = write_page(tmp_path / "r.html", model, found)
    assert "masks-t" in page.ids
    assert "attention-t" not in page.ids


def test_maps_are_of_the_first_correct_image_of_each_class() -> None:
    data = noise(12, "abc")
    labels = torch.from_numpy(data.labels)
    logits = torch.nn.functional.one_hot(labels, 3).float()
    logits[[0, 1, 3]] = torch.tensor([0.0, 0.0, 1.0])  # images 0 and 3 of a, 1 of b: taken for c
    given = Answers("t", data, logits, labels, torch.arange(12), ())
    maps = attention_sections(model_with("abc"), given)[0].contents[0]
    assert isinstance(maps, ImageTable)
    assert [row.label for row in maps.rows] == ["a", "b", "c"]
    assert len(maps.rows) <= MAX_EXAMPLES
    assert all(len(row.images) == len(maps.columns) for row in maps.rows)
    one = attention_sections(model_with("abc"), given)
    assert one[0].key == "attention-t"


def test_shares_of_a_layer_add_up() -> None:
    model, found = answered(noise(4, "ab"))
    shares = attention_sections(model, found)[1].contents[0]
    assert isinstance(shares, AttentionShares)
    assert [layer.layer for layer in shares.layers] == list(
        range(1, model.backbone.config.depth + 1)
    )
    for layer in shares.layers:
        assert sum(share for _, share in layer.shares) == pytest.approx(1, abs=1e-5)
        assert [part for part, _ in layer.shares] == [0, 1, 2, 3]  # it extends nothing
    assert shares.parts == SOURCES


@pytest.mark.parametrize("regime", ["side", "side+readout"])
def test_side_patches_have_one_map_of_what_is_pooled(regime: str) -> None:
    model, found = answered(noise(4, "ab"), regime=regime)
    (only,) = attention_sections(model, found)
    maps = only.contents[0]
    assert isinstance(maps, ImageTable)
    assert maps.columns == ("image", "pooled")
    assert all(len(row.images) == 2 for row in maps.rows)
    assert "weight is on patches" in maps.note


def test_a_readout_shows_the_attention_of_the_vit_as_a_head_does() -> None:
    data = noise(4, "ab")
    tables = []
    for regime in ("head", "readout"):
        maps = attention_sections(*answered(data, regime=regime))[0].contents[0]
        assert isinstance(maps, ImageTable)
        tables.append(maps)
    assert tables[0].columns == tables[1].columns
    assert [row.images for row in tables[0].rows] == [row.images for row in tables[1].rows]


def test_without_a_class_token_the_page_says_why_there_are_no_maps() -> None:
    model = MemoryViT(engram.random_backbone(class_token=False, prefix_positions=0, classes=0))
    model.add_task("t", ["a", "b"], regime="head")
    (only,) = attention_sections(model, answers(model.eval(), noise(2, "ab"), "t", workers=0))
    assert only.key == "attention-t"
    assert isinstance(only.contents[0], Text)
    assert "no class token" in only.contents[0].text
