"""A bundle: a folder of engrams that can share one pass through one backbone.

`bundle.json`, the manifest, lists the engrams, parents first, each with its content hash. A bundle
is written into a temporary folder and renamed, so it is always complete. If it replaces another
bundle, that one is renamed first; a process that is killed between the two renames leaves both
under temporary names.

A task that is replaced stays in the bundle as an older version, and a shadow is a version that does
not answer yet. Both are files in `versions/`, named after their content. A version that is about to
be replaced is written there before its own file is, so that whoever reads a manifest finds what it
lists, also while another process replaces it and after a process was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from filelock import FileLock, Timeout

from engram.backbones.load import check_dtype, load_backbone
from engram.errors import EngramError
from engram.store.engram import FORMAT, BackboneInfo, Engram, origin
from engram.store.format import HASH, VERSION, read_engram, serialise_engram, write_engram
from engram.store.remote import MANIFEST, local_path
from engram.tasks.spec import NAME
from engram.util.documents import MAX_BYTES, parse_json
from engram.util.files import (
    check_renamable,
    make_folder,
    open_regular,
    replace_folder,
    sync_folder,
    write_atomically,
)
from engram.util.flag_names import flag
from engram.util.hub import PathOrHubId
from engram.util.schema import Array, Invalid, Object, String
from engram.util.text import join_names, printable
from engram.vit import ViT

Located = tuple[str, Engram]  # where an engram was found, for errors, and the engram

LOCK = ".bundle.lock"  # in the folder, held by whoever changes the bundle
VERSIONS = "versions"  # in the folder: older versions of tasks, and shadows
MAX_OLDER = 5  # versions of a task that are kept; the oldest ones are deleted
_LOCK_SECONDS = 10
_OLDER = Object({"content": HASH, "until": String(100)})
_ENTRY = Object(
    dict.fromkeys(("task", "file", "content"), String()),
    {"older": Array(_OLDER, 1, 1_000), "shadow": HASH},
    others=True,
)
_SCHEMA = Object({"engrams": Array(_ENTRY, 1, 100_000)}, others=True)


class BundleChanged(EngramError):
    """A bundle on disk is not the one that was to be changed."""


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
        """The bytes of `bundle.json`."""
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
        for name, shadow in shadows.items():
            bundle.check_shadow(name, shadow)
        return bundle

    def minus(self, name: str) -> Bundle:
        """The bundle without an engram, its older versions and its shadow. Nothing is written.

        An engram that others extend, and the last one, cannot be removed.
        """
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
        older, shadows = (
            {task: one for task, one in kept.items() if task != name}
            for kept in (self.older, self.shadows)
        )
        return replace(self, engrams=rest, older=older, shadows=shadows)  # type: ignore[arg-type]

    def with_shadow(self, shadow: Engram) -> Bundle:
        """The bundle with a new version of a task that does not answer yet. Nothing is written."""
        name = shadow.spec.name
        self.check_shadow(name, shadow)
        return replace(self, shadows={**self.shadows, name: shadow})

    def without_shadow(self, name: str) -> Bundle:
        """The bundle without the shadow of a task. Nothing is written."""
        self.shadow(name)
        return replace(self, shadows={n: e for n, e in self.shadows.items() if n != name})

    def shadow(self, name: str) -> Engram:
        """The shadow of a task; an EngramError if it has none."""
        if name not in self.shadows:
            raise EngramError(f"{self.engram(name).spec.name!r} has no shadow.")
        return self.shadows[name]

    def check_shadow(self, name: str, shadow: Engram) -> None:
        """Refuse a shadow that cannot be compared with its task, or could not replace it."""
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
    """Read a version of a task, and verify that it is that one."""
    path = folder / version_file(task, content)
    engram = read_engram(path)
    if (engram.spec.name, engram.content) != (task, content):
        raise EngramError(
            f"{path} holds {engram.spec.name!r} with the content {engram.content[:16]}; it is not "
            "the version that its name says. Get a good copy of the bundle."
        )
    return engram


def is_bundle(folder: PathOrHubId) -> bool:
    """Whether a folder has the manifest of a bundle. `read_bundle` verifies the rest."""
    return (Path(folder) / MANIFEST).is_file()


def read_engrams(sources: Iterable[PathOrHubId]) -> tuple[Engram, ...]:
    """The engrams of files and bundles, parents first. An EngramError if they do not fit together.

    Either may be on the Hub: `hf:owner/name`, `hf:owner/name/FILE`.
    """
    found: list[Located] = []
    for source in sources:
        path = local_path(source)
        if is_bundle(path):
            bundle = read_bundle(path)
            found += [(str(bundle.folder / e.file_name), e) for e in bundle.engrams]
        else:
            found.append((os.fspath(source), read_engram(path)))
    return in_order(found)


# Engrams that fit together


def in_order(found: Sequence[Located]) -> tuple[Engram, ...]:
    """The engrams, parents first, after checking everything that needs no backbone."""
    if not found:
        raise EngramError("There are no engrams; give at least one file or bundle.")
    by_name: dict[str, Located] = {}
    for where, engram in found:
        other_place, other = by_name.setdefault(engram.spec.name, (where, engram))
        if other.content != engram.content:
            raise EngramError(
                f"{other_place} and {where} are both called {engram.spec.name!r} but differ "
                f"(content {other.content[:12]} and {engram.content[:12]}); leave one out."
            )
    (first_place, first), *rest = by_name.values()
    for where, engram in rest:
        check_same_backbone(first_place, first, where, engram, "share a pass")
        alone = next((e for e in (first, engram) if not e.spec.method.shares_pass), None)
        if alone is not None:
            raise EngramError(
                f"{alone.spec.name!r} has the regime {alone.spec.regime!r}, which changes the "
                f"backbone's own tokens, so {first.spec.name!r} and {engram.spec.name!r} cannot "
                "share a pass; keep them apart, or train with the regime masked."
            )
    for where, engram in by_name.values():
        for parent, content in engram.parents.items():
            if parent not in by_name:
                raise EngramError(
                    f"{where} extends {parent!r} (content {content[:12]}), which is not among the "
                    "engrams given; add its file."
                )
            place, given = by_name[parent]
            if given.content != content:
                raise EngramError(
                    f"{where} extends a {parent!r} with the content {content[:12]}, but {place} "
                    f"has {given.content[:12]}; give the one it was trained with."
                )
    ordered: dict[str, Engram] = {}
    while len(ordered) < len(by_name):  # no cycles: a content includes those of the parents
        for name, (_, engram) in by_name.items():
            if engram.parents.keys() <= ordered.keys():
                ordered.setdefault(name, engram)
    return tuple(ordered.values())


def check_same_backbone(
    place: str, engram: Engram, where: str, other: Engram, purpose: str
) -> None:
    """Refuse two engrams of different backbones or preprocessings; `purpose` says for what."""
    found = other.difference(engram.backbone, engram.preprocessing)
    if found:
        raise EngramError(
            f"{where} was trained {found[0]}, as {place} was; engrams {purpose} only on the same "
            "backbone, with the same preprocessing."
        )


# Writing


def compose(
    paths: Iterable[PathOrHubId],
    out: str | os.PathLike[str],
    *,
    backbone: PathOrHubId | None = None,
    overwrite: bool = False,
) -> Bundle:
    """Put engrams for one backbone into a bundle, a folder that `load_model` and `engram serve`
    read.

    Args:
        paths: Files of engrams, or bundles whose engrams are taken over.
        out: The folder to write. A bundle that is there may get new tasks this way; any other
            folder that is not empty is refused.
        backbone: Path or Hub id of the backbone, to check that the engrams fit it.
        overwrite: Replace or leave out tasks of a bundle that is there.

    Returns:
        The bundle.

    Raises:
        EngramError: The engrams do not fit together, or not the backbone, or a task of the bundle
            that is there would be lost.

    Examples:
        >>> bundle = engram.compose(["flowers.safetensors"], "garden")
        >>> [what.spec.name for what in bundle.engrams]
        ['flowers']
    """
    engrams = read_engrams(paths)
    if backbone is not None:
        vit = load_engram_backbone(engrams[0], backbone)
        for engram in engrams:
            engram.check_backbone(BackboneInfo.from_backbone(vit), vit.preprocessing)
    return write_bundle(engrams, out, overwrite=overwrite)


def write_bundle(
    engrams: Sequence[Engram], out: str | os.PathLike[str], *, overwrite: bool
) -> Bundle:
    """Write engrams that fit together, parents first, as a bundle: whole or not at all.

    Without `overwrite`, every task of a bundle that is there has to be among them. Versions of the
    tasks that stay are kept, and so is what is replaced.
    """
    folder = Path(os.path.realpath(out))
    bundle = Bundle(Path(out), tuple(engrams))
    with _lock(folder) if is_bundle(folder) else contextlib.nullcontext():
        _check_replaceable(folder)
        if is_bundle(folder):
            contents = {engram.spec.name: engram.content for engram in engrams}
            entries = read_manifest(folder)["engrams"]
            lost = [e["task"] for e in entries if contents.get(e["task"]) != e["content"]]
            if lost and not overwrite:
                raise BundleChanged(
                    f"{out} is a bundle whose {'task' if len(lost) == 1 else 'tasks'} "
                    f"{join_names(lost)} would be replaced or removed; choose another "
                    f"{flag('out')}, compose that bundle with the new files to keep them, or give "
                    f"them up with {flag('overwrite', True)}."
                )
            bundle = replace(bundle, older=_older_after(folder, bundle))
        _write(bundle, folder)
    return bundle


def _older_after(folder: Path, new: Bundle) -> Mapping[str, tuple[OlderVersion, ...]]:
    """The older versions of the tasks that stay when `new` replaces the bundle in the folder.

    Of a bundle that is damaged or has another backbone there are none.
    """
    with contextlib.suppress(EngramError):
        old, names = read_bundle(folder), {engram.spec.name for engram in new.engrams}
        staying = tuple(engram for engram in old.engrams if engram.spec.name in names)
        if staying and old.manifest()["backbone"] == new.manifest()["backbone"]:
            older = {name: own for name, own in old.older.items() if name in names}
            return Bundle(folder, staying, older).plus(*new.engrams).older
    return {}


def _write(bundle: Bundle, folder: Path) -> None:
    building = folder.with_name(f".engram-{secrets.token_hex(8)}.tmp")
    try:
        building.mkdir(parents=True)
        for engram in bundle.engrams:
            write_engram(building / engram.file_name, engram)
        for task, versions in bundle.older.items():
            (building / VERSIONS).mkdir(exist_ok=True)
            for version in versions:
                kept = version_file(task, version.content)
                write_engram(building / kept, _stored(folder, task, version.content))
        write_atomically(building / MANIFEST, bundle.manifest_bytes())
        replace_folder(building, folder)
    except OSError as error:
        raise EngramError(
            f"The bundle {bundle.folder} cannot be written ({error.strerror or error}); check the "
            "folder, its permissions and the free space. An old bundle is unchanged."
        ) from None
    finally:
        shutil.rmtree(building, ignore_errors=True)


def update_bundle(old: Bundle, new: Bundle) -> None:
    """Write a bundle that a method of the one in the folder made from it, such as `plus`.

    Versions and new engrams are written first, then the manifest, each atomically. A crash leaves
    one of the two bundles, and perhaps a file that it does not list. An unlisted file with the name
    of a new engram is not overwritten, unless it is that engram.

    Of several processes that change one bundle, also on machines that share the folder, one writes
    at a time. If another was first, this is a `BundleChanged`, and nothing is written.
    """
    folder = old.folder
    with _lock(folder):
        if read_manifest(folder) != old.manifest():
            raise BundleChanged(
                f"{folder / MANIFEST} was changed by somebody else since it was read, and is left "
                "as it is; read the bundle again."
            )
        others = [engram for engram in new.engrams if engram not in old.engrams]
        contents = {engram.spec.name: engram.content for engram in others}
        replaced = [
            e for e in old.engrams if e.spec.name in contents and e.content != contents[e.spec.name]
        ]
        added = {engram.file_name: serialise_engram(engram) for engram in others}
        for name in added.keys() - old.files:
            if (folder / name).exists() and not _has_bytes(folder / name, added[name]):
                raise EngramError(
                    f"{folder} has another {name}, which is not in the bundle; move it away. "
                    "Nothing was changed."
                )
        shadows = [e for e in new.shadows.values() if e not in old.shadows.values()]
        if replaced or shadows:
            make_folder(folder / VERSIONS)
            sync_folder(folder)
        for engram in (*replaced, *shadows):  # before the files that they are read from
            write_engram(folder / version_file(engram.spec.name, engram.content), engram)
        for name, data in added.items():
            write_atomically(folder / name, data)
        write_atomically(folder / MANIFEST, new.manifest_bytes())
        staying = {engram.file_name for engram in new.engrams}
        gone = [engram for engram in old.engrams if engram.file_name not in staying]
        left = {version_file(e.spec.name, e.content) for e in gone}  # by a crash
        for unlisted in (old.files | left) - new.files:
            with contextlib.suppress(OSError):  # the manifest no longer lists it
                (folder / unlisted).unlink()


def add_to_bundle(folder: Path, paths: Sequence[Path]) -> None:
    """Put engrams into a bundle, next to the others; a task of the same name is replaced."""
    mine = [read_engram(path) for path in paths]
    while True:
        with contextlib.suppress(BundleChanged):  # by somebody else: what they wrote comes first
            if not is_bundle(folder):
                compose(paths, folder)
                return
            old = read_bundle(folder)
            new = old.plus(*mine)
            if new.manifest() != old.manifest():
                update_bundle(old, new)
            return


def roll_back(folder: Path, name: str, content: str = "") -> Bundle:
    """Let an older version of a task answer again, and keep the one that it replaces.

    It is the one before, or that whose content begins with `content`. Gives the bundle.
    """
    old = read_bundle(folder)
    new = old.plus(old.before(name, content))
    update_bundle(old, new)
    return new


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a bundle, which ends with the process that holds it."""
    path = folder / LOCK
    if not is_bundle(folder):  # FileLock would create the folder
        raise EngramError(
            f"{folder} is no bundle any more, because it has no file {MANIFEST}; put it back."
        )
    try:
        with FileLock(path, timeout=_LOCK_SECONDS):
            yield
    except Timeout:
        raise EngramError(
            f"Another process has been changing {folder} for {_LOCK_SECONDS} seconds; try again "
            "later."
        ) from None
    except OSError as error:
        raise EngramError(
            f"{path} cannot be locked ({error.strerror or error}); check the folder and its "
            "permissions."
        ) from None


def manifest_state(folder: Path) -> tuple[int, ...]:
    """A value that changes whenever the manifest is written; an OSError if there is none."""
    found = (folder / MANIFEST).stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _has_bytes(path: Path, data: bytes) -> bool:
    with contextlib.suppress(OSError), open_regular(path) as file:
        return file.read() == data
    return False


def unlisted_files(bundle: Bundle) -> list[str]:
    """Engrams in the folder that the manifest does not list, left by a crash or by a person."""
    listed = {engram.file_name for engram in bundle.engrams}
    return sorted(p.name for p in bundle.folder.glob("*.safetensors") if p.name not in listed)


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace a folder that has anything but a bundle in it."""
    check_renamable(folder)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise EngramError(f"{folder} is a file; give the path of a folder for the bundle.")
    others = {path.name for path in folder.iterdir()}
    what = "is not a bundle"
    if is_bundle(folder):
        what = "is a bundle with other files in it"
        entries = read_manifest(folder)["engrams"]
        others |= {f"{VERSIONS}/{path.name}" for path in (folder / VERSIONS).glob("*")}
        others -= {MANIFEST, LOCK, VERSIONS, *(entry["file"] for entry in entries)}
        for entry in entries:
            versions = [entry, *entry.get("older", ()), {"content": entry.get("shadow", "")}]
            others -= {version_file(entry["task"], version["content"]) for version in versions}
    if others:
        raise EngramError(
            f"The folder {folder} {what} ({printable(', '.join(sorted(others)[:3]))}), and would "
            "be replaced; choose another folder, or move those files away."
        )


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
        found.append((str(folder / entry["file"]), _stored(folder, task, entry["content"])))
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


def _stored(folder: Path, task: str, content: str) -> Engram:
    """Read a version of a task, from its file or, where that holds another one, from its copy."""
    path = folder / f"{task}.safetensors"
    if not path.exists() and (folder / version_file(task, content)).exists():
        return read_version(folder, task, content)
    engram = read_engram(path)
    if (engram.spec.name, engram.content) == (task, content):
        return engram
    with contextlib.suppress(EngramError):
        return read_version(folder, task, content)
    raise EngramError(
        f"{path} holds {engram.spec.name!r} with the content {engram.content[:12]}, but {MANIFEST} "
        f"lists {task!r} with {printable(content[:12])}; compose the bundle again."
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check `bundle.json` by itself, without the engrams."""
    path = folder / MANIFEST
    try:
        with open_regular(path) as file:
            manifest = parse_json(file.read(MAX_BYTES + 1))
        VERSION.check(manifest, "")
        if manifest["format"] == FORMAT:
            _SCHEMA.check(manifest, "")
            for entry in manifest["engrams"]:  # no other name: none reaches into other folders
                task, file = entry["task"], entry["file"]
                if not NAME.fullmatch(task) or file != f"{task}.safetensors":
                    raise Invalid(f"the file {file!r} for the task {task!r}")
                HASH.check(entry["content"], f"the content of {task}")
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
    if manifest["format"] != FORMAT:
        raise EngramError(
            f"{path} has the format {manifest['format']}, and this version of engram reads format "
            f"{FORMAT}; install a newer version of Engram."
        )
    return cast("dict[str, Any]", manifest)


def load_engram_backbone(engram: Engram, backbone: PathOrHubId | None, dtype: str = "fp32") -> ViT:
    """Load the backbone of an engram, with the settings that it was trained with.

    `backbone` is the path or Hub id of the backbone, if it is not where the engram says.
    """
    info = engram.backbone
    check_dtype(dtype)
    try:
        return load_backbone(
            info.source if backbone is None else backbone,
            preprocessing=engram.preprocessing,
            antialias=info.antialias,
            heads=info.heads,
            activation=info.activation,
            dtype=dtype,
        )
    except EngramError as error:
        if backbone is not None:
            raise
        raise EngramError(
            f"{error} The engram {engram.spec.name!r} names {printable(info.source)!r} as its "
            f"backbone; give its path or Hub id with {flag('backbone')}."
        ) from None
