"""Engrams without the paths of the machine they were made on."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PureWindowsPath
from typing import Any

from engram.data.presets import PRESETS
from engram.store.engram import Engram
from engram.util.text import printable

_ROOTED = r"(?:~[\w.-]*[\\/]|/|[A-Za-z]:[\\/]|\\\\)"


_FILE = r"file://[^\s/\\]*"  # perhaps with a machine's name


# Inside a sentence; a ":" may stand before it, as in hf:/data, but not https:/ or 8080/.
_PATH = re.compile(rf"(?:{_FILE}|(?<![\w./\\~-])){_ROOTED}(?=[^\s/])[^\s,;'\"<>|()]*")


_KIND = re.compile(rf"(?:{'|'.join(['hf', *PRESETS])}):")  # of data, before a Hub id or a path


def without_local_paths(engram: Engram, backbone: str | None = None) -> tuple[Engram, list[str]]:
    """The engram without paths of this machine, and a sentence for every change.

    Only the trunk's source, the recipe and the metrics can hold one, and none of them is part of
    what `content` covers.
    """
    name, said = engram.spec.name, list[str]()
    source = engram.trunk.source
    at = backbone or _short(source, whole=True)
    if at != source:
        said.append(f"{name}: the trunk's source {printable(source)} goes out as {printable(at)}")

    def cut(value: Any, where: str) -> Any:
        if isinstance(value, Mapping):
            return {cut(key, where): cut(item, f"{where}.{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            if where.endswith(".unreadable"):
                said.append(f"{name}: {where} goes out as a number, without the names of pictures")
                return len(value)
            return [cut(item, where) for item in value]
        if not isinstance(value, str):
            return value
        short = _short(value, whole=where == "recipe.data")
        if short != value:
            said.append(f"{name}: {where} {printable(value)} goes out as {printable(short)}")
        return short

    header = engram.header()
    metrics, recipe = cut(header["metrics"], "metrics"), cut(header["recipe"], "recipe")
    trunk = replace(engram.trunk, source=at)
    return replace(engram, trunk=trunk, metrics=metrics, recipe=recipe), said


def _short(text: str, whole: bool) -> str:
    """A text with the last parts of its paths alone; `whole` if it is no sentence about them."""
    parts = text.split("::")  # a folder of pictures and one of masks
    if whole and all(_is_local(part, whole) for part in parts):
        return "::".join(map(_last, parts))
    kind = _KIND.match(text)
    before, rest = (kind[0], text[kind.end() :]) if kind else ("", text)
    if _is_local(rest, whole):
        return before + _last(rest)
    return before + _PATH.sub(lambda found: _last(found[0]), rest)


def _is_local(text: str, whole: bool = False) -> bool:
    """Whether a text is a path of this machine: rooted, out of this folder, or there right now."""
    rooted = re.match(rf"(?:{_FILE})?{_ROOTED}|\.\.?[\\/]", text)
    if rooted and (whole or not re.search(r"\s/|,", text)):
        return True
    if "/" not in text and "\\" not in text:
        return False
    with contextlib.suppress(OSError, ValueError):
        return Path(text).exists()
    return False


def _last(text: str) -> str:
    """The last part of a path, whichever system wrote it."""
    return PureWindowsPath(text.removeprefix("file://").rstrip("/\\")).name or "a path"


def paths_in_class_names(engram: Engram) -> list[str]:
    """Texts that look like paths, but are part of what the content hash covers."""
    return [
        f"{engram.spec.name}: the class {printable(name)} looks like a path of this machine and "
        "goes out as it is, because class names are part of the engram"
        for name in engram.spec.classes
        if _is_local(name)
    ][:3]
