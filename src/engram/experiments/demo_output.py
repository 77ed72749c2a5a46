"""The folder that the demo writes: a complete demo, or whatever was there before."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from engram.errors import EngramError, Interrupted
from engram.util.documents import load_json
from engram.util.files import check_replaceable, replaced_folder, write_atomically

RESULTS = "results.json"
DEMO = "engram demo"  # `what` in the results, by which an earlier demo is recognised

# Free bytes to start: it writes 464 MB at most. And what counts as none.
_NEEDED, _FULL = 600_000_000, 20_000_000


@contextmanager
def demo_folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary folder to write the demo to; it becomes `out` when the block ends without error.

    An earlier demo at `out` is replaced; any other folder is refused. Within the block, the cache
    of training is in this folder, and is removed with it.
    """
    target = Path(os.path.realpath(out))
    check_replaceable(target, "demo", _files_of_demo(target))
    cache = os.environ.get("ENGRAM_CACHE")
    try:
        with replaced_folder(target) as folder:
            free = shutil.disk_usage(folder).free
            if free < _NEEDED:
                raise EngramError(
                    f"The demo needs {_NEEDED / 1e9:.1f} GB for a minute, and the disk of {out} "
                    f"has {free / 1e9:.1f} GB free; make room, or choose another disk with --out."
                )
            os.environ["ENGRAM_CACHE"] = str(folder / "cache")
            try:
                yield folder
            except (EngramError, OSError) as error:  # whatever a full disk made of it
                full = getattr(error, "errno", None) == errno.ENOSPC
                if not full and shutil.disk_usage(folder).free >= _FULL:
                    raise
                raise EngramError(
                    f"The disk of {out} is full; make room, or choose another disk with --out."
                ) from None
    except (KeyboardInterrupt, Interrupted):
        raise Interrupted(
            f"Stopped; nothing was written to {out}. Run `engram demo` again to see all of it."
        ) from None
    finally:
        os.environ.pop("ENGRAM_CACHE", None)
        os.environ |= {} if cache is None else {"ENGRAM_CACHE": cache}


def write_results(folder: Path, results: dict[str, Any]) -> None:
    """Write the results, with a list of all files, so that a later demo may replace the folder."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    results["files"] = sorted([*files, RESULTS])
    write_atomically(folder / RESULTS, (json.dumps(results, indent=1) + "\n").encode())


def _files_of_demo(folder: Path) -> set[str]:
    """The files and folders that the demo in this folder lists; none if it holds no demo."""
    known: set[str] = set()
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        results = load_json((folder / RESULTS).read_text(encoding="utf-8"))
        for file in results["files"] if results["what"] == DEMO else ():
            known |= {file, *(str(parent) for parent in Path(file).parents)}
    return known
