"""What a new task is, apart from its data: the settings that `fit` and `sweep` share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engram.tasks.regimes import REGIMES, UPDATES
from engram.util.settings import setting

if TYPE_CHECKING:
    from engram.tasks.spec import TaskSpec


@dataclass(frozen=True)
class TaskSettings:
    """What a new task is made of. `TaskSpec` checks it once the classes are known."""

    regime: str = setting(
        "masked", "which parameters train, and whether attention is masked", choices=tuple(REGIMES)
    )
    cells: int = setting(5, "memory cells at every layer")
    extends: tuple[str, ...] = setting(
        (), "an engram that the task reads; repeatable", metavar="T=FILE"
    )
    update: str = setting(
        "fresh", "what happens to cells from layer to layer, for memory", choices=UPDATES
    )
    adapter_width: int = setting(32, "bottleneck width of the adapters", least=1)
    class_init: str = setting(
        "trunk",
        "initial class token: a copy of the trunk's, or random",
        choices=("trunk", "random"),
    )
    rank: int = setting(16, "width of the side patches, for side", least=1)

    @classmethod
    def of(cls, spec: TaskSpec) -> TaskSettings:
        """Those of a task that exists, but for `class_init`, which it does not know any more."""
        return cls(
            regime=spec.regime,
            cells=spec.cells,
            extends=spec.extends,
            update=spec.update,
            adapter_width=spec.adapter_width,
            rank=spec.rank,
        )

    def with_parents(self, names: Sequence[str]) -> TaskSettings:
        """The same, for a task that extends the attached tasks of these names."""
        return replace(self, extends=tuple(names))
