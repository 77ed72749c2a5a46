"""Starts decoders: forks them from a small process that has loaded what they need and no more.

The service itself has threads and a model, so it cannot be forked; and a new interpreter would
import everything again for each decoder, also for one that replaces another.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import cache

# To the launcher: the process to kill, or 0 with a socket and a limit on memory, to start one.
_REQUEST = struct.Struct("!qq")
_PROCESS = struct.Struct("!q")
_CODE = "from engram.serve.decoding.launcher import main; main({})"


@dataclass(frozen=True)
class Child:
    """A decoder: its process, and the connection to it."""

    pid: int
    connection: socket.socket


class Launcher:
    """The process that forks decoders. It ends with this one, and they end with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the process, without waiting until it is ready."""
        with self._lock:
            self._running()

    def fork(self, memory: int) -> Child:
        """Start a decoder that may use so many bytes of memory. OSError if there is none."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            try:
                request = _REQUEST.pack(0, memory)
                pid = self._ask(request, theirs)
            except OSError:  # the process has been killed: start another, once
                self._stop()
                pid = self._ask(_REQUEST.pack(0, memory), theirs)
        return Child(pid, ours)

    def kill(self, child: Child) -> None:
        """End a decoder at once, whatever it does."""
        child.connection.close()
        with self._lock, contextlib.suppress(OSError):
            if self._control is not None:
                self._ask(_REQUEST.pack(child.pid, 0))

    def stop(self) -> None:
        """End the process, and all decoders with it."""
        with self._lock:
            self._stop()

    def _ask(self, request: bytes, connection: socket.socket | None = None) -> int:
        control = self._running()
        handles = [] if connection is None else [connection.fileno()]
        socket.send_fds(control, [request], handles)
        answer = control.recv(_PROCESS.size, socket.MSG_WAITALL)
        if len(answer) < _PROCESS.size:
            raise ConnectionResetError("the launcher of decoders has ended")
        (pid,) = _PROCESS.unpack(answer)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return int(pid)

    def _running(self) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair()
            # Nothing that decodes an image knows the tokens of the service.
            env = {k: v for k, v in os.environ.items() if not k.startswith("ENGRAM_")}
            env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _CODE.format(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=env,
                    pass_fds=[theirs.fileno()],
                )
        return self._control

    def _stop(self) -> None:
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait()
        self._control = self._process = None


@cache
def launcher() -> Launcher:
    """The one launcher of this process."""
    one = Launcher()
    atexit.register(one.stop)
    return one


# In the process of the launcher


def main(handle: int) -> None:
    """Start and kill decoders as the service asks for it, until the service ends."""
    # Ctrl-C goes to the whole group: the service still needs decoders for what it has accepted.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    import engram.serve.decoding.worker  # noqa: F401  what every decoder needs

    control, children = socket.socket(fileno=handle), set[int]()
    try:
        while True:
            request, handles, *_ = socket.recv_fds(control, _REQUEST.size, 1)
            if len(request) < _REQUEST.size:
                return  # the service has ended
            pid, memory = _REQUEST.unpack(request)
            if pid == 0:
                answer = _start(control, handles[0], memory, children)
            else:
                answer = pid
                if pid in children:
                    os.kill(pid, signal.SIGKILL)
            _reap(children)
            control.sendall(_PROCESS.pack(answer))
    except OSError:
        return
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def _start(control: socket.socket, handle: int, memory: int, children: set[int]) -> int:
    """The process of a new decoder, or the negative number of an error."""
    try:
        pid = os.fork()
    except OSError as error:
        os.close(handle)
        return -(error.errno or 1)
    if pid == 0:
        _run_decoder(control, handle, memory)
    os.close(handle)
    children.add(pid)
    return pid


def _run_decoder(control: socket.socket, handle: int, memory: int) -> None:
    """Never returns: a forked process must not go on as the launcher."""
    try:
        from engram.serve.decoding.worker import work

        control.close()  # only the launcher answers there
        # What parsers print about a stranger's bytes is nothing for the log.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with socket.socket(fileno=handle) as connection:
            work(connection, memory)
    finally:
        os._exit(0)


def _reap(children: set[int]) -> None:
    """Forget processes that have ended: only then may their numbers be used again."""
    for pid in tuple(children):
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            children.discard(pid)
