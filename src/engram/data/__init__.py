"""Sources of labelled images: folders, tables, arrays, masks, the Hub.

Everything from `store` upwards may import it. Start in `datasets.py`: `load` chooses a reader
(`folders`, `tables`, `arrays`, `presets`, `python_data`) and returns `Splits` of a `Dataset` each;
`labels.py` reads the labels, `loader.py` makes batches. Users import the names below from here;
this package imports them from the modules that define them.
"""

from typing import TYPE_CHECKING

from engram.util.lazy import lazy_names

if TYPE_CHECKING:
    from engram.data.datasets import Dataset, Splits, load
    from engram.data.loader import Loader

__all__ = ["Dataset", "Loader", "Splits", "load"]
__getattr__ = lazy_names(
    __name__,
    {
        "Dataset": "datasets:Dataset",
        "Loader": "loader:Loader",
        "Splits": "datasets:Splits",
        "load": "datasets:load",
    },
)
