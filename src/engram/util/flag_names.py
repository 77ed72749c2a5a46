"""Names of settings in messages: a flag at the command line, an argument in Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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
