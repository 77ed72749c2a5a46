"""The demo's measurements: each agrees with the model, and can fail."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import engram
from engram.data.scenes import scene_splits
from engram.experiments import demo_checks
from engram.experiments.demo_checks import (
    accuracy,
    base_is_identical,
    predict_batches,
    read_images,
    remove_mask,
    time_passes,
)
from engram.model import MemoryViT
from engram.vit import ViT

TEST = scene_splits("shape", train=1, val=1, test=6).test


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
    assert TEST is not None
    return read_images(model, TEST, range(6))


def test_batches_are_predicted_in_order(model: MemoryViT, pixels: Tensor) -> None:
    found = predict_batches(model, ["first", "third"], torch.split(pixels, 4))
    assert list(found) == ["first", "third"]
    with torch.inference_mode():
        torch.testing.assert_close(found["third"], model(pixels)["third"], atol=1e-4, rtol=1e-4)


def test_accuracy_is_a_share() -> None:
    assert TEST is not None
    logits = torch.nn.functional.one_hot(torch.from_numpy(TEST.labels), 5).float()
    assert accuracy(logits, TEST) == 1
    logits[:2] = logits[:2].roll(1, dims=1)
    assert accuracy(logits, TEST) == pytest.approx(4 / 6, abs=1e-4)


def test_a_bit_that_differs_is_found(model: MemoryViT, pixels: Tensor) -> None:
    plain = copy.deepcopy(model.backbone)
    assert base_is_identical(model, plain, torch.split(pixels, 4))
    other = engram.random_backbone(seed=1)
    assert not base_is_identical(model, other, [pixels])


def test_times_are_medians_per_image_without_the_warm_up(
    model: MemoryViT, pixels: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, cold = [0.0], [100.0]  # seconds; the first calls take longer

    def passes(seconds: float) -> Callable[..., None]:
        def forward(*_: object, **__: object) -> None:
            clock[0] += seconds + cold[0]

        return forward

    def turns() -> Iterator[int]:
        for turn in range(4):
            yield turn
            cold[0] = 0

    monkeypatch.setattr(demo_checks, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(MemoryViT, "forward", passes(0.008))
    monkeypatch.setattr(ViT, "forward", passes(0.006))
    assert time_passes(model, pixels[:2], turns()) == {
        "one_pass_ms": 4,
        "pass_per_task_ms": 16,  # base and three tasks
        "plain_backbone_ms": 3,
        "ratio": 4,
    }


def test_the_mask_keeps_other_tasks_out(model: MemoryViT, pixels: Tensor) -> None:
    assert TEST is not None
    found = remove_mask(model, "first", TEST, torch.split(pixels, 4))
    steps = found["steps"]
    assert [step["beside"] for step in steps] == [[], ["second"], ["second", "third"]]
    with torch.inference_mode():
        right = accuracy(model(pixels)["first"], TEST)
    assert {step["with_mask"] for step in steps} == {right}
    assert steps[0]["without_mask"] == right
    assert 0 <= found["base_answers_changed"] <= 1
