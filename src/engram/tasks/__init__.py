"""Tasks: spec, kind, head, metrics and costs.

Everything from `data` upwards may import it; it knows the backbone's shape and no files. Start in
`spec.py`.
"""

from typing import TYPE_CHECKING

from engram.util.lazy import lazy_names

if TYPE_CHECKING:
    from engram.tasks import costs

__all__ = ["costs"]
__getattr__ = lazy_names(__name__, {"costs": "costs"})
