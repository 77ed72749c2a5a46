"""What a pass gives is counted before it is computed, and kept as small as its answer needs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.serving import World

from engram.serve.catalogue import Catalogue, Snapshot
from engram.serve.outputs import (
    computed_values,
    fetch,
    forward_asked,
    forward_views,
    kept_values,
    logits_name,
    output_shape,
)
from engram.serve.service_settings import Settings
from engram.store.compose import compose

NAMES = ("first", "second", "multilabel", "regression", "segmentation", "thin", "layers", "both")


@pytest.fixture(scope="module")
def snapshot(world: World, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    folder: Path = tmp_path_factory.mktemp("outputs") / "bundle"
    compose([world.engrams[name] for name in NAMES], folder)
    return Catalogue.load(folder, Settings()).now


def views(count: int) -> list[torch.Tensor]:
    return [torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8) for _ in range(count)]


@pytest.mark.parametrize("embeds", [False, True])
def test_values_are_known_before_the_pass(snapshot: Snapshot, embeds: bool) -> None:
    names = ("base", *NAMES)
    computed = forward_views(snapshot, views(1), names, embeds)
    (kept,) = forward_asked(snapshot, views(1), [names], embeds)
    for name in names:
        assert embeds or computed_values(snapshot, [name]) == computed[name].numel()
        assert kept_values(snapshot, [name], embeds) == kept[name].numel()


def test_a_mask_is_kept_in_place_of_logits(snapshot: Snapshot) -> None:
    names = ["segmentation", logits_name("segmentation"), "first"]
    for asked in ([names] * 2, [names, ["first"]]):
        found = forward_asked(snapshot, views(2), asked, embeds=False)
        assert [list(one) for one in found] == asked
        mask, logits, _ = found[0].values()
        assert mask.dtype == torch.uint8
        assert (mask == logits.argmax(0)).all()
        assert mask.shape == output_shape(snapshot, "segmentation")


def test_an_image_does_not_keep_the_outputs_of_others(snapshot: Snapshot) -> None:
    asked = [["first", "segmentation", logits_name("segmentation")]] * 4
    for one in forward_asked(snapshot, views(4), asked, embeds=False):
        for output in one.values():
            assert output.untyped_storage().nbytes() == output.numel() * output.element_size()


def test_a_mask_of_logits_that_are_not_finite_is_none(snapshot: Snapshot) -> None:
    logits = torch.rand(2, 3, 16, 16)
    logits[1, 0, 0, 0] = torch.nan
    places = {"segmentation": [0, 1]}
    asked = [["segmentation"]] * 2
    good, bad = fetch(snapshot, {"segmentation": logits}, places, asked)
    assert good["segmentation"].shape == (16, 16)
    assert bad["segmentation"].isnan().all()
