"""A model from engrams: the trunk they name, with all of them attached."""

from __future__ import annotations

import os
from collections.abc import Sequence

from engram.model import MemoryViT
from engram.store.bundles import Source, gather, load_trunk_of


def load_model(sources: Source | Sequence[Source], backbone: Source | None = None) -> MemoryViT:
    """The trunk that engrams or bundles name (or `backbone`), with all of them attached.

    Pictures are prepared as they were when the engrams were trained. Engrams that do not fit
    together, or not the trunk, are an EngramError.
    """
    engrams = gather([sources] if isinstance(sources, (str, os.PathLike)) else sources)
    model = MemoryViT(load_trunk_of(engrams[0], backbone))
    for engram in engrams:
        model.attach(engram)
    return model.eval()
