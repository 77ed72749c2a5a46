"""Engrams that travel: what a push sends and keeps back, and where a pull puts what it got."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engram.errors import EngramError
from engram.store.bundles import Bundle, is_bundle, read_engrams
from engram.store.cards import card_of, file_of, hub_id
from engram.store.engram import Engram
from engram.store.format import read_engram, serialise_engram
from engram.store.portable import paths_in_class_names, without_local_paths
from engram.store.remote import (
    CARD,
    MANIFEST,
    fetch_engrams,
    local_path,
)
from engram.util import hub
from engram.util.files import write_atomically
from engram.util.hub import PathOrHubId


@dataclass(frozen=True)
class Push:
    """What a push sends, byte for byte, and after it has gone where it is."""

    repo: str
    revision: str | None
    private: bool | None
    message: str
    engrams: tuple[Engram, ...]
    files: Mapping[str, bytes]  # by their names in the repository, the card among them
    changed: tuple[str, ...]  # what is other than in the user's own files, a sentence each
    warnings: tuple[str, ...]
    url: str = ""
    commit: str = ""  # empty after a dry run

    @property
    def card(self) -> str:
        return self.files[CARD].decode()


@dataclass(frozen=True)
class Pulled:
    """One file that a pull wrote, or found to be there already."""

    path: Path
    source: str
    task: str
    content: str
    bytes: int
    new: bool


def push(
    sources: PathOrHubId | Sequence[PathOrHubId],
    to: str,
    *,
    dry_run: bool = False,
    revision: str | None = None,
    private: bool | None = None,
    license: str | None = None,
    backbone: str | None = None,
    message: str | None = None,
    replace: bool = False,
) -> Push:
    """Send engrams or a bundle to a Hub repository, with a card, in one commit.

    A repository holds one engram, or several that fit together. Paths of this machine are cut to
    their last part in what is sent, which changes no content hash.

    Args:
        sources: Files of engrams, or a bundle.
        to: The repository, `owner/name`.
        dry_run: Send nothing, and need neither a network nor a token.
        revision: The branch to commit to.
        private: Whether a repository that is created is private.
        license: The licence that the card names.
        backbone: Hub id of the trunk, if the engrams know it by a path.
        message: The commit message.
        replace: Delete other engrams that the repository holds. Without it, the push is refused
            if there are any.

    Returns:
        What is sent: `files` by name, `card`, what was `changed`, `warnings`, and the `url`.

    Raises:
        EngramError: The engrams do not fit together, or the Hub refused.

    Examples:
        >>> planned = engram.push("flowers.safetensors", "you/flowers", dry_run=True)
        >>> sorted(planned.files)
        ['README.md', 'bundle.json', 'flowers.safetensors']
    """
    place = hub.parse_hub_address(to if hub.is_hub_address(to) else f"{hub.PREFIX}{to}", revision)
    if place.file or place.content:
        raise EngramError(f"{to} names a file; give the repository alone, as in {place.repo}.")
    if backbone is not None and hub_id(backbone) is None:
        raise EngramError(
            f"--backbone is {backbone!r}; give the Hub id (owner/name) under which others find "
            "the trunk."
        )
    given = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    engrams, bundle = _collect(given)
    changed: list[str] = []
    warnings = [w for engram in engrams for w in paths_in_class_names(engram)]
    files: dict[str, bytes] = {}
    outgoing = []
    for engram in engrams:
        cleaned, cuts = without_local_paths(engram, backbone)
        assert cleaned.content == engram.content  # what was cut decides no answer
        changed += cuts
        files[file_of(engram)] = serialise_engram(cleaned)
        outgoing.append(cleaned)
    if bundle:
        manifest = Bundle(Path(), tuple(outgoing)).manifest()
        files[MANIFEST] = (json.dumps(manifest, indent=1) + "\n").encode()
    facts = {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
    files[CARD] = card_of(place.repo, outgoing, facts, bundle=bundle, license=license).encode()
    names = ", ".join(engram.spec.name for engram in engrams)
    planned = Push(
        place.repo, place.revision, private, message or f"Push {names}", tuple(outgoing), files,
        tuple(dict.fromkeys(changed)), tuple(warnings),
    )  # fmt: skip
    return planned if dry_run else _send(planned, replace)


def _send(planned: Push, replace_others: bool) -> Push:
    sent = hub.upload(
        planned.repo,
        planned.files,
        message=planned.message,
        revision=planned.revision,
        private=planned.private,
        replace=replace_others,
    )
    return replace(planned, url=sent.url, commit=sent.commit)


def _collect(sources: Sequence[PathOrHubId]) -> tuple[tuple[Engram, ...], bool]:
    """The engrams, and whether they are a bundle: all but one whose parents lie elsewhere."""
    paths = [local_path(source) for source in sources]
    if len(paths) == 1 and not is_bundle(paths[0]):
        if paths[0].is_dir():
            raise EngramError(
                f"{paths[0]} is a folder but no bundle; give engrams, or make a bundle of them "
                "with `engram compose`."
            )
        engram = read_engram(paths[0])
        return (engram,), not engram.parents
    return read_engrams(paths), True


def pull(
    sources: PathOrHubId | Sequence[PathOrHubId],
    out: PathOrHubId | None = None,
    *,
    revision: str | None = None,
    overwrite: bool = False,
) -> list[Pulled]:
    """Fetch engrams or whole repositories from the Hub, verify them, and write them into a folder.

    Args:
        sources: `hf:owner/name/FILE` for an engram, `hf:owner/name` for all of a repository.
        out: The folder. By default the current one, or for a repository one of its name.
        revision: Branch, tag or commit.
        overwrite: Replace files that differ. Without it they are refused and nothing is written.

    Returns:
        The files, and whether each is new.

    Raises:
        EngramError: The Hub has no such file, it is damaged, or another file is in its place.

    Examples:
        >>> pulled = engram.pull("hf:you/garden")  # doctest: +SKIP
        >>> model = engram.load_model("garden")
    """
    given = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    plans: list[tuple[Path, Path, str]] = []  # from, to, how it is named
    for source in given:
        if not hub.is_hub_address(source):
            raise EngramError(f"{os.fspath(source)!r} is not on the Hub; write hf:owner/name.")
        place = hub.parse_hub_address(source, revision)
        cached, names = fetch_engrams(place)
        folder = Path(out) if out is not None else Path()
        if place.file is None:
            folder = folder if out is not None else Path(place.repo.partition("/")[2])
            if (cached / MANIFEST).is_file():
                names = [*names, MANIFEST]
        for name in names:
            named = str(hub.HubAddress(place.repo, cached.name, name))
            plans.append((cached / name, folder / Path(name).name, named))
    taken: dict[Path, tuple[Path, str]] = {}
    for origin, target, named in plans:
        other, also = taken.setdefault(target, (origin, named))
        if other != origin and other.read_bytes() != origin.read_bytes():
            raise EngramError(
                f"Both {also} and {named} would be {target}; pull one of them into another folder "
                "with -o. Nothing was written."
            )
        if target.is_dir():
            raise EngramError(f"{target} is a folder; give another one with -o.")
        if not overwrite and target.exists() and target.read_bytes() != origin.read_bytes():
            raise EngramError(
                f"{target} exists already and is another file{_how_other(origin, target)}; give "
                "another folder with -o, or --overwrite to replace it. Nothing was written."
            )
    return [_put(*plan) for plan in plans]


def _how_other(origin: Path, target: Path) -> str:
    """An engram may be the same task and yet another file: before a push, its paths are whole."""
    with contextlib.suppress(EngramError):
        if read_engram(origin).content == read_engram(target).content:
            return ", with the same content but another header"
    return ""


def _put(origin: Path, target: Path, named: str) -> Pulled:
    data = origin.read_bytes()
    new = not target.exists() or target.read_bytes() != data
    if new:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngramError(
                f"The folder {target.parent} cannot be made ({error.strerror or error})."
            ) from None
        write_atomically(target, data)
    if target.name == MANIFEST:
        return Pulled(target, named, "", "", len(data), new)
    engram = read_engram(target)
    return Pulled(target, named, engram.spec.name, engram.content, len(data), new)
