"""Exceptions and notices: sentences for users."""

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
