"""Engrams on the Hub: fetched into its cache, and verified before anybody reads them.

A repository is a folder as `engram push` lays it out: engrams, `bundle.json` where they fit
together, and a card (README.md) whose front matter lists every engram with its content.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub.repocard import metadata_load

from engram.errors import EngramError
from engram.store.engram import Engram
from engram.store.format import is_engram, read_engram
from engram.util import hub
from engram.util.hub import HubAddress, PathOrHubId
from engram.util.text import printable

MANIFEST = "bundle.json"
CARD = "README.md"
_WEIGHTS = ("model.safetensors", "model-*.safetensors")  # of whole models: no engrams
LISTED = "engrams"  # the field of both that lists them


@dataclass(frozen=True)
class ListedEngram:
    """An engram that `find` came across: how to name it again, what it is, and its size."""

    source: str
    engram: Engram
    bytes: int

    @property
    def task(self) -> str:
        return self.engram.spec.name

    @property
    def content(self) -> str:
        return self.engram.content

    def __str__(self) -> str:
        return f"{self.source}\n{self.engram}"


def local_path(source: PathOrHubId) -> Path:
    """A path as it is; for `hf:…` the path in the cache, after fetching and verifying it.

    A repository without a file's name is its bundle, or its one engram.
    """
    if not hub.is_hub_address(source):
        return Path(source)
    place = hub.parse_hub_address(source)
    folder, names = fetch_engrams(place)
    if place.file is None and (folder / MANIFEST).is_file():
        return folder
    if len(names) != 1:
        raise EngramError(
            f"{place} holds {len(names)} engrams that are no bundle; name one, as in "
            f"{hub.PREFIX}{place.repo}/{names[0]}."
        )
    return folder / names[0]


def single_engram_path(source: PathOrHubId) -> Path:
    """The file of an engram; of a bundle, on the Hub or here, the only one that it lists."""
    path = local_path(source)
    if not (path / MANIFEST).is_file():
        return path
    names = sorted(_told(path))
    if len(names) == 1:
        return path / names[0]
    where = os.fspath(source).rstrip("/")
    such = (
        f", such as {where}/{names[0]} (there are {printable(', '.join(names))})" if names else ""
    )
    raise EngramError(
        f"{where} is a bundle of {len(names)} engrams; name the file of one{such}, or load all of "
        "them with engram.load_model."
    )


def list_engrams(source: PathOrHubId, *, revision: str | None = None) -> list[ListedEngram]:
    """The engrams in a Hub repository, a folder or a bundle. Those of the Hub are verified.

    Args:
        source: `hf:owner/name`, or a folder.
        revision: Branch, tag or commit on the Hub.

    Returns:
        For each engram its `source` (pinned to the commit), the `engram` itself and its size.

    Raises:
        EngramError: There is no such repository or folder, or a file is damaged.

    Examples:
        >>> [found.task for found in engram.list("garden")]
        ['flowers']
    """
    if hub.is_hub_address(source):
        place = hub.parse_hub_address(source, revision)
        folder, names = fetch_engrams(place)
        pinned = {name: str(HubAddress(place.repo, folder.name, name)) for name in names}
    else:
        folder = Path(source)
        if not folder.is_dir():
            raise EngramError(f"There is no folder {folder}; give one, or hf:owner/name.")
        paths = sorted(path for path in folder.glob("*.safetensors") if is_engram(path))
        names = [path.name for path in paths]
        pinned = {name: str(folder / name) for name in names}
    return [
        ListedEngram(pinned[name], read_engram(folder / name), (folder / name).stat().st_size)
        for name in names
    ]


def fetch_engrams(place: HubAddress) -> tuple[Path, list[str]]:
    """The folder in the cache and the names of the verified engrams in it: all, or the one asked.

    The card and the manifest come first: they say which files are engrams, so that nobody
    downloads a whole ViT to learn that it is none.
    """
    beside = (CARD, MANIFEST)
    folder = hub.fetch(place.repo, beside, place.revision, may_be_path=False)
    told = _told(folder)
    names = list(told) if place.file is None else [place.file]
    wanted, but = (names, ()) if names else (["*.safetensors"], _WEIGHTS)
    folder = hub.fetch(place.repo, (*beside, *wanted), place.revision, but=but, may_be_path=False)
    if not names:
        names = sorted(p.name for p in folder.glob("*.safetensors") if is_engram(p))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        there = ", ".join(sorted(told)) or "no engram that its card or a manifest lists"
        raise EngramError(
            f"The Hub repository {place.repo} has no {', '.join(missing) or 'engrams'} at "
            f"{place.revision or 'main'} ({folder.name[:12]}), or it is not in the cache; there "
            f"is {printable(there)}."
        )
    if place.content is not None and len(names) != 1:
        raise EngramError(
            f"{place} holds {len(names)} engrams, so #{place.content} could be any of them; name "
            "one file."
        )
    for name in names:
        _verify(folder / name, name, place, told.get(name, set()))
    return folder, names


def _verify(path: Path, name: str, place: HubAddress, told: set[str]) -> None:
    """The file is whole, and is what the user, or else the card and the manifest, say it is."""
    try:
        content = read_engram(path).content
    except EngramError as error:
        raise EngramError(
            f"{place.repo}, {name}: {error} If the owner's copy is good, `hf cache rm "
            f"model/{place.repo}` removes yours, and it is fetched again."
        ) from None
    if place.content is not None and not content.startswith(place.content):
        raise EngramError(
            f"{name} of {place.repo} at {place.revision or 'main'} has the content {content[:12]}, "
            f"not {place.content[:12]}, which you asked for; it was changed since, or is another "
            "one. Ask for the revision that had it."
        )
    others = sorted(told - {content})
    if place.content is None and others:
        raise EngramError(
            f"{name} of {place.repo} has the content {content[:12]}, but its card or manifest "
            f"lists {printable(' and '.join(other[:12] for other in others))}: one was changed "
            f"without the other. If you want the file as it is, say so: {replace(place, file=name)}"
            f"#{content[:12]}."
        )


def _told(folder: Path) -> dict[str, set[str]]:
    """File -> contents that the manifest and the card list for it; what they garble is left out."""
    entries: list[Any] = []
    for name, read in ((MANIFEST, _read_json), (CARD, metadata_load)):
        if (folder / name).is_file():
            with suppress(Exception):  # the owner may write anything; a difference is a finding
                entries += (read(folder / name) or {}).get(LISTED) or []
    pairs = [(e.get("file"), e.get("content")) for e in entries if isinstance(e, Mapping)]
    told: dict[str, set[str]] = {}
    for file, content in pairs:
        if (
            isinstance(file, str)
            and re.fullmatch(r"[\w][\w.-]*\.safetensors", file)
            and isinstance(content, str)
        ):
            told.setdefault(file, set()).add(content)
    return told


def _read_json(path: Path) -> dict[str, Any] | None:
    read = json.loads(path.read_bytes())
    return read if isinstance(read, dict) else None
