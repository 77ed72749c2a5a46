"""Text for people: results, short lists of names, strings that are safe to print, UTF-8."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PureWindowsPath
from typing import Any

from engram.errors import EngramError


@dataclass(frozen=True)
class Description:
    """The result of a command: a document for machines, rows and a table for people."""

    document: Any  # as JSON has it
    rows: list[tuple[str, str]]  # a label and what it says
    columns: Sequence[str] = ()  # of a table below, if there is one
    table: Sequence[Sequence[str]] = ()
    legend: Sequence[str] = ()  # lines below the table
    below: Sequence[Description] = ()  # more tables, for people alone
    problem: str = ""  # a sentence about what went wrong all the same
    code: int = 0  # the exit code


def summarise_names(
    names: Sequence[str], most: int = 5, nouns: tuple[str, str] = ("class", "classes")
) -> str:
    """The number of names and the first of them, as in `3 classes (rose, tulip, lily)`."""
    more = ", …" if len(names) > most else ""
    return f"{counted(len(names), *nouns)} ({', '.join(names[:most])}{more})"


def join_names(names: Sequence[object], most: int = 6) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def nearest(name: str, known: Sequence[str]) -> str:
    """The known name that is most like a wrong one, as the end of a sentence."""
    (best, *_) = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"the nearest is {best}"


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or else its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


@contextmanager
def explained(sentence: Callable[[Exception], str]) -> Iterator[None]:
    """Make an EngramError of whatever is raised inside, unless it is one already.

    For code of users and of other libraries, which on hostile bytes raise nearly anything.
    """
    try:
        yield
    except EngramError:
        raise
    except Exception as error:
        raise EngramError(sentence(error)) from error


def words(text: str) -> list[str]:
    """The names of a flag, with commas between them."""
    return [name.strip() for name in text.split(",")] if text else []


def counted(number: int, one: str, many: str = "") -> str:
    """A number with its noun: `1 image`, `2 images`; `many` where it does not end in an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def duration(seconds: float) -> str:
    """A time for people: `8 s`, `2 min 5 s`, `1 h 12 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def storage(size: float) -> str:
    """Bytes for people: `740 MB`, `1.6 GB`."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.{0 if size >= 10 * unit else 1}f} {name}"
    return f"{size / 1e3:.0f} kB"


def printable(text: str, most: int = 120) -> str:
    """Text from a file, safe to print: one line, no control characters, at most so long."""
    text = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def visible(text: str) -> str:
    r"""Text that a terminal shows and does not obey.

    Control characters, those that change the direction of text, and other invisible ones become
    escapes such as `\x1b` and `\u202e`.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def without_folder(source: str) -> str:
    """The last part of an absolute path, which says nothing about this machine; else the text."""
    return os.path.basename(source.rstrip("/")) if os.path.isabs(source) else source


#: How a path begins that says something about a machine.
ROOT = r"(?:~[\w.-]*[\\/]|/|[A-Za-z]:[\\/]|\\\\)"
FILE_URL = r"file://[^\s/\\]*"  # perhaps with the name of a machine
# A path inside a longer text. A ":" may precede it, as in hf:/data, but not https:/ or 8080/.
_PATH = re.compile(rf"(?:{FILE_URL}|(?<![\w./\\~-])){ROOT}(?=[^\s/])[^\s,;'\"<>|()]*")


def without_paths(text: str) -> str:
    """A text with the paths in it reduced to their last part."""
    return _PATH.sub(lambda match: last_part(match[0]), text)


def last_part(path: str) -> str:
    """The last part of a path of any operating system."""
    return PureWindowsPath(path.removeprefix("file://").rstrip("/\\")).name or "a path"


def utf8(text: str) -> bytes:
    """Text as UTF-8. Surrogates, which stand for other bytes in file names, are escaped."""
    return text.encode(errors="backslashreplace")
