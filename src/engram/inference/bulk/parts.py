"""The parts of a table on disk, which are the record of what is done, and the job they are of.

A part is a file that is there completely or not at all, so the files are the manifest: there is no
other one that a crash could leave behind them. Parts may be written in any order.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

from engram.errors import EngramError
from engram.inference.bulk.answers import Batch, Row
from engram.inference.bulk.items import Item
from engram.inference.bulk.tables import Table, part_name
from engram.util.files import make_folder, replaced, write_atomically

_STATE = "_job.json"  # readers of a folder of parquet skip such names


class Parts:
    """The parts on disk; a part that is there is not computed again.

    Args:
        out: The file that they become in the end, or the folder that keeps them.
        table: Their format.
        identity: What has to be the same for parts to belong together.
        overwrite: Remove the parts of an earlier job.

    Raises:
        EngramError: Something else is there, or the parts are those of another job.
    """

    def __init__(self, out: Path, table: Table, identity: dict[str, Any], overwrite: bool) -> None:
        self.out, self.table = out, table
        self.folder = out if not out.suffix else out.with_name(f"{out.name}.parts")
        self.resumed = 0  # images whose answers were found on disk
        state = self.folder / _STATE
        if overwrite and state.exists():
            shutil.rmtree(self.folder)  # the parts of an earlier job, and nothing else
        elif out.suffix and out.exists() and not overwrite:
            raise EngramError(f"{out} exists; replace it with --overwrite, or choose another name.")
        elif state.exists():
            self._check_same(json.loads(state.read_bytes()), identity)
        elif self.folder.is_dir() and any(self.folder.iterdir()):
            raise EngramError(f"The folder {self.folder} is not empty; choose another one.")
        make_folder(self.folder)
        write_atomically(state, json.dumps(identity, indent=1).encode())

    def _check_same(self, before: dict[str, Any], identity: dict[str, Any]) -> None:
        now = json.loads(json.dumps(identity))
        different = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if different:
            raise EngramError(
                f"{self.folder} has answers of another job ({', '.join(different)} differ); "
                "continue with the same command, or start anew with --overwrite."
            )

    def missing(
        self, items: Iterator[Item], rows: int, images: int, found: Callable[[int], None]
    ) -> Iterator[Batch]:
        """Batches of the images that have no answers yet.

        Args:
            items: All images, in the order that they always have.
            rows: Images in a part.
            images: Images in a batch.
            found: Called with the number of images that have been found on disk so far.

        Raises:
            EngramError: The images of a part on disk are not those of the sources.
        """
        there, first = self._there(), 0
        for part in count():
            if part in there:
                names = self.table.images(there.pop(part))
                if names != [item.name for item in islice(items, len(names))]:
                    raise self._changed(part)
                first += len(names)
                self.resumed += len(names)
                found(self.resumed)
                continue
            begin = first
            for batch, last in _with_last(_batches(islice(items, rows), images)):
                yield Batch(part, begin, first, batch, last)
                first += len(batch)
            if first == begin:  # there are no more images
                if there:
                    raise self._changed(min(there))
                return

    def _there(self) -> dict[int, Path]:
        paths = self.folder.glob(f"part-*{self.table.suffix}")
        return {int(path.stem.removeprefix("part-")): path for path in paths}

    def _changed(self, part: int) -> EngramError:
        return EngramError(
            f"The images are not those of {self._path(part)}, which was written before: some were "
            "added, removed or renamed. Start anew with --overwrite."
        )

    def _path(self, part: int) -> Path:
        return self.folder / part_name(part, self.table.suffix)

    def write(self, part: int, rows: Sequence[Row]) -> None:
        """Write a part, completely or not at all."""
        self.table.write(self._path(part), rows)

    def finish(self) -> None:
        """Join the parts if one file is wanted. A crash before the end leaves the parts."""
        if self.folder == self.out:
            return
        there = self._there()
        with replaced(self.out) as file:
            self.table.join([there[part] for part in sorted(there)], file)
        shutil.rmtree(self.folder)


def _batches(items: Iterator[Item], images: int) -> Iterator[tuple[Item, ...]]:
    while batch := tuple(islice(items, images)):
        yield batch


def _with_last(batches: Iterable[tuple[Item, ...]]) -> Iterator[tuple[tuple[Item, ...], bool]]:
    """Every batch, with whether it is the last one."""
    before = None
    for batch in batches:
        if before is not None:
            yield before, False
        before = batch
    if before is not None:
        yield before, True


class Collected:
    """Rows of parts that are not complete yet, from batches in any order."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[int, list[Row]]] = {}
        self._ends: dict[int, int] = {}  # one more than the number of a part's last image

    def add(self, batch: Batch, rows: list[Row]) -> list[Row]:
        """Take the rows of a batch; gives all rows of its part if they are complete, else none."""
        own = self._rows.setdefault(batch.part, {})
        own[batch.number] = rows
        if batch.last:
            self._ends[batch.part] = batch.number + len(rows)
        if batch.begin + sum(map(len, own.values())) != self._ends.get(batch.part):
            return []
        del self._rows[batch.part], self._ends[batch.part]
        return [row for number in sorted(own) for row in own[number]]
