"""The folder of the demo: there is a whole one, or the one that was there before.

What it shows is `tour.py`.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from engram.errors import EngramError, Interrupted
from engram.experiments.demo import WHAT, Size, Tour
from engram.util.files import check_renamable, replace_folder, write_atomically
from engram.util.progress import Progress, silent

RESULTS = "results.json"

_DROSS = (".DS_Store", "Thumbs.db", "desktop.ini")  # what looking at a folder leaves in it
_NEEDED, _FULL = 1_000_000_000, 20_000_000  # bytes free: to begin with, and what counts as none


def run_demo(
    out: str | os.PathLike[str] = "demo",
    *,
    seed: int = 0,
    size: Size | None = None,
    console: Console | None = None,
    bars: Callable[[], AbstractContextManager[Progress]] = lambda: nullcontext(silent),
) -> dict[str, Any]:
    """Show everything once, write `out`/report.html and `out`/results.json, and give the results.

    An earlier demo at `out` is replaced when the new one is whole; any other folder is refused.
    """
    folder = Path(os.path.realpath(out))
    check_replaceable(folder)
    console = console or Console(quiet=True)
    building = folder.with_name(f".engram-{secrets.token_hex(8)}.tmp")
    try:
        _make(building, out)
        with _cache_in(building / "cache"):
            results = Tour(building, Path(out), seed, size or Size(), console, bars).run()
        shutil.rmtree(building / "cache", ignore_errors=True)
        results["files"] = sorted(
            [str(path.relative_to(building)) for path in building.rglob("*") if path.is_file()]
            + [RESULTS]
        )
        write_atomically(building / RESULTS, (json.dumps(results, indent=1) + "\n").encode())
        replace_folder(building, folder)
    except (KeyboardInterrupt, Interrupted):
        raise Interrupted(
            f"Stopped; nothing was written to {out}. Run `engram demo` again to see it whole."
        ) from None
    except OSError as error:
        raise _cannot_write(out, error) from None
    except EngramError:
        if building.exists() and shutil.disk_usage(building).free < _FULL:
            raise _cannot_write(out, OSError(errno.ENOSPC, "")) from None
        raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return results


# The folder


def check_replaceable(folder: Path) -> None:
    """Only an earlier demo is replaced, and nothing is deleted that is not part of it."""
    check_renamable(folder)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise EngramError(f"{folder} is a file; give --out the path of a folder for the demo.")
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name not in _DROSS}
    known: set[str] = set()
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        found = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        for file in found["files"] if found["what"] == WHAT else ():
            known |= {file, *(str(parent) for parent in Path(file).parents)}
    if there - known:
        what = "holds a demo and other files" if known else "is there already and is not a demo"
        few = ", ".join(sorted(there - known)[:3])
        raise EngramError(
            f"The folder {folder} {what} ({few}), and would be replaced; choose another one with "
            "--out, or move it away."
        )


def _make(building: Path, out: str | os.PathLike[str]) -> None:
    """The folder that the demo is built in, on a disk with enough room."""
    try:
        building.mkdir(parents=True)
    except OSError as error:
        raise _cannot_write(out, error) from None
    free = shutil.disk_usage(building).free
    if free < _NEEDED:
        raise EngramError(
            f"The demo needs 1 GB for a minute, and the disk of {out} has {free / 1e9:.1f} GB "
            "free; make room, or choose another disk with --out."
        )


def _cannot_write(out: str | os.PathLike[str], error: OSError) -> EngramError:
    if error.errno == errno.ENOSPC:
        return EngramError(
            f"The disk of {out} is full; make room, or choose another disk with --out."
        )
    reason = error.strerror or str(error)
    return EngramError(
        f"The demo cannot be written to {out} ({reason}); choose a folder that you may write to "
        "with --out."
    )


@contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    """Let what the trunk feeds to tasks lie in a folder that goes away with the demo."""
    before = os.environ.get("ENGRAM_CACHE")
    os.environ["ENGRAM_CACHE"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["ENGRAM_CACHE"]
        else:
            os.environ["ENGRAM_CACHE"] = before
