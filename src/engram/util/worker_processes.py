"""Worker processes: how they begin, and that they end with their parent. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings

_PR_SET_PDEATHSIG = 1  # of Linux's <sys/prctl.h>


def end_with_parent(parent: int) -> None:
    """End this process when the one that asked for it, `parent`, is gone, even by SIGKILL."""
    import ctypes  # here: the command line needs neither
    import multiprocessing

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


def begin_worker(parent: int) -> None:
    """Begin a process that reads images for `parent`, which alone reacts to Ctrl-C."""
    end_with_parent(parent)
    ignore_pillow_warnings()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def ignore_pillow_warnings() -> None:
    """Silence Pillow's warnings in this process: odd EXIF data, palettes, sizes.

    An image that cannot be used is an error or is listed as unreadable, with the reason.
    """
    warnings.filterwarnings("ignore", module=r"PIL(\.|$)")
