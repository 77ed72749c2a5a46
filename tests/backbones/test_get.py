"""`engram backbones get`: what is fetched can be loaded, or a sentence says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.support.hubs import cached

from engram import EngramError, random_backbone, save_backbone
from engram.backbones.load import get_backbone

WEIGHTS = "weights/vit_tiny_patch16_224/timm.safetensors"
TINY = "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_recommended_backbone_is_what_its_name_stands_for(assets: Path, cache: Path) -> None:
    files = {"config.json": b'{"architecture": "vit_tiny_patch16_224"}'}
    cached(cache, TINY, {**files, "model.safetensors": (assets / WEIGHTS).read_bytes()})
    backbone, folder = get_backbone("vit-tiny")
    assert backbone.source == TINY
    assert (folder / "model.safetensors").is_file()


def test_another_model_under_its_name_is_refused(cache: Path, tmp_path: Path) -> None:
    own = save_backbone(random_backbone(), tmp_path / "own")
    cached(cache, TINY, {file.name: file.read_bytes() for file in own.iterdir()})
    with pytest.raises(EngramError, match="5,717,416 were expected"):
        get_backbone("vit-tiny")


def test_a_damaged_download_is_refused(assets: Path, cache: Path) -> None:
    half = (assets / WEIGHTS).read_bytes()[:1_000_000]
    files = {"config.json": b'{"architecture": "vit_tiny_patch16_224"}', "model.safetensors": half}
    cached(cache, TINY, files)
    with pytest.raises(EngramError, match="damaged or incomplete"):
        get_backbone("vit-tiny")


def test_any_hub_id_can_be_fetched(cache: Path, tmp_path: Path) -> None:
    own = save_backbone(random_backbone(), tmp_path / "own")
    cached(cache, "ann/vit", {file.name: file.read_bytes() for file in own.iterdir()})
    for name in ("ann/vit", "hf:ann/vit", "ann/vit@main"):
        assert get_backbone(name)[0].source == name.removeprefix("hf:")


def test_what_cannot_be_fetched_is_a_sentence(cache: Path) -> None:
    with pytest.raises(EngramError, match="nor one of dinov2-small, dinov2-base"):
        get_backbone("dinov3")
    with pytest.raises(EngramError, match="comes with the package"):
        get_backbone("pico")
    with pytest.raises(EngramError, match="not completely in the cache"):
        get_backbone("dinov2-small")
