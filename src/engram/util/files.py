"""Files and folders that are replaced completely or not at all, and files that have an end."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO

from engram.errors import EngramError
from engram.util.text import printable

_LITTER = (".DS_Store", "Thumbs.db", "desktop.ini")  # that file browsers leave in a folder


def private(path: str, flags: int) -> int:
    """Opens a file that only its owner may read: `open(path, "wb", opener=private)`."""
    return os.open(path, flags, 0o600)


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file to read it. Whatever could block or never end (a pipe, a device) is an OSError.

    A file that is replaced by a pipe between the two looks at it is not waited for either.
    """

    def opener(name: str, flags: int) -> int:
        _check_readable(os.stat(name).st_mode)  # opening a device may already do something
        flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
        handle = os.open(name, flags)
        try:
            _check_readable(os.fstat(handle).st_mode)
        except OSError:
            os.close(handle)
            raise
        return handle

    return open(path, "rb", opener=opener)


def _check_readable(mode: int) -> None:
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe, a device or a socket"
        raise OSError(f"it is {what}, not a regular file")


def make_folder(folder: Path) -> None:
    """Create a folder, and those above it; one that exists is left as it is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngramError(
            f"The folder {folder} cannot be created ({error.strerror or error}); choose another."
        ) from None


def make_private_folder(folder: Path) -> None:
    """Create a folder that only its owner may read; one that exists is left as it is."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def write_atomically(path: str | Path, data: bytes, *, owner_only: bool = False) -> None:
    """Write a file through a temporary one, fsync and rename. A failure leaves the old file.

    With `owner_only`, nobody but the owner may read it.
    """
    with replaced(path, owner_only=owner_only) as file:
        file.write(data)


@contextmanager
def replaced(path: str | Path, *, owner_only: bool = False) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of `path` at the end, as in `write_atomically`."""
    target = Path(os.path.realpath(path))  # follow a link, to replace the file and not the link
    _check_regular_file(path, target)
    temporary = target.with_name(f".engram-{secrets.token_hex(8)}.tmp")
    try:
        with _explained(path, "file"):
            with open(temporary, "xb", opener=private if owner_only else None) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    sync_folder(target.parent)


@contextmanager
def _explained(path: str | Path, what: str) -> Iterator[None]:
    """Say what to do about a file or folder that cannot be written."""
    try:
        yield
    except OSError as error:
        raise EngramError(
            f"{path} cannot be written ({error.strerror or error}); check the folder, its "
            f"permissions and the free space. The old {what}, if any, is unchanged."
        ) from None


def _check_regular_file(path: str | Path, target: Path) -> None:
    """A rename must not replace a folder, a pipe or a device."""
    if os.path.exists(target) and not os.path.isfile(target):  # unlike Path's, these take any name
        what = "a folder" if os.path.isdir(target) else "not a regular file"
        raise EngramError(f"{path} cannot be written (it is {what}); choose another path.")


def check_writable(path: str | Path, other: str = "path", parents: bool = False) -> None:
    """Refuse a path where no file can be written later, before work is spent on it.

    The error message asks for another `other`. With `parents`, missing folders are created.
    """
    target = Path(os.path.realpath(path))
    _check_regular_file(path, target)
    try:
        if parents:
            target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise EngramError(
            f"{path} cannot be written ({error.strerror or error}); choose another {other}."
        ) from None


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the system can synchronise a folder."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def check_renamable(folder: Path) -> None:
    """Refuse to replace the current folder or a mount point."""
    if folder.exists() and (os.path.samefile(folder, ".") or os.path.ismount(folder)):
        what = "the current folder" if os.path.samefile(folder, ".") else "a mount point"
        raise EngramError(f"{folder} is {what} and cannot be replaced; choose one inside it.")


def check_replaceable(folder: Path, what: str, known: Collection[str] = ()) -> None:
    """Refuse to replace a folder with other files in it than the `known` ones of such a `what`."""
    check_renamable(folder)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise EngramError(f"{folder} is a file; give the path of a folder for the {what}.")
    paths = (path for path in folder.rglob("*") if path.name not in _LITTER)
    names = (str(path.relative_to(folder)) for path in paths)
    others = sorted(islice((name for name in names if name not in known), 3))
    if others:
        has = f"is a {what} with other files in it" if known else f"is not a {what}"
        raise EngramError(
            f"The folder {folder} {has} ({printable(', '.join(others))}), and would be replaced; "
            "choose another folder, or move those files away."
        )


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill that takes the place of `folder` at the end. A failure leaves the old."""
    new = folder.with_name(f".engram-{secrets.token_hex(8)}.tmp")
    try:
        with _explained(folder, "folder"):
            new.mkdir(parents=True)
            yield new
            _replace_folder(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _replace_folder(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`. The old folder is restored if that fails or is interrupted.

    A process that is killed between the two renames leaves the old folder as .engram-….old.
    """
    old = new.with_suffix(".old")
    try:
        if folder.is_dir() and any(folder.iterdir()):
            os.rename(folder, old)
        os.rename(new, folder)
    except BaseException:  # Ctrl-C too, between any two lines
        if old.exists() and not folder.exists():
            try:
                os.rename(old, folder)
            except OSError:
                raise EngramError(
                    f"{folder} could not be replaced, and the old folder is now {old}; rename it."
                ) from None
        raise
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
