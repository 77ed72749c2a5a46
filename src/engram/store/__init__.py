"""Engrams on disk and on the Hub: file format, bundles, cards, conversion of legacy checkpoints.

`model.py` and everything above it import this folder. It knows tasks and backbones, but no model.
Start in `engram.py` (what an engram is) and `format.py` (its file).
"""

from typing import TYPE_CHECKING

from engram.util.lazy import lazy_names

if TYPE_CHECKING:
    from engram.store import legacy

__all__ = ["legacy"]
__getattr__ = lazy_names(__name__, {"legacy": "legacy"})
