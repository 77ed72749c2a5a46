"""Parts of a table on disk, which are the record of what is done, and the job they are of.

A part is a file that is there completely or not at all, so the files are the manifest: there is no
other one that a crash could leave behind them. Parts may be written in any order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from itertools import count, islice
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from engram.errors import EngramError
from engram.inference.bulk.answering import ItemBatch, Row
from engram.inference.bulk.decoders import Item, some_of
from engram.inference.bulk.table_formats import TableFormat
from engram.util.documents import parse_json
from engram.util.files import make_folder, replaced, write_atomically
from engram.util.text import counted, first_line, printable

_STATE, _LOCK = "_job.json", "_lock"  # readers of a folder of parquet skip such names
_UNFINISHED = ".engram-*.tmp"  # what `write_atomically` leaves behind if it is killed


class Parts:
    """Parts of the table `out`, or in the folder `out`; one that is there is not computed again.

    Inside of a `with` they are this job's alone. Parts of a job with another `identity`, and parts
    that another process is writing, are an EngramError; `overwrite` removes the former.
    """

    def __init__(
        self, out: Path, table: TableFormat, identity: dict[str, Any], overwrite: bool
    ) -> None:
        self.out, self.table, self.identity, self.overwrite = out, table, identity, overwrite
        self.folder = out if not out.suffix else out.with_name(f"{out.name}.parts")
        self.resumed = 0  # images whose answers were found on disk
        self.problem: EngramError | None = None  # the error that ended the sources
        self.done = self.errors = 0  # rows that were written now, and those with an error
        self._images: dict[int, int] = {}  # in each part, as the sources have them
        self._rows: dict[int, dict[int, Sequence[Row]]] = {}  # of unfinished parts, by batch
        self._most = 0  # rows of a part; only the last one may have fewer
        self._state = self.folder / _STATE
        self._lock = FileLock(self.folder / _LOCK, timeout=0)

    def __enter__(self) -> Parts:
        self._check_free()
        make_folder(self.folder)
        try:
            self._lock.acquire()
        except Timeout:
            raise EngramError(
                f"Another process is writing {self.out} at this moment; wait for it, stop it, or "
                "choose another name."
            ) from None
        except OSError as error:
            raise EngramError(
                f"{self.folder} cannot be written ({error.strerror or error}); choose another name."
            ) from None
        try:
            self._check_free()  # another process may just have finished
            if self.overwrite:
                self._clear()
            if self._state.exists():
                self._check_same()
            else:
                self._record()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """Let others have the parts; where there are none, nothing stays behind."""
        if self._lock.is_locked and not any(self.folder.glob("part-*")):
            self._remove()
        self._lock.release()

    def _check_free(self) -> None:
        if self.out.suffix and self.out.exists() and not self.overwrite and not self._in_place():
            raise EngramError(
                f"{self.out} exists; replace it with --overwrite, or choose another name."
            )
        if self._state.exists() or not self.folder.is_dir():
            return
        names = (path.name for path in self.folder.iterdir())
        if any(name != _LOCK and not fnmatch(name, _UNFINISHED) for name in names):
            raise EngramError(f"The folder {self.folder} is not empty; choose another one.")

    def _clear(self) -> None:
        """Remove the parts, and at last the record of their job."""
        for path in (*self.folder.glob("part-*"), *self.folder.glob(_UNFINISHED)):
            path.unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)

    def _remove(self) -> None:
        """Remove all that a job keeps in its folder, and a folder that it has made for itself."""
        self._clear()
        with suppress(OSError):  # what is left is in nobody's way
            (self.folder / _LOCK).unlink(missing_ok=True)
            if self.folder != self.out:
                self.folder.rmdir()
        self._lock.release()  # from here on the folder may be another job's

    # The record of the job

    def _record(self, table: list[int] | None = None) -> None:
        """Write down what job the parts are of, and which file is about to be their table."""
        state = {**self.identity, "table": table}
        write_atomically(self._state, json.dumps(state, indent=1).encode())

    def _recorded(self) -> dict[str, Any]:
        try:
            before = parse_json(self._state.read_bytes())
            if not isinstance(before, dict):
                raise ValueError("it is not an object")
            return before
        except (OSError, ValueError) as error:
            raise EngramError(
                f"{self._state}, which says what job the answers beside it are of, cannot be read "
                f"({first_line(error)}); restore it, or start anew with --overwrite."
            ) from None

    def _check_same(self) -> None:
        before, now = self._recorded(), json.loads(json.dumps(self.identity))
        before.pop("table", None)
        different = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if different:
            names = printable(", ".join(different))
            raise EngramError(
                f"{self.folder} has answers of another job ({names} differ); continue with the "
                "same command, or start anew with --overwrite."
            )

    def _in_place(self) -> bool:
        """Whether the table is that of the job on disk, which was killed before it tidied up."""
        return self._state.exists() and self._recorded().get("table") == _file_id(self.out)

    def finished(self) -> int:
        """The rows of the table if an earlier run was killed after it was in place; else 0."""
        if not self.out.suffix or not self.out.exists() or not self._in_place():
            return 0
        rows = self.table.rows(self.out)
        self._remove()
        return rows

    # Parts that are there, and those that are missing

    def _path(self, part: int) -> Path:
        return self.folder / f"part-{part:06}{self.table.suffix}"

    def add(self, batch: ItemBatch, rows: Sequence[Row]) -> None:
        """Take the rows of a batch, in any order, and write its part once that is complete."""
        own = self._rows.setdefault(batch.part, {})
        own[batch.number] = rows
        if sum(map(len, own.values())) == self._most:
            self._write(batch.part)

    def add_last(self) -> None:
        """Write the last part, once there are no more batches."""
        for part in list(self._rows):
            self._write(part)

    def _write(self, part: int) -> None:
        own = self._rows.pop(part)
        rows = [row for number in sorted(own) for row in own[number]]
        self.table.write(self._path(part), rows)
        self.done += len(rows)
        self.errors += sum(row.get("error") is not None for row in rows)

    def _there(self) -> dict[int, Path]:
        there = {}
        for path in self.folder.glob(f"part-*{self.table.suffix}"):
            digits = path.stem.removeprefix("part-")
            number = int(digits) if digits.isdecimal() and len(digits) < 20 else -1
            if path != self._path(number) or not path.is_file():
                raise EngramError(
                    f"{printable(str(path), 500)} is no part of these answers; remove it, and run "
                    "the same command again."
                )
            there[number] = path
        return there

    def missing(
        self, items: Iterator[Item], rows: int, images: int, found: Callable[[int], None]
    ) -> Iterator[ItemBatch]:
        """Batches of at most so many `images` that have no answers yet, with `rows` in a part.

        `found` is told how many images of all `items` were found on disk so far. A part on disk
        whose images are not those of the sources is an EngramError.
        """
        there, first, self._most = self._there(), 0, rows
        items = self._readable(items)
        for part in count():
            if part in there:
                names = self.table.images(there.pop(part))
                cells = [self.table.image_cell(item.name) for item in islice(items, len(names))]
                if names != cells:
                    raise self.problem or self._changed(part)
                self._images[part] = len(names)
                first += len(names)
                self.resumed += len(names)
                found(self.resumed)
                continue
            begin, own = first, islice(items, rows)
            while batch := some_of(own, images):
                number, first = first, first + len(batch)
                yield ItemBatch(part, number, batch)
                del batch  # its bytes, before more are read
            if first == begin:  # there are no more images
                if there:
                    raise self.problem or self._changed(min(there))
                return
            self._images[part] = first - begin

    def _readable(self, items: Iterator[Item]) -> Iterator[Item]:
        """The images until the sources end, or fail: `finish` says it, when these are answered."""
        try:
            yield from items
        except EngramError as error:
            self.problem = error

    def _changed(self, part: int) -> EngramError:
        return EngramError(
            f"The images are not those of {self._path(part)}, which was written before: some were "
            "added, removed or renamed. Start anew with --overwrite."
        )

    # The table

    def finish(self) -> None:
        """Join the parts if one file is wanted. A crash before the end leaves the parts.

        Sources that could not be read to their end, and missing rows, are an EngramError.
        """
        if self.problem is not None:
            raise self._unfinished(self.problem)
        there = self._there()
        for part in sorted({*there, *self._images}):
            images, path = self._images.get(part, 0), self._path(part)
            rows = self.table.rows(path) if part in there else 0
            if rows != images:
                raise EngramError(
                    f"{path} has {counted(rows, 'row')} for {counted(images, 'image')}: another "
                    "program changed the parts. Remove it, and run the same command again."
                )
        if self.folder == self.out:
            return
        with replaced(self.out) as file:
            self.table.join([there[part] for part in sorted(there)], file)
            file.flush()
            self._record(_file_id(file.fileno()))
        self._remove()

    def _unfinished(self, problem: EngramError) -> EngramError:
        """The error of the sources, and what is kept; answers from doubtful bytes are removed."""
        sure = sum(self._images.values()) - getattr(problem, "doubtful", 0)
        end = kept = 0
        for part in sorted(self._images):
            end += self._images[part]
            if end > sure:
                self._path(part).unlink(missing_ok=True)
            else:
                kept = end
        if not kept:
            return problem
        return EngramError(
            f"{problem} The answers about the first {counted(kept, 'image')} are kept; repair it, "
            "and run the same command again to continue."
        )


def _file_id(file: Path | int) -> list[int]:
    """Inode and size of a file, which stay the same when it is renamed."""
    about = os.stat(file)
    return [about.st_ino, about.st_size]
