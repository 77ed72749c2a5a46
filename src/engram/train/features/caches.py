"""All caches of this machine: where they are, what they hold, and how to remove them."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from engram.errors import EngramError
from engram.util.documents import load_json

INDEX_LINE = 74  # the SHA-256 of an image, the CRC-32 of its row, and a newline, in hex


def default_root() -> Path:
    """$ENGRAM_CACHE, or ~/.cache/engram."""
    given = os.environ.get("ENGRAM_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "engram"


def limit() -> float:
    """Bytes that all caches together may take: $ENGRAM_CACHE_LIMIT, in GB, or infinity."""
    given = os.environ.get("ENGRAM_CACHE_LIMIT")
    try:
        gigabytes = float(given) if given else math.inf
    except ValueError:
        gigabytes = -1.0
    if not gigabytes > 0:
        raise EngramError(
            f"ENGRAM_CACHE_LIMIT is {given!r}; give the GB that the cache may take, such as 50."
        )
    return gigabytes * 1e9


def info() -> list[dict[str, Any]]:
    """Contents of every cache: a dictionary for each backbone, preprocessing and view.

    `used` is when a run opened it or read an epoch from it, in seconds since 1970.
    """
    found = []
    for meta in sorted(default_root().glob("*/meta.json")):
        if (about := _about(meta)) is None:
            continue
        rows = sum(path.stat().st_size // INDEX_LINE for path in meta.parent.glob("*.index"))
        size = sum(path.stat().st_size for path in _files(meta.parent))
        own = {"key": meta.parent.name, "images": rows, "bytes": size}
        found.append({**own, "used": meta.stat().st_mtime, **about})
    return found


def _about(meta: Path) -> dict[str, Any] | None:
    """Content of a cache's meta.json; None for a folder of somebody else's."""
    if not re.fullmatch(r"[0-9a-f]{24}", meta.parent.name):
        return None
    try:
        about = load_json(meta.read_bytes())
    except (OSError, ValueError):
        return None
    return about if isinstance(about, dict) and "fingerprint" in about else None


def _files(folder: Path) -> list[Path]:
    """A cache's own files; meta.json, which says what it is, comes last."""
    patterns = ("*.index", "*.data", ".engram-*.tmp", "lock", "meta.json")
    return [path for pattern in patterns for path in folder.glob(pattern)]


def clear(*, backbone: str | None = None, unused_days: float = 0.0, down_to: float = 0.0) -> int:
    """Remove caches, those first that were used first, and return how many bytes that freed.

    Only caches of a backbone (its source, or the beginning of its fingerprint), only those that no
    run used for so many days, and only until all that are left take at most `down_to` bytes.
    """
    entries = sorted(info(), key=lambda entry: float(entry["used"]))
    left, freed = sum(entry["bytes"] for entry in entries), 0
    if backbone is not None:
        sources = dict.fromkeys(entry["backbone"] for entry in entries)
        entries = [
            entry
            for entry in entries
            if entry["backbone"] == backbone or entry["fingerprint"].startswith(backbone)
        ]
        if not entries:
            known = ", ".join(sources) or "none"
            raise EngramError(f"There is no cache of {backbone}; there are caches of {known}.")
    before = time.time() - unused_days * 86_400
    for entry in entries:
        if entry["used"] <= before and left - freed > down_to:
            freed += _remove(default_root() / entry["key"], freed)
    return freed


def _remove(folder: Path, freed: int) -> int:
    """Remove a cache, and return its bytes; `freed` were freed before it."""
    own = 0
    for path in _files(folder):
        try:
            size = path.stat().st_size
            path.unlink()
        except OSError as error:
            raise EngramError(
                f"{path} cannot be removed ({error.strerror}); {(freed + own) / 1e9:.2f} GB are "
                "free again, the rest is still there."
            ) from None
        own += size
    with contextlib.suppress(OSError):  # somebody put something else there
        folder.rmdir()
    return own


def make_room(wanted: int) -> bool:
    """Remove caches until `wanted` bytes more are within the limit, and return whether they are.

    Those that were used last stay longest, and those of the last hour stay: a run may need them.
    """
    most = limit()
    if wanted > most:
        return False
    clear(unused_days=1 / 24, down_to=most - wanted)
    total: int = sum(entry["bytes"] for entry in info())
    return total + wanted <= most


def room() -> int:
    """Bytes free on the cache's disk."""
    folder = default_root()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
