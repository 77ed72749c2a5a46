"""Worker processes end with the one that asked for them. It imports no torch: some need none."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
import time

_PR_SET_PDEATHSIG = 1  # of Linux's <sys/prctl.h>


def end_with_parent(parent: int) -> None:
    """End this process when its parent is gone, whatever ended it: SIGKILL leaves no word.

    Args:
        parent: The process id of the one that asked for this process, as it saw it.
    """
    asked_by, forked = multiprocessing.parent_process(), os.getppid() == parent

    def watch() -> None:
        if not forked and asked_by is not None:  # a fork server is between the two
            asked_by.join()
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    if forked:
        with contextlib.suppress(OSError, AttributeError):  # Linux has a signal for it: at once
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=watch, daemon=True).start()
