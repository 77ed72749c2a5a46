"""Write bundles: all of one, or a change to one that others may be reading or changing.

A new bundle is written into a temporary folder and renamed. A change copies a version that is about
to be replaced into `versions/` first, so that whoever reads a manifest finds what it lists, also
while another process replaces it and after a process was killed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from engram.errors import EngramError, flag
from engram.store.bundles import (
    VERSIONS,
    Bundle,
    OlderVersion,
    is_bundle,
    read_bundle,
    read_engrams,
    read_manifest,
    stored_version,
    version_file,
)
from engram.store.engram import BackboneInfo, Engram, load_engram_backbone
from engram.store.format import read_engram, serialise_engram, write_engram
from engram.store.remote import MANIFEST
from engram.util.files import (
    check_replaceable,
    make_folder,
    open_regular,
    replaced_folder,
    sync_folder,
    write_atomically,
)
from engram.util.hub import PathOrHubId
from engram.util.text import join_names

LOCK = ".bundle.lock"  # in the folder, held by whoever changes the bundle
_LOCK_SECONDS = 10


class BundleChanged(EngramError):
    """A bundle on disk is not the one that was to be changed."""


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
    """The older versions of the tasks that stay when `new` replaces the bundle in the folder."""
    with contextlib.suppress(EngramError):  # it may be damaged
        old, names = read_bundle(folder), {engram.spec.name for engram in new.engrams}
        staying = tuple(engram for engram in old.engrams if engram.spec.name in names)
        if staying and old.manifest()["backbone"] == new.manifest()["backbone"]:
            older = {name: own for name, own in old.older.items() if name in names}
            return Bundle(folder, staying, older).plus(*new.engrams).older
    return {}


def _write(bundle: Bundle, folder: Path) -> None:
    with replaced_folder(folder) as building:
        for engram in bundle.engrams:
            write_engram(building / engram.file_name, engram)
        for task, versions in bundle.older.items():
            make_folder(building / VERSIONS)
            for version in versions:
                kept = version_file(task, version.content)
                write_engram(building / kept, stored_version(folder, task, version.content))
        write_atomically(building / MANIFEST, bundle.manifest_bytes())


def update_bundle(old: Bundle, new: Bundle) -> None:
    """Write a bundle that a method of the one in the folder made from it, such as `plus`.

    The manifest is written last, each file atomically: a crash leaves one of the two bundles, and
    perhaps a file that it does not list. An unlisted file with the name of a new engram is not
    overwritten. If another process changed the bundle first, this is a `BundleChanged`.
    """
    folder = old.folder
    with _lock(folder):
        if read_manifest(folder) != old.manifest():
            raise BundleChanged(
                f"{folder / MANIFEST} was changed by somebody else since it was read, and is left "
                "as it is; read the bundle again."
            )
        others = {e.spec.name: e for e in new.engrams if e not in old.engrams}
        replaced = [e for e in old.engrams if others.get(e.spec.name, e).content != e.content]
        added = {engram.file_name: serialise_engram(engram) for engram in others.values()}
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
        gone = [e for e in old.engrams if e.file_name not in new.files]
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
    """Let an older version of a task (`Bundle.before`) answer again; keep what it replaces."""
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


def _has_bytes(path: Path, data: bytes) -> bool:
    with contextlib.suppress(OSError), open_regular(path) as file:
        return file.read() == data
    return False


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace a folder that has anything but a bundle in it."""
    known = {MANIFEST, LOCK, VERSIONS} if is_bundle(folder) else set()
    for entry in read_manifest(folder)["engrams"] if known else ():
        versions = [entry, *entry.get("older", ()), {"content": entry.get("shadow", "")}]
        known |= {version_file(entry["task"], version["content"]) for version in versions}
        known.add(entry["file"])
    check_replaceable(folder, "bundle", known)
