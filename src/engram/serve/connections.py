"""HTTP connections: how many may be open, and for how long without a request.

A connection that nothing is asked on costs a client nothing and the service a descriptor. When
there are as many as may be, in all or of one address, the one that has been open longest without a
request in progress is closed for the new one, so that clients who only hold connections keep nobody
out.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections import Counter
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from engram.errors import EngramError, flag
from engram.serve.hosts import THIS_MACHINE, in_networks
from engram.serve.log import Log
from engram.serve.middleware import error_response
from engram.serve.problems import Problem
from engram.serve.service_settings import Settings

_AT_ONCE = 32  # connections that are accepted in one go, before any of them is counted
_WAITING = 2048  # connections that the system keeps until they are accepted
_OWN = 128  # descriptors for everything else: files, libraries, threads
_FEWEST = 16  # connections that a service is worth starting for


class ServiceProtocol(H11Protocol):
    """A connection, closed when it is idle and another needs its place.

    It is also closed when the head of a request is not complete in time. The server itself closes
    only connections that are idle after a response: one that sends nothing at first, or one header
    now and then, would stay open for ever.

    A client that has sent all of its request may close its side of the connection, and is answered.

    A process has `most` connections at the most, and one address `settings.client_connections` of
    them. A trusted proxy speaks for many clients, and may have all.
    """

    _timer: asyncio.TimerHandle | None = None
    _half_closed = False
    _opened = 0.0
    _address = "unknown"

    def __init__(
        self, settings: Settings, most: int, log: Log, *arguments: Any, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._settings, self._most, self._log = settings, most, log

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._opened = self.loop.time()
        self._address = self.client[0] if self.client else self._address
        self._admit()
        self._update_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timer()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: only while a complete request is answered."""
        self._half_closed = True
        return self._answering()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed and not self._answering() and not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _answering(self) -> bool:
        received = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        return received and self.cycle is not None and not self.cycle.response_complete

    def _update_timer(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._timer is None:  # the time starts once: more bytes do not extend it
            self._timer = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _admit(self) -> None:
        """Close an idle connection for this one, or refuse it, where there are too many."""
        settings, proxies = self._settings, (*THIS_MACHINE, *self._settings.trust_proxy)
        everyone: list[Any] = [
            one for one in self.connections if one is not self and not one.transport.is_closing()
        ]
        of = Counter(one._address for one in everyone)
        if of[self._address] >= settings.client_connections and not in_networks(
            self._address, proxies
        ):
            address, status = self._address, HTTPStatus.TOO_MANY_REQUESTS
            limit = f"This address has {settings.client_connections:,}"
            everyone = [one for one in everyone if one._address == address]
        elif len(everyone) >= self._most:
            address, status = of.most_common(1)[0][0], HTTPStatus.SERVICE_UNAVAILABLE
            limit = f"The service has {self._most:,}"
        else:
            return
        idle = (one for one in everyone if one._is_idle())
        oldest = min(idle, key=lambda one: (one._address != address, one._opened), default=None)
        if oldest is not None:
            oldest.transport.close()
        else:
            self._refuse(status, limit)
            self._log.event_seldom("refused connection", client=self._address, status=status)

    def _is_idle(self) -> bool:
        """Whether nothing is asked, and nothing of an answer is still being sent."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and not self.transport.get_write_buffer_size()

    def _refuse(self, status: HTTPStatus, limit: str) -> None:
        sentence = (
            f"{limit} connections with requests in progress, which is the limit; try again in a "
            "second."
        )
        response = error_response(Problem(status, sentence, retry=1, close=True))
        head = b"".join(b"%s: %s\r\n" % header for header in response.raw_headers)
        line = f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
        self.transport.write(line + head + b"\r\n" + response.body)
        self.transport.close()


class Server(uvicorn.Server):
    """Accepts a few connections at a time, and lets the others wait in the system's queue.

    asyncio has one number for both, and with a large one it would accept more than there are
    descriptors for, or close a connection for others before its request is read.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.backlog = _AT_ONCE
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_WAITING)


def connections_allowed(settings: Settings) -> int:
    """Connections that fit below the limit of descriptors, whose soft limit is raised for them.

    An EngramError if there is hardly room for any.
    """
    others = _OWN + 4 * settings.decoders + 4 * _AT_ONCE  # being opened and closed
    wanted = settings.connections + others
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (wanted if limit == resource.RLIM_INFINITY else limit for limit in limits)
    if soft < min(wanted, hard):
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    if soft < others + min(_FEWEST, settings.connections):
        raise EngramError(
            f"This process may have {soft} open files, and the service needs {others} besides its "
            f"connections; raise the limit (`ulimit -n`) to {wanted} for {flag('connections')} "
            f"{settings.connections}."
        )
    return min(settings.connections, soft - others)
