"""Freed memory between pieces that are in use goes back to the system."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from engram.util.allocator import return_freed_memory


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_holes_between_what_is_kept_are_returned() -> None:
    blocks = [bytearray(b"x" * 100_000) for _ in range(1000)]
    kept = blocks[::10]
    del blocks
    before = resident()
    return_freed_memory()
    assert before - resident() > 50_000_000
    assert len(kept) == 100
