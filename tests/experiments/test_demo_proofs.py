"""Without the mask tasks read each other: what the demo shows of it agrees with the model."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

import engram
from engram.data.scenes import scene_splits
from engram.experiments.demo import base_is_identical, remove_mask
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.model import MemoryViT

TEST = scene_splits("shape", train=1, val=1, test=6)["test"]


@pytest.fixture
def model() -> MemoryViT:
    """Three tasks with random values; `second` extends `first`."""
    model = MemoryViT(engram.random_backbone())
    for name, extends in (("first", []), ("second", ["first"]), ("third", [])):
        model.add_task(name, 5, 3, extends=extends)
        for parameter in model.task(name).parameters():
            torch.nn.init.normal_(parameter)
    return model.eval()


@pytest.fixture
def pixels(model: MemoryViT) -> Tensor:
    views = [evaluation_view(TEST.read(i), model.preprocessing) for i in range(6)]
    return normalise(torch.from_numpy(np.stack(views)), model.preprocessing)


def test_a_bit_that_differs_is_found(model: MemoryViT, pixels: Tensor) -> None:
    plain = copy.deepcopy(model.backbone)
    assert base_is_identical(model, plain, torch.split(pixels, 4))
    other = engram.random_backbone(seed=1)
    assert not base_is_identical(model, other, [pixels])


def test_the_mask_keeps_other_tasks_out(model: MemoryViT, pixels: Tensor) -> None:
    found = remove_mask(model, "first", TEST, torch.split(pixels, 4))
    steps = found["steps"]
    assert [step["beside"] for step in steps] == [[], ["second"], ["second", "third"]]
    with torch.inference_mode():
        right = model(pixels)["first"].argmax(1) == torch.from_numpy(TEST.labels)
    assert {step["with_mask"] for step in steps} == {round(float(right.float().mean()), 4)}
    assert steps[0]["without_mask"] == steps[0]["with_mask"]
    assert 0 <= found["base_answers_changed"] <= 1
