"""How fast a trunk is here, estimated from one of its layers."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from engram import random_trunk
from engram.experiments.trunk_table import estimated_speed


def test_the_estimate_is_near_the_speed_of_a_whole_pass() -> None:
    trunk = random_trunk(image_size=64, patch=8, width=128, depth=6, heads=4, classes=0)
    pixels, times = torch.zeros(2, 3, 64, 64), []
    with torch.inference_mode():
        for _ in range(20):
            start = time.perf_counter()
            trunk.tokens(pixels)
            times.append(time.perf_counter() - start)
    measured = 2 / min(times)
    assert measured / 3 < estimated_speed(trunk.config, 64) < 3 * measured


def test_it_is_for_the_size_of_the_images() -> None:
    config = random_trunk(image_size=32, patch=8, width=64, depth=2, heads=4).config
    small, large = (estimated_speed(config, side) for side in (32, 256))  # 16 and 1,024 patches
    assert small > 8 * large
    deeper = replace(config, depth=200)
    assert estimated_speed(deeper, 32) == pytest.approx(small / 100, rel=0.7)
