"""Engrams without the paths of the machine that they were made on."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engram.data.presets import PRESETS
from engram.store.engram import Engram
from engram.util.text import FILE_URL, ROOT, last_part, printable, without_paths

_DATA_PREFIX = re.compile(rf"(?:{'|'.join(['hf', *PRESETS])}):")  # before a Hub id or a path


def without_local_paths(engram: Engram, backbone: str | None = None) -> tuple[Engram, list[str]]:
    """The engram with paths of this machine shortened, and a sentence for every change.

    Only fields that the content hash does not cover can hold such paths: the backbone's source,
    which becomes `backbone` if that is given, the recipe and the metrics.
    """
    name, changes = engram.spec.name, list[str]()
    source = engram.backbone.source
    new_source = backbone or _shorten(source, whole=True)
    if new_source != source:
        changes.append(
            f"{name}: the backbone's source {printable(source)} is sent as {printable(new_source)}"
        )

    def shorten(value: Any, where: str) -> Any:
        if isinstance(value, Mapping):
            return {
                shorten(key, where): shorten(item, f"{where}.{key}") for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            if where.endswith(".unreadable"):
                changes.append(f"{name}: {where} is sent as a number, without the names of images")
                return len(value)
            return [shorten(item, where) for item in value]
        if not isinstance(value, str):
            return value
        short = _shorten(value, whole=where == "recipe.data")
        if short != value:
            changes.append(f"{name}: {where} {printable(value)} is sent as {printable(short)}")
        return short

    header = engram.header()
    metrics, recipe = shorten(header["metrics"], "metrics"), shorten(header["recipe"], "recipe")
    info = replace(engram.backbone, source=new_source)
    return replace(engram, backbone=info, metrics=metrics, recipe=recipe), changes


def data_name(source: str) -> str:
    """The name of data in headers and pages: that on the Hub, or the last part of its path."""
    return _shorten(source, whole=True)


def paths_in_class_names(engram: Engram) -> list[str]:
    """Warnings, three at most, of class names like paths, which the content hash covers."""
    return [
        f"{engram.spec.name}: the class {printable(name)} looks like a path of this machine and "
        "is sent as it is, because class names are part of the engram"
        for name in engram.spec.classes
        if _is_local(name)
    ][:3]


def _shorten(text: str, whole: bool) -> str:
    """A text with its paths reduced to their last part.

    With `whole` it is a path, or those of images and masks, and not a sentence that contains some.
    """
    parts = text.split("::")
    if whole and all(_is_local(part, whole) for part in parts):
        return "::".join(map(last_part, parts))
    prefix = _DATA_PREFIX.match(text)
    before, rest = (prefix[0], text[prefix.end() :]) if prefix else ("", text)
    if _is_local(rest, whole):
        return before + last_part(rest)
    return before + without_paths(rest)


def _is_local(text: str, whole: bool = False) -> bool:
    """Whether a text is a path of this machine: absolute, leading upwards, or existing now."""
    rooted = re.match(rf"(?:{FILE_URL})?{ROOT}|\.\.?[\\/]", text)
    if rooted and (whole or not re.search(r"\s/|,", text)):
        return True
    if "/" not in text and "\\" not in text:
        return False
    with contextlib.suppress(OSError, ValueError):
        return Path(text).exists()
    return False
