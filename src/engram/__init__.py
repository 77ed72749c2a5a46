"""Engram: one frozen Vision Transformer, any number of tasks, through learnable memory."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engram.errors import EngramError
    from engram.inference.evaluate import evaluate
    from engram.inference.load import load_model
    from engram.inference.predict import predict
    from engram.model import MemoryViT
    from engram.store.bundles import compose
    from engram.store.format import read_engram as inspect
    from engram.store.remote import list_engrams as list  # noqa: F401
    from engram.store.sharing import pull, push
    from engram.train.fit import fit
    from engram.train.recipe import Recipe
    from engram.train.sweep import sweep
    from engram.train.trainable import train_only
    from engram.trunks.load import load_trunk, save_trunk
    from engram.trunks.objects import from_timm, from_transformers
    from engram.vit import ViT, random_trunk

__version__ = "0.1.0"

__all__ = [
    "EngramError",
    "MemoryViT",
    "Recipe",
    "ViT",
    "compose",
    "evaluate",
    "fit",
    "from_timm",
    "from_transformers",
    "inspect",
    "load_model",
    "load_trunk",
    "predict",
    "pull",
    "push",
    "random_trunk",
    "save_trunk",
    "sweep",
    "train_only",
]

# Where the public names live. They are imported when first used: torch takes seconds, and
# `engram --help` needs none of it.
_HOMES = {
    "EngramError": ("errors", "EngramError"),
    "MemoryViT": ("model", "MemoryViT"),
    "Recipe": ("train.recipe", "Recipe"),
    "ViT": ("vit", "ViT"),
    "compose": ("store.bundles", "compose"),
    "evaluate": ("inference.evaluate", "evaluate"),
    "fit": ("train.fit", "fit"),
    "from_timm": ("trunks.objects", "from_timm"),
    "from_transformers": ("trunks.objects", "from_transformers"),
    "inspect": ("store.format", "read_engram"),
    # Not in __all__: `import *` must not hide Python's own.
    "list": ("store.remote", "list_engrams"),
    "load_model": ("inference.load", "load_model"),
    "load_trunk": ("trunks.load", "load_trunk"),
    "predict": ("inference.predict", "predict"),
    "pull": ("store.sharing", "pull"),
    "push": ("store.sharing", "push"),
    "random_trunk": ("vit", "random_trunk"),
    "save_trunk": ("trunks.load", "save_trunk"),
    "sweep": ("train.sweep", "sweep"),
    "train_only": ("train.trainable", "train_only"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engram' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(importlib.import_module(f"engram.{module}"), attribute)
    globals()[name] = value
    return value


def __dir__() -> Sequence[str]:
    return sorted({*globals(), *_HOMES})
