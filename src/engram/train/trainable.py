"""Which parameters train: exactly those of the tasks that are named, everything else is frozen."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from engram.errors import EngramError
from engram.model import MemoryViT


def train_only(model: MemoryViT, *names: str) -> list[tuple[str, nn.Parameter]]:
    """Let exactly these tasks' parameters train, and give them; all others are frozen.

    A parameter that belongs neither to the trunk nor to a task of the model (somebody's own
    module put into it) is an error: nothing trains or stays frozen by accident.
    """
    trained = {id(p) for name in names for p in model.task(name).parameters()}
    known = {id(p) for p in _known(model)}
    for path, parameter in model.named_parameters():
        if id(parameter) not in known:
            raise EngramError(
                f"The parameter {path} belongs neither to the trunk nor to a task, so it is "
                "neither trained nor frozen on purpose; remove its module from the model."
            )
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    return [(path, p) for path, p in model.named_parameters() if id(p) in trained]


def _known(model: MemoryViT) -> Iterator[nn.Parameter]:
    yield from model.trunk.parameters()
    for task in model.tasks.values():
        yield from task.parameters()
