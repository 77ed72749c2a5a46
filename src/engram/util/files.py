"""Files and folders that are replaced whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from engram.errors import EngramError


def write_atomically(path: str | Path, data: bytes) -> None:
    """A temporary file in the same folder, fsync, rename; a failure leaves what was there."""
    target = Path(os.path.realpath(path))  # through a link, to the file it means
    _refuse_no_file(path, target)
    temporary = target.with_name(f".engram-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise EngramError(
            f"{path} cannot be written ({error.strerror or error}); check the folder, its "
            "permissions and the free space. What was there is unchanged."
        ) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    sync_folder(target.parent)


def _refuse_no_file(path: str | Path, target: Path) -> None:
    """A rename would put a file in the place of a folder, a pipe or a device."""
    if os.path.exists(target) and not os.path.isfile(target):  # which take any name
        what = "a folder" if os.path.isdir(target) else "no usual file"
        raise EngramError(f"{path} cannot be written (it is {what}); choose another place.")


def check_writable(path: str | Path, other: str = "place", parents: bool = False) -> None:
    """That a file can be written there later; if not, an EngramError now that asks for another.

    With `parents`, folders that are missing are made.
    """
    target = Path(os.path.realpath(path))
    _refuse_no_file(path, target)
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
    """Make renames in a folder last, where the system lets a folder be synchronised."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def check_renamable(folder: Path) -> None:
    """That a folder can be put in this one's place: no shell stands in it, no disk hangs on it."""
    if folder.exists() and (os.path.samefile(folder, ".") or os.path.ismount(folder)):
        what = "the folder you are in" if os.path.samefile(folder, ".") else "where a disk begins"
        raise EngramError(f"{folder} is {what} and cannot be replaced; choose one inside it.")


def replace_folder(new: Path, folder: Path) -> None:
    """Rename a folder into its place; what was there comes back if that fails or is interrupted.

    A process that is killed between the two renames leaves the old one as .engram-….old.
    """
    old = new.with_suffix(".old")
    try:
        if folder.is_dir() and any(folder.iterdir()):
            os.rename(folder, old)
        os.rename(new, folder)
    except BaseException:  # Ctrl-C, too, and wherever it came
        if old.exists() and not folder.exists():
            try:
                os.rename(old, folder)
            except OSError:
                raise EngramError(
                    f"{folder} could not be replaced, and what was there is now {old}; rename it."
                ) from None
        raise
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
