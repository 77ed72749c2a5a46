"""A small trunk for tasks of every kind, and tasks in which no value is trivial."""

from typing import Any

import torch

from engram import random_trunk
from engram.images.preprocessing import Preprocessing
from engram.tasks.task import Task
from engram.vit import ViT


def small_vit(**options: Any) -> ViT:
    given = {"image_size": 16, "patch": 4, "width": 16, "depth": 2, "heads": 2} | options
    trunk = random_trunk(**given)
    trunk.preprocessing = Preprocessing((16, 16), None)
    return trunk


def randomised(task: Task) -> Task:
    with torch.no_grad():
        for tensor in task.tensors().values():
            tensor.normal_()
    return task
