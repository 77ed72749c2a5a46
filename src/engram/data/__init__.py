"""Where labelled pictures come from: folders, tables, arrays, masks, the Hub.

Everything from `store` upwards may import it. Start in `datasets.py`: `load` finds the source and
gives `Splits` of `Dataset`s; `loader.py` reads them in batches.
"""

from typing import TYPE_CHECKING

from engram.util.lazy import lazy_names

if TYPE_CHECKING:
    from engram.data.datasets import Dataset, Splits, load

__all__ = ["Dataset", "Splits", "load"]
__getattr__ = lazy_names(__name__, {name: f"datasets:{name}" for name in __all__})
