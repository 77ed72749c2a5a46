"""Regimes, and settings of methods that are flags: for the command line, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engram.util.settings import setting, setting_of

#: Where the method of each regime is, in the order of tables.
REGIMES = {
    "masked": "masked:Masked",
    "masked+adapter": "masked:MaskedAdapter",
    "side": "side:Side",
    "readout": "readout:Readout",
    "pooling": "pooling:LearnedPooling",
    "memory": "full_attention:FullMemory",
    "class": "full_attention:ClassToken",
    "head": "head:Head",
    "mlp-head": "head:MlpHead",
    "full": "full_attention:FullTuning",
    "adapter": "full_attention:FullAdapter",
    "memory+adapter": "full_attention:FullMemoryAdapter",
    "patchcore": "patchcore:PatchCore",
}
#: Where those are that nobody trains: `auto` makes them of a trained task and a readout.
AVERAGES = {
    "masked+readout": "masked:MaskedReadout",
    "masked+adapter+readout": "masked:MaskedAdapterReadout",
    "side+readout": "side:SideReadout",
}
DEFAULT_REGIME = "masked"
ONE_CLASS_REGIME = "patchcore"  # of tasks that learn from good images alone
UPDATES = ("fresh", "propagate", "add")
#: Where class tokens start: as a copy of the backbone's own, or at random.
CLASS_INITS = ("backbone", "random")


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
    queries: int = setting(
        8, "learned queries that pool the final tokens", least=1, most=10_000, label="queries"
    )
    bank: int = setting(
        1_000, "patches in the memory bank of good images (--kind anomaly)", least=1, most=100_000
    )
    update: str = setting(
        "fresh", "how cells pass from layer to layer (the paper's Figure 2b)", choices=UPDATES
    )


def shared_setting(name: str, settings: type = MethodFlags) -> Any:
    """The field of a method that has this setting, of the flags or of another method."""
    return setting_of(settings, name)
