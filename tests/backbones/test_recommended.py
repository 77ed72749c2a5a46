"""The facts about recommended backbones: counted anew from the architectures of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants
from tests.support.hubs import cached
from tests.support.paths import ROOT

from engram import load_backbone, random_backbone, save_backbone
from engram.backbones.recommended import RECOMMENDED, recommended

MODELS = {
    384: {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536},
    192: {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768},
    768: {},
}


def parameters_in_the_file(name: str) -> int:
    """Of the model that the Hub has under this name, as transformers makes it."""
    backbone = recommended(name)
    assert backbone is not None
    size = {**MODELS[backbone.config.width], "patch_size": backbone.config.patch}
    with torch.device("meta"):
        if name.startswith("dinov2"):
            model = transformers.Dinov2Model(transformers.Dinov2Config(image_size=518, **size))
        elif backbone.config.head:
            config = transformers.ViTConfig(num_labels=1000, **size)
            model = transformers.ViTForImageClassification(config)
        else:
            model = transformers.ViTModel(transformers.ViTConfig(**size))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("backbone", RECOMMENDED, ids=lambda backbone: backbone.name)
def test_parameters_and_download_are_those_of_the_architecture(backbone: object) -> None:
    known = recommended(backbone.name)  # type: ignore[attr-defined]
    assert known is not None
    assert known.download == 4 * parameters_in_the_file(known.name)


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "backbones.md").read_text(encoding="utf-8")
    for backbone in RECOMMENDED:
        accuracy = f"{backbone.accuracy:.1f} %" if backbone.accuracy else "not run"
        row = (
            f"| `{backbone.name}` | `{backbone.repo}` | {backbone.parameters / 1e6:.1f} M "
            f"| about {backbone.download / 1e6:.0f} MB | {backbone.licence} | {accuracy} "
            f"| {backbone.about} |"
        )
        assert row in page


def test_the_accuracy_is_what_was_measured() -> None:
    """Of the folder that a backbone was in when `benchmarks.small` ran."""
    records = (ROOT / "benchmarks" / "results" / "small.jsonl").read_text(encoding="utf-8")
    runs = [run for run in map(json.loads, records.splitlines()) if not run["each"]]
    for name, folder in (("vit-tiny", "timm.safetensors"), ("dinov2-small", "dinov2_small")):
        backbone = recommended(name)
        own = [100 * run["test"] for run in runs if run["backbone"] == folder]
        assert backbone is not None
        assert backbone.accuracy == pytest.approx(sum(own) / len(own), abs=0.05)


def test_a_short_name_is_loaded_as_its_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = save_backbone(random_backbone(), "elsewhere")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert not RECOMMENDED[0].on_this_machine
    cached(tmp_path / "cache", RECOMMENDED[0].repo, {"config.json": files["config.json"]})
    assert not RECOMMENDED[0].on_this_machine  # half of a download
    cached(tmp_path / "cache", RECOMMENDED[0].repo, files)
    assert RECOMMENDED[0].on_this_machine
    assert load_backbone("dinov2-small").source == "facebook/dinov2-small"
    save_backbone(random_backbone(), "dinov2-small")
    assert (
        load_backbone("dinov2-small").source == "dinov2-small"
    )  # a folder of that name comes first
