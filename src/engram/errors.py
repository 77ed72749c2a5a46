"""The one exception that users see."""


class EngramError(Exception):
    """A user's mistake, as a sentence: what was given, what was expected, what to do.

    The command line prints the sentence and exits with 2; nothing else in the package is
    allowed to reach a user as a traceback.
    """


class Interrupted(EngramError):
    """The user stopped a run; what it had learned is in its checkpoint."""
