"""What a task is made of: regime -> parameters that train, and proof that the rest is frozen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from engram.errors import EngramError

if TYPE_CHECKING:
    from engram.model import MemoryViT


@dataclass(frozen=True)
class Regime:
    """Which parameters a task has (all of them train), and how its tokens attend."""

    about: str
    masked: bool = False  # Table 1: nothing but the task's own stream changes
    token: bool = True
    cells: bool = False
    adapters: bool = False
    mlp: bool = False  # an MLP instead of a linear head
    trunk: bool = False  # a whole trunk of its own

    @property
    def changes_trunk(self) -> bool:
        """Whether the trunk's own tokens change, so that no other task can share the pass."""
        return not self.masked and (self.token or self.cells or self.adapters or self.trunk)


REGIMES = {
    "masked": Regime("cells + class token + head, Table 1", masked=True, cells=True),
    "masked+adapter": Regime(
        "masked + adapters on the task's own stream", masked=True, cells=True, adapters=True
    ),
    "memory": Regime("cells + class token + head, every token reads the cells", cells=True),
    "class": Regime("class token + head"),
    "head": Regime("a linear head", token=False),
    "mlp-head": Regime("an MLP head", token=False, mlp=True),
    "full": Regime("everything", token=False, trunk=True),
    "adapter": Regime("adapters + class token + head", adapters=True),
    "memory+adapter": Regime("cells + adapters + class token + head", cells=True, adapters=True),
}


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
