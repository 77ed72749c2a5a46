"""`engram backbones` answers without a network."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.support.commands import Output, assert_refused, document, run
from tests.support.hubs import cached

from engram import random_backbone, save_backbone


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_list_has_what_one_chooses_by(cache: Path, capsys: Output) -> None:
    cached(cache, "facebook/dinov2-base", {"config.json": b"{}", "model.safetensors": b""})
    assert run("backbones", "--json") == 0
    backbones = {backbone["name"]: backbone for backbone in document(capsys)["backbones"]}
    assert [name for name, backbone in backbones.items() if backbone["on_this_machine"]] == [
        "dinov2-base",
        "pico",
    ]
    small = backbones["dinov2-small"]
    assert (small["source"], small["licence"]) == ("facebook/dinov2-small", "Apache-2.0")
    assert (small["parameters"], small["download"]) == (22_056_192, 88_226_304)
    assert (
        backbones["vit-tiny"]["images_per_second"]
        > backbones["dinov2-base"]["images_per_second"]
        > 0
    )


def test_get_checks_what_it_fetched(cache: Path, capsys: Output) -> None:
    folder = save_backbone(random_backbone(), "own")
    cached(cache, "ann/vit", {file.name: file.read_bytes() for file in folder.iterdir()})
    assert run("backbones", "get", "ann/vit", "--json") == 0
    found = document(capsys)
    assert found["source"] == "ann/vit"
    assert Path(found["folder"], "model.safetensors").is_file()
    assert run("backbones", "get", "ann/vit") == 0
    assert "fit photos --task NAME --backbone ann/vit" in capsys.readouterr().out


def test_get_refuses_with_a_sentence(capsys: Output) -> None:
    code = run("backbones", "get", "dinov3", "--json")
    assert_refused("'dinov3' is neither", code, capsys)
