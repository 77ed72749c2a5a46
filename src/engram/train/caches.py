"""All caches of this machine: where they are, what they hold, and how to remove them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

from engram.errors import EngramError
from engram.util.documents import load_json

INDEX_LINE = 74  # the SHA-256 of an image, the CRC-32 of its row, and a newline, in hex


def default_root() -> Path:
    """$ENGRAM_CACHE, or ~/.cache/engram."""
    given = os.environ.get("ENGRAM_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "engram"


def info(root: str | Path | None = None) -> list[dict[str, Any]]:
    """Contents of every cache: a dictionary for each backbone, preprocessing and view."""
    found = []
    for meta in sorted(Path(root or default_root()).glob("*/meta.json")):
        if (about := _about(meta)) is None:
            continue
        rows = sum(path.stat().st_size // INDEX_LINE for path in meta.parent.glob("*.index"))
        size = sum(path.stat().st_size for path in _files(meta.parent))
        found.append({"key": meta.parent.name, "images": rows, "bytes": size, **about})
    return found


def _about(meta: Path) -> dict[str, Any] | None:
    """What a cache's meta.json says; None for one of somebody else's."""
    if not re.fullmatch(r"[0-9a-f]{24}", meta.parent.name):
        return None
    try:
        about = load_json(meta.read_bytes())
    except (OSError, ValueError):
        return None
    return about if isinstance(about, dict) and "fingerprint" in about else None


def _files(folder: Path) -> list[Path]:
    """A cache's own files; meta.json, which says what it is, comes last."""
    patterns = ("*.index", "*.data", ".engram-*.tmp", "meta.json")
    return [path for pattern in patterns for path in folder.glob(pattern)]


def clear(root: str | Path | None = None) -> int:
    """Remove every cache, and return how many bytes that freed. Nothing else is touched."""
    freed = 0
    for entry in info(root):
        folder = Path(root or default_root()) / entry["key"]
        for path in _files(folder):
            try:
                size = path.stat().st_size
                path.unlink()
            except OSError as error:
                raise EngramError(
                    f"{path} cannot be removed ({error.strerror}); {freed / 1e9:.2f} GB are free "
                    "again, the rest is still there."
                ) from None
            freed += size
        with contextlib.suppress(OSError):  # somebody put something else there
            folder.rmdir()
    return freed


def room(root: str | Path | None = None) -> int:
    """Bytes free on the cache's disk."""
    folder = Path(root or default_root())
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
