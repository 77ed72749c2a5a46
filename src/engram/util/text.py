"""Text for people: short lists, names that are safe to print, bytes that are no UTF-8."""

from __future__ import annotations

import os
from collections.abc import Sequence


def summarise_names(
    names: Sequence[str], most: int = 5, nouns: tuple[str, str] = ("class", "classes")
) -> str:
    """How many classes (or what `nouns` calls them), and what the first are called."""
    more = ", …" if len(names) > most else ""
    count = f"1 {nouns[0]}" if len(names) == 1 else f"{len(names):,} {nouns[1]}"
    return f"{count} ({', '.join(names[:most])}{more})"


def printable(text: str, most: int = 120) -> str:
    """What a file says, safe to print: one line, no control characters, not without end."""
    text = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def without_folder(source: str) -> str:
    """The last part of a path: where it lies on this machine is nobody else's business."""
    return os.path.basename(source.rstrip("/")) if os.path.isabs(source) else source


def utf8(text: str) -> bytes:
    """A file's name may be any bytes: what is no UTF-8, a surrogate in a str, is spelled out."""
    return text.encode(errors="backslashreplace")
