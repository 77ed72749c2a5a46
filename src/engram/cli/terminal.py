"""Output of results, errors and progress, for people and machines.

Text may come from a stranger's file. `visible` makes it harmless here, where everything is printed,
and json escapes it in documents.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engram.errors import Notice
from engram.util.documents import jsonable
from engram.util.text import duration, visible

if TYPE_CHECKING:
    from engram.util.text import Description


def is_first() -> bool:
    """Whether this is the only process, or the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def show(result: Description, as_json: bool) -> None:
    """Print the result: a JSON document for machines, or rows and tables for people."""
    if not is_first():
        return
    if as_json:
        print(json.dumps(jsonable(result.document), indent=2, allow_nan=False), flush=True)
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    width = None if sys.stdout.isatty() else 1000  # in a file nothing has to be cut
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    wide = max((len(label) for label, _ in result.rows), default=0)
    for label, text in result.rows:
        lines = text.split("\n") if text.startswith("\n") else [text]  # no others have several
        shown = "\n".join(map(visible, lines))
        console.print(f"{visible(label):{wide}}  {shown}", soft_wrap=True)
    if result.table:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for title in result.columns:
            table.add_column(visible(title), overflow="fold")
        for cells in result.table:
            table.add_row(*map(visible, cells))
        console.print(table)
    for line in result.legend:
        console.print(visible(line), soft_wrap=True)
    for more in result.below:
        show(more, as_json)


def complain(sentence: str, as_json: bool) -> None:
    """Print a mistake: one line on stderr, and for machines a document on stdout as well."""
    lines = [line.strip() for line in sentence.splitlines()]
    sentence = " ".join(line for line in lines if line)  # spaces inside may be those of a path
    if as_json:
        try:
            print(json.dumps({"error": sentence}), flush=True)
        except OSError:  # it was the output that failed
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    print(visible(sentence), file=sys.stderr)


def announce(sentence: str) -> None:
    """Show a sentence to the user while all goes on."""
    warnings.warn(sentence, Notice, stacklevel=2)


_usual = warnings.formatwarning


def notice_or_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """A notice is its sentence alone; other warnings also say where they come from."""
    if issubclass(category, Notice):
        return f"{visible(str(message))}\n"
    text = _usual(message, category, filename, lineno, line)
    return "\n".join(map(visible, text.split("\n")))


# Progress: bars on a terminal, a line now and then in a file, nothing for machines. It goes to
# stderr, so stdout holds the result alone.

#: Seconds between two lines about the same work, where there is no terminal.
EVERY = 10.0
#: Seconds at the beginning without a line.
SILENCE = 2.0
#: Columns of a terminal from which on there is room for long bars.
_WIDE = 100


class Watch:
    """Shows how far work is, and this one nothing. Work of unknown length has the total 0."""

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        pass

    def say(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print rows with labels above the bars, or between the lines."""


@contextmanager
def bars(as_json: bool, first: str = "") -> Iterator[Watch]:
    """Show the progress of a command, from its first moment on; `first` is what it does then."""
    if as_json or not is_first():
        yield Watch()
    elif sys.stderr.isatty():
        with _live_bars() as shown:
            live = TerminalBars(shown, first or "starting")
            try:
                yield live
            finally:
                live.end()
    else:
        lines = LogLines()
        try:
            if first:
                lines(first, 0, 0)
            yield lines
            lines.end()
        finally:
            lines.timer.cancel()


def _live_bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.table import Column
    from rich.text import Text

    class Note(ProgressColumn):
        """The only column that is cut where there is no room for all."""

        def render(self, task: Any) -> Text:
            return Text(task.fields["note"], no_wrap=True, overflow="ellipsis")

    whole = Column(no_wrap=True)
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20 if console.width >= _WIDE else 6, table_column=whole),
        TextColumn("{task.fields[count]}", style="progress.download"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True, table_column=whole),
        Note(),
        console=console,
    )


class TerminalBars(Watch):
    """A bar for each piece of work; one of unknown length vanishes when the next begins."""

    def __init__(self, shown: Any, first: str) -> None:
        self._shown = shown
        self._known: dict[str, Any] = {}
        self._passing: str | None = None
        self(first, 0, 0)

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        shown = self._shown
        if what != self._passing:
            self.end()
        if what not in self._known:
            fields = {"count": "", "rate": "", "note": ""}
            self._known[what] = shown.add_task(visible(what), total=None, **fields)
        speed = shown.tasks[shown.task_ids.index(self._known[what])].speed
        shown.update(
            self._known[what],
            completed=done,
            total=total or None,
            count=f"{done:,}/{total:,}" if total else "",
            rate=f"{speed:,.1f}/s" if speed and total else "",
            note=visible(note),
        )
        if not total:
            self._passing = what

    def end(self) -> None:
        """Remove the bar of unknown length, if there is one."""
        if self._passing is not None:
            self._shown.remove_task(self._known.pop(self._passing))
            self._passing = None

    def say(self, rows: Sequence[tuple[str, str]]) -> None:
        from rich.table import Table

        grid = Table.grid(padding=(0, 2))
        for row in rows:
            grid.add_row(*map(visible, row))
        self._shown.console.print(grid)


@dataclass
class _Stage:
    """A piece of work: when it began and was last printed, and how far it is."""

    what: str
    began: float
    printed: float
    first: int  # what a resumed run had done already
    done: int = 0
    total: int = 0
    note: str = ""

    @property
    def ended(self) -> bool:
        return 0 < self.total <= self.done

    def line(self, now: float) -> str:
        seconds = now - self.began
        if not self.total:
            return f"{self.what}: {self.note or duration(seconds)}"
        rate = (self.done - self.first) / seconds if seconds > 0 else 0.0
        parts = [
            f"{self.done:,} of {self.total:,}",
            f"took {duration(seconds)}" if self.ended else "",
            f"{rate:,.1f}/s" if rate else "",
            f"{duration((self.total - self.done) / rate)} left" if rate and not self.ended else "",
            self.note,
        ]
        return f"{self.what}: {', '.join(filter(None, parts))}"


class LogLines(Watch):
    """Plain lines for a log file: at the end of each piece of work, and every ten seconds.

    The first seconds are silent, unless a command has said what it will do: most mistakes are found
    in them, and a mistake is one line.
    """

    def __init__(self) -> None:
        self._stage: _Stage | None = None
        self._silent_until = time.monotonic() + SILENCE
        self._held = ""  # the last line that was not printed
        self.timer = threading.Timer(SILENCE, self._release)  # work may report nothing for long
        self.timer.daemon = True
        self.timer.start()

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        now, stage, again = time.monotonic(), self._stage, done < total or not total
        if stage is None or stage.what != what or (stage.ended and again):
            self.end()
            self._stage = stage = _Stage(what, now, now, done)
            if not total:
                self._print(what)
        elif stage.ended:
            return
        stage.done, stage.total, stage.note = done, total, note
        if stage.ended or now - stage.printed >= EVERY:
            self._print(stage.line(now))
            stage.printed = now

    def say(self, rows: Sequence[tuple[str, str]]) -> None:
        self._silent_until = 0.0
        wide = max((len(label) for label, _ in rows), default=0)
        for label, text in rows:
            self._print(f"{label:{wide}}  {text}")

    def _print(self, line: str) -> None:
        self._held = line
        if time.monotonic() >= self._silent_until:
            self._release()

    def _release(self) -> None:
        line, self._held, self._silent_until = self._held, "", 0.0
        if line:
            print(visible(line), file=sys.stderr, flush=True)

    def end(self) -> None:
        """Print how far work came that ended before its total, such as training that stopped."""
        if self._stage is not None and self._stage.total and not self._stage.ended:
            self._print(self._stage.line(time.monotonic()))
