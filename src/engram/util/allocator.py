"""Freed memory that the allocator still holds."""

from __future__ import annotations

import ctypes
import sys
from functools import cache


def return_freed_memory() -> None:
    """Give freed memory back to the system, also what lies between pieces that are in use.

    Large tensors that come and go leave such holes. It takes milliseconds; glibc only.
    """
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


@cache
def _libc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") else None
