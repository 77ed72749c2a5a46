"""A bundle: a folder of engrams that can share one pass through one backbone.

`bundle.json`, the manifest, lists the engrams, parents first, each with its content hash. A task
that is replaced stays in the bundle as an older version, and a shadow is a version that does not
answer yet. Both are files in `versions/`, named after their content. `compose.py` writes bundles.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from engram.errors import EngramError
from engram.store.engram import FORMAT, Engram, Located, in_order, origin
from engram.store.format import HASH, check_format, read_engram
from engram.store.remote import MANIFEST, local_path
from engram.tasks.spec import NAME
from engram.util.documents import MAX_BYTES, parse_json
from engram.util.files import open_regular
from engram.util.hub import PathOrHubId
from engram.util.schema import Array, Invalid, Object, String
from engram.util.text import join_names, printable

VERSIONS = "versions"  # in the folder: older versions of tasks, and shadows
MAX_OLDER = 5  # versions of a task that are kept; the oldest ones are deleted
_OLDER = Object({"content": HASH, "until": String(100)})
_ENTRY = Object(
    {"task": String(), "file": String(), "content": HASH},
    {"older": Array(_OLDER, 1, 1_000), "shadow": HASH},
    others=True,
)
_SCHEMA = Object({"engrams": Array(_ENTRY, 1, 100_000)}, others=True)


@dataclass(frozen=True)
class OlderVersion:
    """A version of a task that another one has replaced."""

    content: str
    until: str  # date and time when it was replaced


@dataclass(frozen=True)
class Bundle:
    """A folder of engrams that fit together."""

    folder: Path
    engrams: tuple[Engram, ...]  # parents first
    older: Mapping[str, tuple[OlderVersion, ...]] = field(default_factory=dict)  # newest first
    shadows: Mapping[str, Engram] = field(default_factory=dict)  # new versions that don't answer

    def manifest(self) -> dict[str, Any]:
        """The document in `bundle.json`."""
        first = self.engrams[0]
        return {
            "format": FORMAT,
            "backbone": {n: getattr(first.backbone, n) for n in ("source", "fingerprint")},
            "preprocessing": first.preprocessing and first.preprocessing.to_dict(),
            "engrams": [self._entry(engram) for engram in self.engrams],
        }

    def _entry(self, engram: Engram) -> dict[str, Any]:
        task = engram.spec.name
        entry: dict[str, Any] = {"task": task, "file": engram.file_name, "content": engram.content}
        if self.older.get(task):
            entry["older"] = [vars(version).copy() for version in self.older[task]]
        if task in self.shadows:
            entry["shadow"] = self.shadows[task].content
        return entry

    def manifest_bytes(self) -> bytes:
        return (json.dumps(self.manifest(), indent=1) + "\n").encode()

    def engram(self, name: str) -> Engram:
        """The engram of a task; an EngramError if there is no such task."""
        for engram in self.engrams:
            if engram.spec.name == name:
                return engram
        names = [e.spec.name for e in self.engrams]
        raise EngramError(f"{self.folder} has no task {name!r}; it has {join_names(names)}.")

    def plus(self, *engrams: Engram) -> Bundle:
        """The bundle with these engrams, if they fit the others. Nothing is written.

        One that has the name of another replaces it, and the other becomes an older version. A task
        that others extend is replaced only together with those: they learned to read the old one.
        """
        new = {engram.spec.name: engram for engram in engrams}
        now = origin()["created"]
        older, shadows = dict(self.older), dict(self.shadows)
        for old in self.engrams:
            name = old.spec.name
            if name not in new or new[name].content == old.content:
                continue
            content = new[name].content
            rest = [version for version in older.get(name, ()) if version.content != content]
            older[name] = (OlderVersion(old.content, now), *rest)[:MAX_OLDER]
            if name in shadows and shadows[name].content == content:
                del shadows[name]
        members = {e.spec.name: e for e in self.engrams} | new
        ordered = in_order([(e.file_name, e) for e in members.values()])
        bundle = replace(self, engrams=ordered, older=older, shadows=shadows)
        for shadow in shadows.values():
            bundle.check_shadow(shadow)
        return bundle

    def minus(self, name: str) -> Bundle:
        """The bundle without an engram, its older versions and its shadow. Nothing is written."""
        self.engram(name)
        children = [e.spec.name for e in self.engrams if name in e.parents]
        if children:
            raise EngramError(f"{name!r} is extended by {', '.join(children)}; remove those first.")
        rest = tuple(e for e in self.engrams if e.spec.name != name)
        if not rest:
            raise EngramError(
                f"{name!r} is the only task of the bundle, which needs at least one; add another "
                "one first, or delete the folder."
            )
        older = {task: versions for task, versions in self.older.items() if task != name}
        shadows = {task: shadow for task, shadow in self.shadows.items() if task != name}
        return replace(self, engrams=rest, older=older, shadows=shadows)

    def with_shadow(self, shadow: Engram) -> Bundle:
        """The bundle with a new version of a task that does not answer yet. Nothing is written."""
        self.check_shadow(shadow)
        return replace(self, shadows={**self.shadows, shadow.spec.name: shadow})

    def without_shadow(self, name: str) -> Bundle:
        """The bundle without the shadow of a task. Nothing is written."""
        self.shadow(name)
        return replace(self, shadows={n: e for n, e in self.shadows.items() if n != name})

    def shadow(self, name: str) -> Engram:
        """The shadow of a task; an EngramError if it has none."""
        if name not in self.shadows:
            raise EngramError(f"{self.engram(name).spec.name!r} has no shadow.")
        return self.shadows[name]

    def check_shadow(self, shadow: Engram) -> None:
        """Refuse a shadow that cannot be compared with its task, or could not replace it."""
        name = shadow.spec.name
        current = self.engram(name)
        if shadow.content == current.content:
            raise EngramError(f"This {name!r} is the one that answers; it needs no shadow.")
        if shadow.spec.kind != current.spec.kind:
            raise EngramError(
                f"The shadow of {name!r} is a task of {shadow.spec.kind}, and the one that answers "
                f"of {current.spec.kind}, so their answers cannot be compared."
            )
        try:
            in_order([(e.file_name, shadow if e is current else e) for e in self.engrams])
        except EngramError as error:
            raise EngramError(f"The shadow of {name!r} does not fit: {error}") from None

    def before(self, name: str, content: str = "") -> Engram:
        """Read an older version of a task: the last one, or that whose content begins so."""
        self.engram(name)
        versions = [v for v in self.older.get(name, ()) if v.content.startswith(content)]
        if not versions:
            kept = [v.content[:16] for v in self.older.get(name, ())]
            which = f"no older version {content!r}" if content else "no older version"
            raise EngramError(
                f"{name!r} has {which} in {self.folder}; it has {join_names(kept) or 'none'}."
            )
        return read_version(self.folder, name, versions[0].content)

    @property
    def files(self) -> set[str]:
        """The files that the manifest stands for, by their paths in the folder."""
        kept = {(task, version.content) for task, own in self.older.items() for version in own} | {
            (task, shadow.content) for task, shadow in self.shadows.items()
        }
        return {e.file_name for e in self.engrams} | {version_file(*one) for one in kept}


def version_file(task: str, content: str) -> str:
    """The path of a version of a task in the folder of a bundle."""
    return f"{VERSIONS}/{task}-{content[:16]}.safetensors"


def read_version(folder: Path, task: str, content: str) -> Engram:
    """Read an older version of a task, or its shadow."""
    return _read_listed(folder / version_file(task, content), task, content)


def is_bundle(folder: PathOrHubId) -> bool:
    """Whether a folder has the manifest of a bundle. `read_bundle` verifies the rest."""
    return (Path(folder) / MANIFEST).is_file()


def read_engrams(sources: Iterable[PathOrHubId]) -> tuple[Engram, ...]:
    """The engrams of files and bundles, here or on the Hub, parents first, if they fit together."""
    found: list[Located] = []
    for source in sources:
        path = local_path(source)
        if is_bundle(path):
            bundle = read_bundle(path)
            found += [(str(bundle.folder / e.file_name), e) for e in bundle.engrams]
        else:
            found.append((os.fspath(source), read_engram(path)))
    return in_order(found)


def manifest_state(folder: Path) -> tuple[int, ...]:
    """A value that changes whenever the manifest is written; an OSError if there is none."""
    found = (folder / MANIFEST).stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def unlisted_files(bundle: Bundle) -> list[str]:
    """Engrams in the folder that the manifest does not list, left by a crash or by a person."""
    listed = {engram.file_name for engram in bundle.engrams}
    return sorted(p.name for p in bundle.folder.glob("*.safetensors") if p.name not in listed)


# Reading


def read_bundle(folder: PathOrHubId) -> Bundle:
    """Read and verify a bundle: its manifest, every engram, and that they fit together."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    try:
        return _read_bundle(folder, manifest)
    except EngramError:
        changed = read_manifest(folder)
        if changed == manifest:
            raise
        return _read_bundle(folder, changed)  # it was changed meanwhile, and files were deleted


def _read_bundle(folder: Path, manifest: Mapping[str, Any]) -> Bundle:
    found: list[Located] = []
    older, shadows = dict[str, tuple[OlderVersion, ...]](), dict[str, Engram]()
    for entry in manifest["engrams"]:
        task = entry["task"]
        found.append((str(folder / entry["file"]), stored_version(folder, task, entry["content"])))
        if "older" in entry:
            older[task] = tuple(OlderVersion(**version) for version in entry["older"])
        if "shadow" in entry:
            shadows[task] = read_version(folder, task, entry["shadow"])
    bundle = Bundle(folder, in_order(found), older, shadows)
    for what in ("backbone", "preprocessing"):
        listed, actual = manifest.get(what), bundle.manifest()[what]
        if listed != actual:
            raise EngramError(
                f"{folder / MANIFEST} says that its {what} is "
                f"{printable(json.dumps(listed), 300)}, but its engrams have {json.dumps(actual)}; "
                "compose the bundle again."
            )
    return bundle


def stored_version(folder: Path, task: str, content: str) -> Engram:
    """Read a version of a task, from its file or, where that holds another one, from its copy."""
    try:
        return _read_listed(folder / f"{task}.safetensors", task, content)
    except EngramError:
        with contextlib.suppress(EngramError):
            return read_version(folder, task, content)
        raise


def _read_listed(path: Path, task: str, content: str) -> Engram:
    engram = read_engram(path)
    if (engram.spec.name, engram.content) != (task, content):
        raise EngramError(
            f"{path} holds {engram.spec.name!r} with the content {engram.content[:12]}, but "
            f"{MANIFEST} lists {task!r} with {content[:12]}; compose the bundle again, or get a "
            "good copy."
        )
    return engram


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check `bundle.json` by itself, without the engrams."""
    path = folder / MANIFEST
    try:
        with open_regular(path) as file:
            manifest = parse_json(file.read(MAX_BYTES + 1))
        check_format(path, manifest)
        _SCHEMA.check(manifest, "")
        for entry in manifest["engrams"]:  # no other name: none reaches into other folders
            task, file = entry["task"], entry["file"]
            if not NAME.fullmatch(task) or file != f"{task}.safetensors":
                raise Invalid(f"the file {file!r} for the task {task!r}")
    except OSError as error:
        raise EngramError(
            f"{folder} is not a bundle: {MANIFEST} cannot be read ({error.strerror or error}); "
            "`engram compose` makes one."
        ) from None
    except ValueError as error:
        raise EngramError(
            f"{path} is damaged ({printable(str(error))}); compose the bundle again, or get a good "
            "copy."
        ) from None
    return cast("dict[str, Any]", manifest)
