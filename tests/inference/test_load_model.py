"""A model from engrams: their backbone, with all of them attached in an order that works."""

import os
from pathlib import Path

import pytest
import torch

import engram
from engram import EngramError, MemoryViT, load_backbone, load_model
from engram.images.preprocessing import Preprocessing


@pytest.fixture
def engrams(small_backbone: Path, tmp_path: Path) -> list[Path]:
    """A child and its parent, in this order."""
    model = MemoryViT(load_backbone(small_backbone))
    for name, extends in (("parent", []), ("child", ["parent"])):
        torch.nn.init.normal_(model.add_task(name, 3, 2, extends=extends, seed=0).head.weight)
    return [model.save(name, tmp_path / f"{name}.safetensors") for name in ("child", "parent")]


def test_parents_are_attached_before_their_children(
    engrams: list[Path], small_backbone: Path
) -> None:
    model = load_model(engrams)
    assert list(model.tasks) == ["parent", "child"]
    assert not model.training
    other = MemoryViT(load_backbone(small_backbone)).eval()
    for path in reversed(engrams):
        other.attach(path)
    pixels = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        ours, theirs = model(pixels, exact=True), other(pixels, exact=True)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_bundle_is_enough(engrams: list[Path], tmp_path: Path) -> None:
    engram.compose(engrams, tmp_path / "bundle")
    assert list(load_model(tmp_path / "bundle").tasks) == ["parent", "child"]
    assert list(load_model(str(engrams[1])).tasks) == ["parent"]


def test_a_backbone_that_has_moved_is_given(
    engrams: list[Path], small_backbone: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere"
    os.symlink(small_backbone, moved)
    assert load_model(engrams, moved).backbone.source == str(moved)


def test_a_child_without_its_parent_is_a_sentence(engrams: list[Path]) -> None:
    with pytest.raises(EngramError, match="extends 'parent'"):
        load_model(engrams[:1])


def test_images_are_prepared_as_when_the_engrams_were_trained(
    small_backbone: Path, tmp_path: Path
) -> None:
    model = MemoryViT(load_backbone(small_backbone))
    model.backbone.preprocessing = Preprocessing((16, 16), None, "lanczos")
    model.add_task("t", 2)
    path = model.save("t", tmp_path / "t.safetensors")
    assert load_backbone(small_backbone).preprocessing != model.preprocessing
    assert load_model(path).preprocessing == model.preprocessing
