"""One task's parameters: how many there are, what they are called, and where they start."""

from __future__ import annotations

import pytest
import torch
from tests.support.strategies import scatter, some_pixels, tiny_backbone

from engram import EngramError, MemoryViT, ViT
from engram.methods import METHODS
from engram.tasks.spec import TaskSpec
from engram.tasks.task import Task
from engram.vit.vit import ViTConfig


def test_cells_are_drawn_with_a_standard_deviation_of_two_hundredths() -> None:
    cells = MemoryViT(tiny_backbone(width=64)).add_task("task", 3, cells=500).cells
    assert abs(cells.std().item() - 0.02) < 3e-4
    assert abs(cells.mean().item()) < 3e-4


def test_heads_start_at_zero() -> None:
    model = MemoryViT(tiny_backbone())
    for regime in ("masked", "head", "mlp-head"):
        model.add_task(regime, 3, regime=regime)
    for regime in ("masked", "head", "mlp-head"):
        assert not model(some_pixels())[regime].any()


@pytest.mark.parametrize("regime", ["masked", "masked+adapter", "memory", "class"])
def test_the_class_token_starts_as_the_backbones(regime: str) -> None:
    backbone = tiny_backbone()
    task = MemoryViT(backbone).add_task("task", 3, regime=regime)
    assert torch.equal(task.class_token, backbone.class_token)
    assert task.class_token.data_ptr() != backbone.class_token.data_ptr()


def test_a_new_class_task_sees_the_picture_as_the_backbone_does() -> None:
    backbone, pixels = tiny_backbone(), some_pixels()
    model = MemoryViT(backbone)
    head = scatter(model.add_task("task", 3, regime="class").head)
    assert torch.equal(model(pixels)["task"], head(backbone.tokens(pixels)[:, 0]))


def test_several_class_tokens_start_apart() -> None:
    token = MemoryViT(tiny_backbone()).add_task("task", 3, tokens=3).class_token
    assert len({tuple(row.tolist()) for row in token}) == 3


def test_the_class_token_can_start_at_random() -> None:
    backbone = tiny_backbone(width=512)
    random = MemoryViT(backbone).add_task("task", 3, class_init="random").class_token
    without = MemoryViT(tiny_backbone(width=512, class_token=False)).add_task("task", 3).class_token
    for token in (random, without):
        assert abs(token.std().item() - 0.02) < 3e-3
    with pytest.raises(EngramError, match="class_init is 'zeros'"):
        MemoryViT(backbone).add_task("task", 3, class_init="zeros")


@pytest.mark.parametrize(("cells", "count"), [(1, 9_984), (5, 46_848), (10, 92_928), (20, 185_088)])
@pytest.mark.parametrize("regime", ["masked", "memory"])
def test_a_task_has_as_many_parameters_as_in_the_paper(regime: str, cells: int, count: int) -> None:
    config = ViTConfig((224, 224), 32, width=768, depth=12, heads=12, mlp_width=3072)
    with torch.device("meta"):
        task = Task(TaskSpec("task", ("a", "b"), method=METHODS[regime](cells=cells)), ViT(config))
    head = 2 * 768 + 2
    assert sum(parameter.numel() for parameter in task.parameters()) == count + head


def test_a_task_names_its_tensors_as_its_file_does() -> None:
    task = MemoryViT(tiny_backbone(depth=2)).add_task("task", 3, cells=2)
    shapes = {name: tuple(tensor.shape) for name, tensor in task.tensors().items()}
    assert shapes == {
        "cells": (2, 2, 8),
        "class_token": (1, 8),
        "head.weight": (3, 8),
        "head.bias": (3,),
    }
