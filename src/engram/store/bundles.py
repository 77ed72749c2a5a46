"""Bundles: a folder of engrams that fit together on one trunk.

`bundle.json` lists the engrams, parents first, each with its content hash. A bundle is written
beside its place and renamed into it: what is at its place is whole. Where it replaces another, that
one is renamed away first; a process killed between the two leaves both beside the empty place.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing
from engram.store.engram import Engram, TrunkInfo
from engram.store.format import read_engram, serialise_engram, write_engram
from engram.store.remote import MANIFEST, local_path
from engram.tasks.spec import NAME
from engram.trunks.load import load_trunk
from engram.util.files import check_renamable, replace_folder, write_atomically
from engram.util.hub import PathOrHubId
from engram.util.text import printable
from engram.vit import Activation, ViT

FORMAT = 1
_MOST_MANIFEST = 50_000_000  # bytes


@dataclass(frozen=True)
class Bundle:
    """Engrams that fit together, parents first."""

    folder: Path
    engrams: tuple[Engram, ...]

    @property
    def trunk(self) -> TrunkInfo:
        return self.engrams[0].trunk

    @property
    def preprocessing(self) -> Preprocessing | None:
        return self.engrams[0].preprocessing

    def manifest(self) -> dict[str, Any]:
        preprocessing = self.preprocessing
        return {
            "format": FORMAT,
            "trunk": {"source": self.trunk.source, "fingerprint": self.trunk.fingerprint},
            "preprocessing": preprocessing and preprocessing.to_dict(),
            "engrams": [
                {"task": e.spec.name, "file": _file(e), "content": e.content} for e in self.engrams
            ],
        }

    def plus(self, engram: Engram) -> Bundle:
        """With one more engram, if it fits to the others; nothing is written."""
        found = [(_file(e), e) for e in (*self.engrams, engram)]
        return Bundle(self.folder, _fitted(found))

    def minus(self, name: str) -> Bundle:
        """Without an engram; one that others extend, and the last one, stay."""
        children = [e.spec.name for e in self.engrams if name in e.parents]
        if children:
            raise EngramError(f"{name!r} is extended by {', '.join(children)}; remove those first.")
        rest = tuple(e for e in self.engrams if e.spec.name != name)
        if not rest:
            raise EngramError(f"{name!r} is the only task of the bundle; add another one first.")
        return Bundle(self.folder, rest)


def is_bundle(folder: PathOrHubId) -> bool:
    """Whether a folder says that it is a bundle; whether it is a good one, `read_bundle` tells."""
    return (Path(folder) / MANIFEST).is_file()


def read_engrams(sources: Iterable[PathOrHubId]) -> tuple[Engram, ...]:
    """The engrams of files and bundles, parents first, if they can share one pass.

    Either may be on the Hub: `hf:owner/name`, `hf:owner/name/FILE`.
    """
    found: list[tuple[str, Engram]] = []  # where, what
    for source in sources:
        path = local_path(source)
        if is_bundle(path):
            bundle = read_bundle(path)
            found += [(str(bundle.folder / _file(e)), e) for e in bundle.engrams]
        else:
            found.append((os.fspath(source), read_engram(path)))
    return _fitted(found)


# Writing


def compose(
    paths: Iterable[PathOrHubId], out: PathOrHubId, *, backbone: PathOrHubId | None = None
) -> Bundle:
    """Put engrams for one trunk into a bundle, a folder that `load_model` and `engram serve` read.

    Args:
        paths: Files of engrams, or bundles whose engrams are taken over.
        out: The folder to write. A bundle that is there is replaced; any other folder that is not
            empty is refused.
        backbone: Path or Hub id of the trunk, to check that the engrams fit it.

    Returns:
        The bundle.

    Raises:
        EngramError: The engrams do not fit together, or not the trunk.

    Examples:
        >>> bundle = engram.compose(["flowers.safetensors"], "garden")
        >>> [what.spec.name for what in bundle.engrams]
        ['flowers']
    """
    folder = Path(os.path.realpath(out))
    engrams = read_engrams(paths)
    if backbone is not None:
        trunk = load_trunk_of(engrams[0], backbone)
        for engram in engrams:
            engram.check_trunk(TrunkInfo.from_trunk(trunk), trunk.preprocessing)
    _check_replaceable(folder)
    bundle = Bundle(Path(out), engrams)
    building = folder.with_name(f".engram-{secrets.token_hex(8)}.tmp")
    try:
        building.mkdir(parents=True)
        for engram in engrams:
            write_engram(building / _file(engram), engram)
        _write_manifest(Bundle(building, engrams))
        replace_folder(building, folder)
    except OSError as error:
        raise EngramError(
            f"The bundle {out} cannot be written ({error.strerror or error}); check the folder, "
            "its permissions and the free space. What was there is unchanged."
        ) from None
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return bundle


def update_bundle(old: Bundle, new: Bundle) -> None:
    """Write what `plus` or `minus` made of a bundle: new files, the manifest, each atomically.

    A crash leaves one of the two bundles, and perhaps a file that it does not list. A file of a
    new engram's name that is not listed is somebody's own, unless it is that engram already.
    """
    if _read_manifest(old.folder) != old.manifest():
        raise EngramError(
            f"{old.folder / MANIFEST} was changed by somebody else since it was read, and is left "
            "as it is; read the bundle again."
        )
    added = {_file(e): serialise_engram(e) for e in new.engrams if e not in old.engrams}
    for name in added.keys() - {_file(e) for e in old.engrams}:
        if (old.folder / name).exists() and not _holds(old.folder / name, added[name]):
            raise EngramError(
                f"Another {name} lies in {old.folder} but is not in the bundle; move it away. "
                "Nothing was changed."
            )
    for name, data in added.items():
        write_atomically(new.folder / name, data)
    _write_manifest(new)
    for gone in {_file(e) for e in old.engrams} - {_file(e) for e in new.engrams}:
        with contextlib.suppress(OSError):  # the manifest does not list it any more
            (new.folder / gone).unlink()


def _holds(path: Path, data: bytes) -> bool:
    with contextlib.suppress(OSError):
        return path.read_bytes() == data
    return False


def unlisted_files(bundle: Bundle) -> list[str]:
    """Engrams that lie in the folder but are not listed: a crash or a person left them there."""
    listed = {_file(engram) for engram in bundle.engrams}
    return sorted(p.name for p in bundle.folder.glob("*.safetensors") if p.name not in listed)


def _write_manifest(bundle: Bundle) -> None:
    text = json.dumps(bundle.manifest(), indent=1) + "\n"
    write_atomically(bundle.folder / MANIFEST, text.encode())


def _check_replaceable(folder: Path) -> None:
    """Only a bundle is replaced, and nothing is deleted that is not part of it."""
    check_renamable(folder)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise EngramError(f"{folder} is a file; give the path of a folder for the bundle.")
    there = {path.name for path in folder.iterdir()}
    known = {MANIFEST} if is_bundle(folder) else set()
    if known:
        known |= {entry["file"] for entry in _read_manifest(folder)["engrams"]}
    if there - known:
        what = "is not a bundle" if not known else "is a bundle with other files in it"
        raise EngramError(
            f"The folder {folder} {what} ({printable(', '.join(sorted(there - known)[:3]))}), and "
            "would be replaced; choose another folder, or move those files away."
        )


# Reading


def read_bundle(folder: PathOrHubId) -> Bundle:
    """Read and verify a bundle: its manifest, every engram, and that they fit together."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
    found: list[tuple[str, Engram]] = []
    for entry in manifest["engrams"]:
        engram = read_engram(folder / entry["file"])
        where = str(folder / entry["file"])
        if (entry["task"], entry["content"]) != (engram.spec.name, engram.content):
            raise EngramError(
                f"{where} holds {engram.spec.name!r} with the content {engram.content[:12]}, but "
                f"{MANIFEST} lists {entry['task']!r} with {printable(entry['content'][:12])}; "
                "compose the bundle again."
            )
        found.append((where, engram))
    bundle = Bundle(folder, _fitted(found))
    for what in ("trunk", "preprocessing"):
        says, has = manifest.get(what), bundle.manifest()[what]
        if says != has:
            raise EngramError(
                f"{folder / MANIFEST} says that its {what} is {printable(json.dumps(says), 300)}, "
                f"but its engrams have {json.dumps(has)}; compose the bundle again."
            )
    return bundle


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        with open(path, "rb") as file:
            manifest = json.loads(file.read(_MOST_MANIFEST))
        version = manifest["format"]
        if version == FORMAT:
            entries = manifest["engrams"]
            for entry in entries:
                if any(type(entry[key]) is not str for key in ("task", "file", "content")):
                    raise TypeError("a value that is no text")
                task = entry["task"] if NAME.fullmatch(entry["task"]) else "no task's name"
                if entry["file"] != f"{task}.safetensors":  # and so no other folder's file
                    raise ValueError(f"the file {entry['file']!r} for the task {entry['task']!r}")
            if not entries:
                raise ValueError("no engrams")
    except OSError as error:
        raise EngramError(
            f"{folder} is not a bundle: {MANIFEST} cannot be read ({error.strerror or error}); "
            "`engram compose` makes one."
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise EngramError(
            f"{path} is damaged ({printable(str(error))}); compose the bundle again, or get a good "
            "copy."
        ) from None
    if version != FORMAT:
        raise EngramError(
            f"{path} has the format {printable(str(version))}, and this version of engram reads "
            f"format {FORMAT}; install a newer engram-vit."
        )
    return cast("dict[str, Any]", manifest)


# Together


def _file(engram: Engram) -> str:
    return f"{engram.spec.name}.safetensors"


def _fitted(found: Sequence[tuple[str, Engram]]) -> tuple[Engram, ...]:
    """The engrams, parents first, after every check that needs no trunk. `found`: where, what."""
    if not found:
        raise EngramError("There are no engrams; give at least one file or bundle.")
    named: dict[str, tuple[str, Engram]] = {}
    for where, engram in found:
        other = named.setdefault(engram.spec.name, (where, engram))
        if other[1].content != engram.content:
            raise EngramError(
                f"{other[0]} and {where} are both called {engram.spec.name!r} but differ (content "
                f"{other[1].content[:12]} and {engram.content[:12]}); leave one out."
            )
    (first_place, first), *rest = named.values()
    for where, engram in rest:
        _check_same_trunk(first_place, first, where, engram)
        alone = next((e for e in (first, engram) if e.spec.parts.changes_trunk), None)
        if alone is not None:
            raise EngramError(
                f"{alone.spec.name!r} has the regime {alone.spec.regime!r}, which changes the "
                f"trunk's own tokens, so {first.spec.name!r} and {engram.spec.name!r} cannot share "
                "a pass; keep them apart, or train with the regime masked."
            )
    for where, engram in named.values():
        _check_parents(where, engram, named)
    return _parents_first([engram for _, engram in named.values()])


def _check_same_trunk(where: str, engram: Engram, other_place: str, other: Engram) -> None:
    if engram.trunk.fingerprint != other.trunk.fingerprint:
        raise EngramError(
            f"{where} was trained on {printable(engram.trunk.source)} (fingerprint "
            f"{engram.trunk.fingerprint[:12]}), but {other_place} on "
            f"{printable(other.trunk.source)} ({other.trunk.fingerprint[:12]}); engrams share a "
            "pass only on the same trunk."
        )
    if engram.preprocessing != other.preprocessing:
        both = [e.preprocessing and e.preprocessing.to_dict() for e in (engram, other)]
        raise EngramError(
            f"{where} was trained with the preprocessing {json.dumps(both[0])}, but {other_place} "
            f"with {json.dumps(both[1])}; one pass sees one picture."
        )
    other.check_trunk(engram.trunk, engram.preprocessing)


def _check_parents(where: str, engram: Engram, named: Mapping[str, tuple[str, Engram]]) -> None:
    for parent, content in engram.parents.items():
        if parent not in named:
            raise EngramError(
                f"{where} extends {parent!r} (content {content[:12]}), which is not among the "
                "engrams given; add its file."
            )
        there, given = named[parent]
        if given.content != content:
            raise EngramError(
                f"{where} extends a {parent!r} with the content {content[:12]}, but {there} has "
                f"{given.content[:12]}; give the one it was trained with."
            )


def _parents_first(engrams: list[Engram]) -> tuple[Engram, ...]:
    """In the given order, but every engram behind its parents.

    There are no cycles: a content hash is made from those of the parents.
    """
    ordered: dict[str, Engram] = {}
    while len(ordered) < len(engrams):
        for engram in engrams:
            if engram.parents.keys() <= ordered.keys():
                ordered.setdefault(engram.spec.name, engram)
    return tuple(ordered.values())


def load_trunk_of(engram: Engram, backbone: PathOrHubId | None) -> ViT:
    """The trunk of an engram, read as it was when the engram was made."""
    info = engram.trunk
    try:
        return load_trunk(
            info.source if backbone is None else backbone,
            preprocessing=engram.preprocessing,
            antialias=info.antialias,
            heads=info.heads,
            activation=cast("Activation", info.activation),
        )
    except EngramError as error:
        if backbone is not None:
            raise
        raise EngramError(
            f"{error} The engram {engram.spec.name!r} names {printable(info.source)!r} as its "
            "trunk; say with --backbone (in Python, backbone=...) where it lies today."
        ) from None
