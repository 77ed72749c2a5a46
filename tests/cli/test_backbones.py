"""`engram backbones` answers without a network.

How fast a backbone is here is estimated from one of its layers. The clock is replaced: no test is
timed, and what a layer takes is not the point."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.support.commands import Output, assert_refused, document, run
from tests.support.hubs import cached

from engram import random_backbone, save_backbone
from engram.backbones.shape import BackboneShape
from engram.cli import backbone_commands as backbones
from engram.cli.backbone_commands import estimated_speed
from engram.tasks.costs import backbone_macs

CONFIG = random_backbone(image_size=32, patch=8, width=64, depth=2, heads=4).config


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


# Speed


@pytest.fixture
def tenths(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(backbones.time, "perf_counter", lambda: 0.1 * next(ticks))


@pytest.mark.usefixtures("tenths")
def test_a_whole_pass_takes_as_much_longer_as_it_computes_more() -> None:
    one, whole = (
        backbone_macs(BackboneShape.measure(replace(CONFIG, depth=d)), (32, 32)) for d in (1, 2)
    )
    alone = estimated_speed(replace(CONFIG, depth=1, head=None), 32)
    assert estimated_speed(CONFIG, 32) == pytest.approx(alone * one / whole, rel=0.02)


@pytest.mark.usefixtures("tenths")
def test_twice_the_depth_is_half_the_speed() -> None:
    shallow, deep = (estimated_speed(replace(CONFIG, depth=d), 32) for d in (100, 200))
    assert shallow / deep == pytest.approx(2, rel=0.02)
