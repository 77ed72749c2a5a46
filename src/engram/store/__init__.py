"""Engrams on disk and on the Hub: file format, bundles, cards, conversion of legacy checkpoints.

`model/` and everything above it import this folder. It knows tasks and backbones, but no model.
Start in `engram.py` (what an engram is), `format.py` (its file), `bundles.py` (a folder of them).
"""

from typing import TYPE_CHECKING

from engram.util.lazy import lazy_names

if TYPE_CHECKING:
    from engram.store import legacy

__all__ = ["legacy"]
__getattr__ = lazy_names(__name__, {"legacy": "legacy"})
