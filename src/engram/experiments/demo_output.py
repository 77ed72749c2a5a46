"""The folder that the demo writes: a complete demo, or whatever was there before."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from engram.errors import EngramError, Interrupted
from engram.util.documents import load_json
from engram.util.files import check_renamable, replace_folder, write_atomically

RESULTS = "results.json"
DEMO = "engram demo"  # `what` in the results, by which an earlier demo is recognised

_LITTER = (".DS_Store", "Thumbs.db", "desktop.ini")  # that file browsers leave in a folder
_NEEDED, _FULL = 1_000_000_000, 20_000_000  # free bytes: to start, and what counts as none


@contextmanager
def demo_folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary folder to write the demo to; it becomes `out` when the block ends without error.

    An earlier demo at `out` is replaced; any other folder is refused. Within the block, the cache
    of training is in this folder, and is removed with it.
    """
    target = Path(os.path.realpath(out))
    _check_replaceable(target)
    folder = target.with_name(f".engram-{secrets.token_hex(8)}.tmp")
    cache = os.environ.get("ENGRAM_CACHE")
    os.environ["ENGRAM_CACHE"] = str(folder / "cache")
    try:
        folder.mkdir(parents=True)
        free = shutil.disk_usage(folder).free
        if free < _NEEDED:
            raise EngramError(
                f"The demo needs 1 GB for a minute, and the disk of {out} has {free / 1e9:.1f} GB "
                "free; make room, or choose another disk with --out."
            )
        yield folder
        replace_folder(folder, target)
    except (KeyboardInterrupt, Interrupted):
        raise Interrupted(
            f"Stopped; nothing was written to {out}. Run `engram demo` again to see all of it."
        ) from None
    except OSError as error:
        raise _cannot_write(out, error) from None
    except EngramError:
        if folder.exists() and shutil.disk_usage(folder).free < _FULL:
            raise _cannot_write(out, OSError(errno.ENOSPC, "")) from None
        raise
    finally:
        del os.environ["ENGRAM_CACHE"]
        os.environ |= {} if cache is None else {"ENGRAM_CACHE": cache}
        shutil.rmtree(folder, ignore_errors=True)


def write_results(folder: Path, results: dict[str, Any]) -> None:
    """Write the results, with a list of all files, so that a later demo may replace the folder."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    results["files"] = sorted([*files, RESULTS])
    write_atomically(folder / RESULTS, (json.dumps(results, indent=1) + "\n").encode())


def _check_replaceable(folder: Path) -> None:
    """Refuse a folder that holds anything but an earlier demo: it would be deleted."""
    check_renamable(folder)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise EngramError(f"{folder} is a file; give --out the path of a folder for the demo.")
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.name not in _LITTER}
    known = _files_of_demo(folder)
    if there - known:
        what = "holds a demo and other files" if known else "already exists and is not a demo"
        names = ", ".join(sorted(there - known)[:3])
        raise EngramError(
            f"The folder {folder} {what} ({names}), and would be replaced; choose another one "
            "with --out, or move it away."
        )


def _files_of_demo(folder: Path) -> set[str]:
    """The files and folders that the demo in this folder lists; none if it holds no demo."""
    known: set[str] = set()
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        results = load_json((folder / RESULTS).read_text(encoding="utf-8"))
        for file in results["files"] if results["what"] == DEMO else ():
            known |= {file, *(str(parent) for parent in Path(file).parents)}
    return known


def _cannot_write(out: str | os.PathLike[str], error: OSError) -> EngramError:
    if error.errno == errno.ENOSPC:
        return EngramError(
            f"The disk of {out} is full; make room, or choose another disk with --out."
        )
    reason = error.strerror or str(error)
    return EngramError(
        f"The demo cannot be written to {out} ({reason}); choose a folder with --out that you "
        "may write to."
    )
