"""Freeze everything but the parameters of the tasks that train."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from engram.errors import EngramError
from engram.model import MemoryViT


def train_only(model: MemoryViT, *names: str) -> list[tuple[str, nn.Parameter]]:
    """Freeze everything but the parameters of these tasks, for a training loop of your own.

    Statistics of their training images are dropped: what they say will no longer be true.

    Args:
        model: The model.
        *names: The tasks to train.

    Returns:
        The names and parameters that train, for an optimiser.

    Raises:
        EngramError: A task is not attached, or a parameter belongs neither to the backbone nor to a
            task of the model, such as a module of your own put into it. Nothing trains or stays
            frozen by accident.

    Examples:
        >>> parameters = [parameter for _, parameter in engram.train_only(model, "flowers")]
        >>> optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    """
    trained = {id(p) for name in names for p in model.task(name).parameters()}
    known = {id(p) for p in _known(model)}
    for path, parameter in model.named_parameters():
        if id(parameter) not in known:
            raise EngramError(
                f"The parameter {path} belongs neither to the backbone nor to a task, so it is "
                "neither trained nor frozen on purpose; remove its module from the model."
            )
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    for name in names:
        task = model.task(name)
        task.statistics = task.sums = None  # of features and a head that are about to change
    return [(path, p) for path, p in model.named_parameters() if id(p) in trained]


def _known(model: MemoryViT) -> Iterator[nn.Parameter]:
    yield from model.backbone.parameters()
    for task in model.tasks.values():
        yield from task.parameters()
