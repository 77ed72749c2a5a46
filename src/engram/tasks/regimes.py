"""The regimes: which parameters a task has, and how its tokens attend."""

from __future__ import annotations

from dataclasses import dataclass

#: What happens to cells from layer to layer where every token reads them (Figure 2b).
UPDATES = ("fresh", "propagate", "add")


@dataclass(frozen=True)
class Regime:
    """Which parameters a task has (all of them train), and how its tokens attend."""

    about: str
    masked: bool = False  # Table 1: nothing but the task's own stream changes
    token: bool = True
    cells: bool = False
    adapters: bool = False
    side: bool = False  # side patches, which climb beside the trunk
    moments: bool = False  # the head sees moments of every layer
    mlp: bool = False  # an MLP instead of a linear head
    trunk: bool = False  # a whole trunk of its own

    @property
    def changes_trunk(self) -> bool:
        """Whether the trunk's own tokens change, so that no other task can share the pass."""
        own = self.token or self.cells or self.adapters or self.trunk
        return own and not (self.masked or self.side)

    @property
    def extends(self) -> bool:
        """Whether such a task can extend others: it has a stream of its own."""
        return self.masked or self.side

    @property
    def reads_layers(self) -> bool:
        """Whether the task reads more of the trunk than its last tokens."""
        return self.masked or self.side or self.moments

    @property
    def reads_final(self) -> bool:
        """Whether the task reads all of the trunk's last tokens."""
        return self.side or self.moments


REGIMES = {
    "masked": Regime("cells + class token + head, Table 1", masked=True, cells=True),
    "masked+adapter": Regime(
        "masked + adapters on the task's own stream", masked=True, cells=True, adapters=True
    ),
    "side": Regime("side patches + cells + head", token=False, cells=True, side=True),
    "readout": Regime("a linear head on every layer", token=False, moments=True),
    "side+readout": Regime(
        "side patches + cells + a head on every layer",
        token=False,
        cells=True,
        side=True,
        moments=True,
    ),
    "memory": Regime("cells + class token + head, every token reads the cells", cells=True),
    "class": Regime("class token + head"),
    "head": Regime("a linear head", token=False),
    "mlp-head": Regime("an MLP head", token=False, mlp=True),
    "full": Regime("everything", token=False, trunk=True),
    "adapter": Regime("adapters + class token + head", adapters=True),
    "memory+adapter": Regime("cells + adapters + class token + head", cells=True, adapters=True),
}
