"""Engrams on the Hub: downloaded into the cache, and verified before they are used.

A repository that `engram push` wrote has engrams, `bundle.json` if they fit together, and a card
(README.md) whose front matter lists every engram with its content.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub.repocard import metadata_load

from engram.errors import EngramError
from engram.store.engram import Engram
from engram.store.format import is_engram, read_engram
from engram.util import hub
from engram.util.documents import parse_json
from engram.util.hub import HubAddress, PathOrHubId
from engram.util.text import printable

MANIFEST = "bundle.json"
CARD = "README.md"
LISTED = "engrams"  # the field of both that lists the engrams
_MAX_CARD = 1_000_000  # bytes; parsing YAML takes seconds per megabyte
_WEIGHTS = ("model.safetensors", "model-*.safetensors")  # of whole models, never engrams


@dataclass(frozen=True)
class ListedEngram:
    """An engram in a folder or a Hub repository."""

    source: str  # its path, or its address on the Hub at the current commit
    engram: Engram
    bytes: int  # the size of its file

    @property
    def task(self) -> str:
        return self.engram.spec.name

    @property
    def content(self) -> str:
        return self.engram.content

    def __str__(self) -> str:
        return f"{self.source}\n{self.engram}"


def local_path(source: PathOrHubId, revision: str | None = None) -> Path:
    """The path of an engram or a bundle, from the Hub after it was verified.

    A repository without the name of a file is its bundle, or its only engram.
    """
    if not hub.is_hub_address(source):
        return Path(source)
    address = hub.parse_hub_address(source, revision)
    folder, names = fetch_engrams(address)
    if address.file is None and (folder / MANIFEST).is_file():
        return folder
    if len(names) != 1:
        raise EngramError(
            f"{address} holds {len(names)} engrams that are not a bundle; name one, as in "
            f"{hub.PREFIX}{address.repo}/{names[0]}."
        )
    return folder / names[0]


def single_engram_path(source: PathOrHubId) -> Path:
    """The path of one engram: a file, or the only engram of a bundle. Either may be on the Hub."""
    path = local_path(source)
    if not (path / MANIFEST).is_file():
        return path
    names = sorted(_listed_contents(path))
    if len(names) == 1:
        return path / names[0]
    where = os.fspath(source).rstrip("/")
    example = ""
    if names:
        example = f", such as {where}/{names[0]} (it has {printable(', '.join(names))})"
    raise EngramError(
        f"{where} is a bundle of {len(names)} engrams; name the file of one{example}, or load all "
        "of them with engram.load_model."
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
        address = hub.parse_hub_address(source, revision)
        folder, names = fetch_engrams(address)
        pinned = {name: str(HubAddress(address.repo, folder.name, name)) for name in names}
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


def fetch_engrams(address: HubAddress) -> tuple[Path, list[str]]:
    """Download and verify the engrams of a repository, or the one that the address names.

    Gives the folder in the cache, and the names of the engrams in it. The card and the manifest,
    which list them, come first, so that no other weights are downloaded.
    """
    lists = (CARD, MANIFEST)
    folder = hub.fetch(address.repo, lists, address.revision, may_be_path=False)
    listed = _listed_contents(folder)
    names = list(listed) if address.file is None else [address.file]
    wanted, ignore = (names, ()) if names else (["*.safetensors"], _WEIGHTS)
    folder = hub.fetch(
        address.repo, (*lists, *wanted), address.revision, ignore=ignore, may_be_path=False
    )
    if not names:
        names = sorted(p.name for p in folder.glob("*.safetensors") if is_engram(p))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        available = ", ".join(sorted(listed)) or "no engram that its card or manifest lists"
        raise EngramError(
            f"The Hub repository {address.repo} has no {', '.join(missing) or 'engrams'} at "
            f"{address.revision or 'main'} ({folder.name[:12]}), or it is not in the cache; there "
            f"is {printable(available)}. A ViT itself is loaded with engram.load_backbone."
        )
    if address.content is not None and len(names) != 1:
        raise EngramError(
            f"{address} holds {len(names)} engrams, so #{address.content} could be any of them; "
            "name one file."
        )
    for name in names:
        _verify(folder / name, name, address, listed.get(name, set()))
    return folder, names


def _verify(path: Path, name: str, address: HubAddress, listed: set[str]) -> None:
    """Check that a file is intact, with the content of the address, or else the listed one."""
    try:
        content = read_engram(path).content
    except EngramError as error:
        raise EngramError(
            f"{address.repo}, {name}: {error} If the owner's copy is good, `hf cache rm "
            f"model/{address.repo}` removes yours, and it is downloaded again."
        ) from None
    if address.content is not None and not content.startswith(address.content):
        raise EngramError(
            f"{name} of {address.repo} at {address.revision or 'main'} has the content "
            f"{content[:12]}, not {address.content[:12]}, which you asked for; it was changed "
            "since, or is another one. Ask for the revision that had it."
        )
    others = sorted(listed - {content})
    if address.content is None and others:
        raise EngramError(
            f"{name} of {address.repo} has the content {content[:12]}, but its card or manifest "
            f"lists {printable(' and '.join(other[:12] for other in others))}: one was changed "
            f"without the other. If you want the file as it is, ask for "
            f"{replace(address, file=name)}#{content[:12]}."
        )


def _listed_contents(folder: Path) -> dict[str, set[str]]:
    """The contents that manifest and card list for each file, whatever else their owner wrote."""
    entries: list[Any] = []
    with suppress(Exception):
        entries += parse_json((folder / MANIFEST).read_bytes())[LISTED]
    with suppress(Exception):
        if (folder / CARD).stat().st_size <= _MAX_CARD:
            entries += (metadata_load(folder / CARD) or {})[LISTED]
    listed: dict[str, set[str]] = {}
    for entry in entries:
        with suppress(Exception):
            file, content = entry["file"], entry["content"]
            if re.fullmatch(r"[\w][\w.-]*\.safetensors", file) and isinstance(content, str):
                listed.setdefault(file, set()).add(content)
    return listed
