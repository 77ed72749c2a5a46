"""How fast a backbone is here, estimated from one of its layers. The clock is replaced: no test is
timed, and what a layer takes is not the point."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from engram import random_backbone
from engram.backbones.shape import BackboneShape
from engram.experiments import backbone_table
from engram.experiments.backbone_table import estimated_speed
from engram.tasks.costs import backbone_macs

CONFIG = random_backbone(image_size=32, patch=8, width=64, depth=2, heads=4).config


@pytest.fixture(autouse=True)
def _a_layer_takes_a_tenth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(backbone_table.time, "perf_counter", lambda: 0.1 * next(ticks))


def test_a_whole_pass_takes_as_much_longer_as_it_computes_more() -> None:
    one, whole = (
        backbone_macs(BackboneShape.of(replace(CONFIG, depth=d)), (32, 32)) for d in (1, 2)
    )
    alone = estimated_speed(replace(CONFIG, depth=1, head=None), 32)
    assert estimated_speed(CONFIG, 32) == pytest.approx(alone * one / whole, rel=0.02)


def test_twice_the_depth_is_half_the_speed() -> None:
    shallow, deep = (estimated_speed(replace(CONFIG, depth=d), 32) for d in (100, 200))
    assert shallow / deep == pytest.approx(2, rel=0.02)
