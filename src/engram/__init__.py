"""Engram: one frozen Vision Transformer, any number of tasks, through learnable memory."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engram.checkpoints import load_trunk, save_trunk
    from engram.errors import EngramError
    from engram.evaluate import evaluate, predict
    from engram.files import read_engram as inspect
    from engram.fit import fit
    from engram.model import MemoryViT
    from engram.objects import from_timm, from_transformers
    from engram.recipe import Recipe
    from engram.remote import find as list  # noqa: F401
    from engram.sharing import pull, push
    from engram.sweep import sweep
    from engram.vit import ViT, random_trunk

__version__ = "0.1.0"

__all__ = [
    "EngramError",
    "MemoryViT",
    "Recipe",
    "ViT",
    "evaluate",
    "fit",
    "from_timm",
    "from_transformers",
    "inspect",
    "load_trunk",
    "predict",
    "pull",
    "push",
    "random_trunk",
    "save_trunk",
    "sweep",
]

# Where the public names live. They are imported when first used: torch takes seconds, and
# `engram --help` needs none of it.
_HOMES = {
    "EngramError": ("errors", "EngramError"),
    "MemoryViT": ("model", "MemoryViT"),
    "Recipe": ("recipe", "Recipe"),
    "ViT": ("vit", "ViT"),
    "evaluate": ("evaluate", "evaluate"),
    "fit": ("fit", "fit"),
    "from_timm": ("objects", "from_timm"),
    "from_transformers": ("objects", "from_transformers"),
    "inspect": ("files", "read_engram"),
    "list": ("remote", "find"),  # not in __all__: `import *` must not hide Python's own
    "load_trunk": ("checkpoints", "load_trunk"),
    "predict": ("evaluate", "predict"),
    "pull": ("sharing", "pull"),
    "push": ("sharing", "push"),
    "random_trunk": ("vit", "random_trunk"),
    "save_trunk": ("checkpoints", "save_trunk"),
    "sweep": ("sweep", "sweep"),
}


class _Package(ModuleType):
    """Importing the module `fit` must not hide the function `fit`: a public name stays itself."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOMES and isinstance(value, ModuleType):
            value = getattr(value, _HOMES[name][1])
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engram' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(importlib.import_module(f"engram.{module}"), attribute)
    globals()[name] = value
    return value


def __dir__() -> Sequence[str]:
    return sorted({*globals(), *_HOMES})


sys.modules[__name__].__class__ = _Package
