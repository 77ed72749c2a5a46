"""What users see when something is wrong."""

#: DataLoader may say so anywhere in the main process: it hears of it by a signal.
LOST_WORKER = (
    "A process that reads images was ended by the system, most likely for want of memory; use "
    "fewer workers or a smaller batch."
)


def is_lost_worker(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and "DataLoader worker" in str(error)


class EngramError(Exception):
    """A user's mistake, as a sentence: what was given, what was expected, what to do.

    The command line prints the sentence and exits with 2; nothing else in the package is
    allowed to reach a user as a traceback.
    """


class Interrupted(EngramError):
    """The user stopped a run; what it had learned is in its checkpoint."""


class Notice(UserWarning):
    """What a user should know while all goes on, as a sentence."""
