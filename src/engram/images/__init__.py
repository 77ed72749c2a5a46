"""Image files become pixels: decode safely, crop and resize, normalise, read masks.

Every folder above may import it; it does not know about models. Start in `decode.py` (what can be
wrong with a file) and `views.py` (what the ViT sees of an image). Users import the names below
from here; this package imports them from the modules that define them.
"""

from typing import TYPE_CHECKING

from engram.util.lazy import lazy_names

if TYPE_CHECKING:
    from engram.images.decode import BadImage
    from engram.images.preprocessing import Preprocessing, normalise
    from engram.images.views import evaluation_view

__all__ = ["BadImage", "Preprocessing", "evaluation_view", "normalise"]
_HOMES = dict(zip(__all__, ("decode", "preprocessing", "views", "preprocessing"), strict=True))
# A model needs no decoder: those who only import it load none.
__getattr__ = lazy_names(__name__, {name: f"{home}:{name}" for name, home in _HOMES.items()})
