"""The methods that teach a task: the paper's memory (`memory.py`) and its relatives.

Tensors only: no files, no Hub, no data. Start in `memory.py`, which is the paper; `method.py` says
what a method is. `METHODS` has one class for each regime, and `register` adds one of your own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram.util.lazy import lazy_names

if TYPE_CHECKING:
    from engram.methods.full_attention import (
        ClassToken,
        FullAdapter,
        FullMemory,
        FullMemoryAdapter,
        FullTuning,
    )
    from engram.methods.head import Base, Head, MlpHead
    from engram.methods.masked import Masked, MaskedAdapter
    from engram.methods.method import Method
    from engram.methods.readout import Readout
    from engram.methods.registry import METHODS, create_method, method_class, register
    from engram.methods.side import Side, SideReadout

__all__ = [
    "METHODS",
    "Base",
    "ClassToken",
    "FullAdapter",
    "FullMemory",
    "FullMemoryAdapter",
    "FullTuning",
    "Head",
    "Masked",
    "MaskedAdapter",
    "Method",
    "MlpHead",
    "Readout",
    "Side",
    "SideReadout",
    "create_method",
    "method_class",
    "register",
]

_HOMES = {
    "full_attention": "ClassToken FullAdapter FullMemory FullMemoryAdapter FullTuning",
    "head": "Base Head MlpHead",
    "masked": "Masked MaskedAdapter",
    "method": "Method",
    "readout": "Readout",
    "registry": "METHODS create_method method_class register",
    "side": "Side SideReadout",
}
__getattr__ = lazy_names(
    __name__, {name: f"{home}:{name}" for home, names in _HOMES.items() for name in names.split()}
)
