"""Ports for processes that cannot choose one by themselves."""

import socket
from itertools import count
from pathlib import Path
from tempfile import gettempdir

from filelock import FileLock, Timeout

#: Below the ports that the system hands out, so that nobody is given one between its choice here
#: and the start of the process that listens there.
_FIRST, _MOST = 20_000, 10_000
_next = count()
_taken: list[FileLock] = []  # by this process, until it ends


def free_port() -> int:
    """A port of this machine that nobody listens on and no other test process is given."""
    folder = Path(gettempdir(), "engram-test-ports")
    folder.mkdir(exist_ok=True)
    for number in _next:
        port = _FIRST + number % _MOST
        lock = FileLock(folder / str(port))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        _taken.append(lock)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise AssertionError("unreachable: the count does not end")
