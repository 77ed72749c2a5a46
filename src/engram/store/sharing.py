"""Push engrams to the Hub, and pull them from it."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from engram.errors import EngramError, flag
from engram.store.bundles import Bundle, is_bundle, read_engrams
from engram.store.cards import hub_id, write_card
from engram.store.compose import write_bundle
from engram.store.engram import Engram
from engram.store.format import read_engram, serialise_engram
from engram.store.portable import paths_in_class_names, without_local_paths
from engram.store.remote import CARD, MANIFEST, fetch_engrams, local_path
from engram.util import hub
from engram.util.files import make_folder, write_atomically
from engram.util.hub import PathOrHubId


@dataclass(frozen=True)
class Push:
    """The files of a push, byte for byte, and its destination."""

    repo: str
    revision: str | None
    private: bool | None
    message: str
    engrams: tuple[Engram, ...]
    files: Mapping[str, bytes]  # by their names in the repository, with the card
    changed: tuple[str, ...]  # one sentence for each difference from the user's own files
    warnings: tuple[str, ...]
    url: str = ""  # empty after a dry run
    commit: str = ""  # empty after a dry run

    @property
    def card(self) -> str:
        """The text of README.md."""
        return self.files[CARD].decode()


@dataclass(frozen=True)
class Pulled:
    """One file that a pull wrote, or that was there already."""

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

    A repository holds one engram, or several that fit together. In what is sent, paths of this
    machine are shortened to their last part, which changes no content hash.

    Args:
        sources: Files of engrams, or a bundle.
        to: The repository, `owner/name`.
        dry_run: Send nothing, and need neither a network nor a token.
        revision: The branch to commit to.
        private: Whether a repository that is created is private.
        license: The licence that the card names.
        backbone: Hub id of the backbone, if the engrams know it by a path.
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
    address = hub.parse_hub_address(to if hub.is_hub_address(to) else f"{hub.PREFIX}{to}", revision)
    if address.file or address.content:
        raise EngramError(f"{to} names a file; give only the repository, as in {address.repo}.")
    if backbone is not None and hub_id(backbone) is None:
        raise EngramError(
            f"{flag('backbone')} is {backbone!r}; give the Hub id (owner/name) under which others "
            "find the backbone."
        )
    engrams, bundle = _collect(_as_list(sources))
    portable = [without_local_paths(engram, backbone) for engram in engrams]
    outgoing = tuple(engram for engram, _ in portable)
    # What was removed has no influence on the outputs, so children still recognise their parents.
    assert [e.content for e in outgoing] == [e.content for e in engrams]
    files = {engram.file_name: serialise_engram(engram) for engram in outgoing}
    if bundle:
        files[MANIFEST] = Bundle(Path(), outgoing).manifest_bytes()
    card = write_card(address.repo, outgoing, files, bundle=bundle, license=license)
    files[CARD] = card.encode()
    message = message or f"Push {', '.join(engram.spec.name for engram in engrams)}"
    url = commit = ""
    if not dry_run:
        url, commit = hub.upload(
            address.repo,
            files,
            message=message,
            revision=address.revision,
            private=private,
            replace=replace,
        )
    return Push(
        repo=address.repo,
        revision=address.revision,
        private=private,
        message=message,
        engrams=outgoing,
        files=files,
        changed=tuple(dict.fromkeys(change for _, changes in portable for change in changes)),
        warnings=tuple(w for engram in engrams for w in paths_in_class_names(engram)),
        url=url,
        commit=commit,
    )


def _as_list(sources: PathOrHubId | Sequence[PathOrHubId]) -> list[PathOrHubId]:
    return [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)


def _collect(sources: Sequence[PathOrHubId]) -> tuple[tuple[Engram, ...], bool]:
    """The engrams, and whether they are a bundle. A single one whose parents are missing is not."""
    paths = [local_path(source) for source in sources]
    if len(paths) == 1 and not is_bundle(paths[0]):
        if paths[0].is_dir():
            raise EngramError(
                f"{paths[0]} is a folder but not a bundle; give engrams, or make a bundle of them "
                "with `engram compose`."
            )
        engram = read_engram(paths[0])
        return (engram,), not engram.parents
    return read_engrams(paths), True


def pull(
    sources: PathOrHubId | Sequence[PathOrHubId],
    out: str | os.PathLike[str] | None = None,
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
    folder = None if out is None else Path(out)
    downloads = [one for source in _as_list(sources) for one in _fetch(source, folder, revision)]
    _check_targets(downloads, overwrite)
    return [_write(download) for download in downloads]


class _Download(NamedTuple):
    cached: Path
    target: Path
    source: str  # the address of the file, pinned to a commit


def _fetch(source: PathOrHubId, out: Path | None, revision: str | None) -> list[_Download]:
    """Fetch one file or a whole repository into the cache, and say where its files will go."""
    if not hub.is_hub_address(source):
        raise EngramError(f"{os.fspath(source)!r} is not on the Hub; write hf:owner/name.")
    address = hub.parse_hub_address(source, revision)
    cache, names = fetch_engrams(address)
    folder = out or Path()
    if address.file is None:
        folder = out or Path(address.repo.partition("/")[2])
        names = [*names, MANIFEST] if (cache / MANIFEST).is_file() else names
    pinned = hub.HubAddress(address.repo, cache.name)
    return [
        _Download(cache / name, folder / Path(name).name, str(replace(pinned, file=name)))
        for name in names
    ]


def _check_targets(downloads: Sequence[_Download], overwrite: bool) -> None:
    """Refuse to write two different files to one path, or over a different file."""
    taken: dict[Path, _Download] = {}
    for download in downloads:
        cached, target, source = download
        other = taken.setdefault(target, download)
        if other.cached.read_bytes() != cached.read_bytes():
            raise EngramError(
                f"Both {other.source} and {source} would be written to {target}; pull one of them "
                "into another folder with -o. Nothing was written."
            )
        if target.exists() and not target.is_file():
            what = "a folder" if target.is_dir() else "not a regular file"
            raise EngramError(f"{target} is {what}; give another one with -o.")
        if not overwrite and target.exists() and target.read_bytes() != cached.read_bytes():
            same = ""  # a push removes local paths: the file that was pushed has another header
            with contextlib.suppress(EngramError):
                if read_engram(cached).content == read_engram(target).content:
                    same = ", with the same content but another header"
            raise EngramError(
                f"{target} exists already and is another file{same}; give another folder with "
                f"{flag('out')}, or {flag('overwrite', True)} to replace it. Nothing was written."
            )


def _write(download: _Download) -> Pulled:
    cached, target, source = download
    data = cached.read_bytes()
    new = not target.exists() or target.read_bytes() != data
    if new:
        make_folder(target.parent)
        write_atomically(target, data)
    if target.name == MANIFEST:
        return Pulled(target, source, "", "", len(data), new)
    engram = read_engram(target)
    return Pulled(target, source, engram.spec.name, engram.content, len(data), new)


# `from_pretrained` and `push_to_hub` of a model: what they read and write is a bundle

LOADING = ("backbone", "revision", "token", "cache_dir", "local_files_only", "force_download")
PUSHING = ("commit_message", "private", "token", "branch", "backbone", "replace")
_INSTEAD = {  # of options that other libraries have
    "config": "the classes of every task are in its engram",
    "device_map": "move the model with .to(device)",
    "map_location": "move the model with .to(device)",
    "dtype": "give a backbone of that type with backbone=",
    "torch_dtype": "give a backbone of that type with backbone=",
    "trust_remote_code": "no code is ever downloaded",
    "subfolder": "a repository is one bundle",
    "create_pr": "push to a branch with branch=, and open the pull request on the Hub",
    "revision": "the branch to push to is given with branch=",
    "license": "engram.push has it",
}


def read_pretrained(source: PathOrHubId, revision: str | None) -> Sequence[Engram]:
    """The engrams of a bundle: a path if that exists, and else `owner/name` on the Hub."""
    path, name = Path(source), os.fspath(source)
    if not hub.is_hub_address(source) and not path.exists():
        if not isinstance(source, str) or not re.match(rf"{hub.REPO.pattern}(?:@|$)", name):
            raise EngramError(
                f"There is no folder or file {name!r}, and it is no repository on the Hub "
                "(owner/name); save_pretrained writes a bundle."
            )
        source = f"{hub.PREFIX}{name}"
    if path.is_dir() and not is_bundle(path):
        if (path / "config.json").is_file():  # the folder of a ViT is easily taken for a bundle
            raise EngramError(
                f"{path} is a ViT, and no bundle of tasks; a model without tasks is "
                f"engram.MemoryViT(engram.load_backbone({str(path)!r}))."
            )
        raise EngramError(
            f"{path} has no {MANIFEST}, so it is no bundle; save_pretrained and `engram compose` "
            "write one."
        )
    return read_engrams([local_path(source, revision)])


def push_bundle(
    engrams: Sequence[Engram], repo_id: str, *, token: str | None, **options: Any
) -> str:
    """Send engrams as a bundle to the Hub, with the options of `push`; returns the commit's URL."""
    with tempfile.TemporaryDirectory() as folder, hub.access(hub.Access(token)):
        write_bundle(engrams, Path(folder) / "bundle", overwrite=True)
        sent = push(Path(folder) / "bundle", hub.own_repo(repo_id), **options)
    return f"{sent.url}/commit/{sent.commit}"


def refuse_options(method: str, options: Iterable[str], known: Sequence[str]) -> None:
    """Refuse options that this method does not have, by what to do in place of the first."""
    for name in options:
        instead = _INSTEAD.get(name, f"it takes {', '.join(known)}")
        raise EngramError(f"{method} does not take {name}: {instead}.")
