"""The methods that teach a task: the paper's memory (`memory.py`) and its relatives.

Tensors only: no files, no Hub, no data. Start in `memory.py`, which is the paper; `method.py` says
what a method is. `METHODS` has one class for each regime, and `register` adds one of your own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engram.methods.method_flags import AVERAGES, REGIMES
from engram.util.lazy import lazy_names

if TYPE_CHECKING:
    from engram.methods.full_attention import FullAdapter as FullAdapter
    from engram.methods.full_attention import FullMemory as FullMemory
    from engram.methods.head import Base as Base
    from engram.methods.head import CosineHead as CosineHead
    from engram.methods.head import Head as Head
    from engram.methods.masked import Masked as Masked
    from engram.methods.masked import MaskedAdapter as MaskedAdapter
    from engram.methods.masked import MaskedAdapterReadout as MaskedAdapterReadout
    from engram.methods.masked import MaskedReadout as MaskedReadout
    from engram.methods.method import Method as Method
    from engram.methods.method import OwnPassMethod as OwnPassMethod
    from engram.methods.method import SharedPassMethod as SharedPassMethod
    from engram.methods.pooling import LearnedPooling as LearnedPooling
    from engram.methods.readout import Readout as Readout
    from engram.methods.registry import METHODS as METHODS
    from engram.methods.registry import create_method as create_method
    from engram.methods.registry import method_class as method_class
    from engram.methods.registry import register as register
    from engram.methods.side import Side as Side
    from engram.methods.side import SideReadout as SideReadout

_HOMES = {path.partition(":")[2]: path for path in (REGIMES | AVERAGES).values()}
_HOMES |= {"Base": "head:Base", "CosineHead": "head:CosineHead"}
for _name in ("Method", "OwnPassMethod", "SharedPassMethod"):
    _HOMES[_name] = f"method:{_name}"
for _name in ("METHODS", "create_method", "method_class", "register"):
    _HOMES[_name] = f"registry:{_name}"
__getattr__ = lazy_names(__name__, _HOMES)
