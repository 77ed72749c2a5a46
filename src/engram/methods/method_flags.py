"""What the command line knows of the methods without torch: regimes, and settings with a flag."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from engram.util.settings import setting

#: The regimes of this package, in the order of tables; `METHODS` has their classes.
REGIMES = (
    "masked",
    "masked+adapter",
    "side",
    "readout",
    "side+readout",
    "memory",
    "class",
    "head",
    "mlp-head",
    "full",
    "adapter",
    "memory+adapter",
)
UPDATES = ("fresh", "propagate", "add")


@dataclass(frozen=True)
class MethodFlags:
    """Settings of methods that are flags; methods take theirs from here (`shared_setting`)."""

    #: About 5 are a good universal size (paper).
    cells: int = setting(5, "memory cells at every layer", most=10_000, label="cells per layer")
    adapter_width: int = setting(
        32, "bottleneck width of the adapters", least=1, most=10_000, label="width of its adapters"
    )
    rank: int = setting(
        16, "width of the side network", least=1, most=10_000, label="rank of its side network"
    )
    update: str = setting(
        "fresh", "how cells pass from layer to layer (the paper's Figure 2b)", choices=UPDATES
    )


def shared_setting(name: str) -> Any:
    """The field of a method that has this setting."""
    found = next(item for item in fields(MethodFlags) if item.name == name)
    return field(default=found.default, metadata=found.metadata)
