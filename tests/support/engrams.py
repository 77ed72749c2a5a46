"""A small backbone, and tasks with random values to save and attach."""

from __future__ import annotations

from typing import Any

import torch

from engram import ViT, random_backbone
from engram.images.preprocessing import Preprocessing
from engram.tasks.task import Task


def small_backbone(**options: Any) -> ViT:
    """A backbone of 2 layers and width 16 for images of 16 x 16."""
    backbone = random_backbone(
        **{"image_size": 16, "patch": 8, "width": 16, "depth": 2, "heads": 2} | options
    )
    backbone.preprocessing = Preprocessing((16, 16), None)
    return backbone


def randomised(task: Task) -> Task:
    """The task with random values that half precision holds, so that no tensor is zero."""
    with torch.no_grad():
        for tensor in task.tensors().values():
            tensor.copy_(torch.randn_like(tensor).half())
    return task


def familiar(task: Task) -> Task:
    """The task with statistics of images that might have been."""
    found = task.keep_statistics()
    groups, features = found.means.shape
    labels = torch.arange(12 * groups) % groups
    x = torch.randn(len(labels), features).double() + labels[:, None]
    sums = torch.zeros(groups, features, dtype=torch.float64).index_add_(0, labels, x)
    found.estimate(torch.bincount(labels).double(), sums, x.square().sum(0))
    found.correlate(x, labels)
    found.adjust(found.likeness(x))
    return task
