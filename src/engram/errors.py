"""Exceptions and notices: sentences for users, and how they name settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

#: DataLoader may say so anywhere in the main process: it hears of it by a signal.
LOST_WORKER = (
    "A process that reads images was ended by the system, most likely for want of memory; use "
    "fewer workers or a smaller batch."
)


def is_lost_worker(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and "DataLoader worker" in str(error)


class EngramError(Exception):
    """The only exception for a user's mistake. Its message is a sentence to the user.

    The sentence says what was given, what was expected and what to do. The command line prints it
    and exits with code 2, without a traceback.

    Examples:
        >>> try:
        ...     engram.load_backbone("no/such/file.npz")
        ... except engram.EngramError as error:
        ...     print(error)
        There is no file or folder no/such/file.npz; check the path.
    """


class Interrupted(EngramError):
    """The user stopped a run; what it had learned is in its checkpoint.

    Attributes:
        result: The result with the best engram so far, where Ctrl-C let a run write one; else None.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class Notice(UserWarning):
    """A warning for the user, as a sentence; work goes on."""


# Names of settings in sentences: a flag at the command line, an argument in Python

_as_flags: ContextVar[bool] = ContextVar("settings are flags", default=False)
_SHORT = {"out": "-o"}


def flag(name: str, value: object = None) -> str:
    """A setting as a message names it: `--max-bad` or `max_bad`.

    With a value it is what to write: `--max-bad 0.1` or `max_bad=0.1`, for True `--resume` or
    `resume=True`.
    """
    if not _as_flags.get():
        return name if value is None else f"{name}={value!r}"
    flag = _SHORT.get(name, f"--{name.replace('_', '-')}")
    return flag if value is None or value is True else f"{flag} {value}"


@contextmanager
def naming_flags(flags: bool = True) -> Iterator[None]:
    """Inside, settings are flags: the command line runs its commands so, but not their files."""
    before = _as_flags.set(flags)
    try:
        yield
    finally:
        _as_flags.reset(before)
