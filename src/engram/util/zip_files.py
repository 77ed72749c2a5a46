"""Zip archives (.npz, .pt): the sizes that their members declare, checked before one is read."""

from __future__ import annotations

import os
import re
import zipfile
from contextlib import suppress
from pathlib import Path

#: An archive may expand to so many times its size, or to `MAX_SMALL` bytes if that is more.
MAX_EXPANSION = 100
MAX_SMALL = 256_000_000
MAX_MEMBERS = 20_000


def check_archive(path: str | os.PathLike[str]) -> None:
    """Refuse an archive that expands too far. Whatever is wrong with it is a ValueError.

    No member can be read beyond the size that it declares.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise ValueError(f"it is not a zip archive, or it is damaged ({error})") from None
    if len(members) > MAX_MEMBERS:
        raise ValueError(f"it has {len(members):,} members, and at most {MAX_MEMBERS:,} are read")
    if any(m.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for m in members):
        raise ValueError("it is compressed in another way than by deflate")
    declared, size = sum(member.file_size for member in members), os.path.getsize(path)
    if declared > max(MAX_EXPANSION * size, MAX_SMALL):
        raise ValueError(
            f"it has {size / 1e6:,.1f} MB but expands to {declared / 1e6:,.0f} MB, more than "
            f"{MAX_EXPANSION} times as much"
        )
    free = available_memory()
    if free is not None and declared > free:
        raise ValueError(
            f"it expands to {declared / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB of memory are free"
        )


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping, where the system says so."""
    with suppress(OSError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
        return int(found[1]) * 1000 if found else None
    return None
