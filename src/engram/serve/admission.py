"""How many connections may be open: in all, below the limit of descriptors, and of one address.

A connection that nothing is asked on costs a client nothing and the service a descriptor. When
there are as many as may be, the one that has been open longest without a request in progress is
closed for the new one, so that clients who only hold connections keep nobody out.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Protocol, TypeVar

import uvicorn

from engram.errors import EngramError
from engram.serve.hosts import THIS_MACHINE, in_networks
from engram.serve.problems import Problem, error_response
from engram.serve.service_settings import Settings
from engram.util.flag_names import flag

_AT_ONCE = 32  # connections that are accepted in one go, before any of them is counted
_WAITING = 2048  # connections that the system keeps until they are accepted
_OWN = 128  # descriptors for everything else: files, libraries, threads
_FEWEST = 16  # connections that a service is worth starting for


class Connection(Protocol):
    """What every HTTP protocol of uvicorn has."""

    transport: Any
    client: tuple[str, int] | None
    cycle: Any  # the request, None before the first one

    def connection_made(self, transport: Any) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...


Made = TypeVar("Made", bound=type[asyncio.Protocol])


class Admission:
    """The open connections of a process, each with its address.

    Args:
        most: How many there may be.
        most_of_one: How many of them one address may have. A trusted proxy speaks for many clients,
            and may have all.
        trust_proxy: Addresses and networks of proxies, besides those on this machine.
        on_refused: Called with the address and the status when a connection is refused, because all
            that it could replace have a request in progress.
    """

    def __init__(
        self,
        most: int,
        most_of_one: int,
        trust_proxy: Iterable[str] = (),
        on_refused: Callable[[str, int], None] = lambda address, status: None,
    ) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._proxies = (*THIS_MACHINE, *trust_proxy)
        self._on_refused = on_refused
        self._open: dict[str, dict[Connection, None]] = {}  # by address, the oldest first
        self._count = 0

    def opened(self, connection: Connection) -> None:
        """Count a connection; close an idle one for it, or refuse it."""
        address = _address(connection)
        own = self._open.get(address, {})
        if len(own) >= self._most_of_one and not in_networks(address, self._proxies):
            admitted, status = self._close_idle(own), 429
        elif self._count >= self._most:
            largest = max(self._open.values(), key=len)
            everybody = chain.from_iterable(self._open.values())
            admitted, status = self._close_idle(chain(largest, everybody)), 503
        else:
            admitted, status = True, 0
        if admitted:
            self._open.setdefault(address, {})[connection] = None
            self._count += 1
        else:
            self._refuse(connection, status)
            self._on_refused(address, status)

    def closed(self, connection: Connection) -> None:
        """Forget a connection, if it was counted."""
        address = _address(connection)
        own = self._open.get(address, {})
        if connection in own:
            del own[connection]
            self._count -= 1
            if not own:
                del self._open[address]  # addresses would add up

    def _close_idle(self, candidates: Iterable[Connection]) -> bool:
        """Close the first that nothing is being answered on."""
        idle = next(filter(_is_idle, candidates), None)
        if idle is not None:
            self.closed(idle)
            idle.transport.close()
        return idle is not None

    def _refuse(self, connection: Connection, status: int) -> None:
        whose, most = ("This address has", self._most_of_one) if status == 429 else (
            "The service has", self._most)  # fmt: skip
        problem = Problem(
            status,
            f"{whose} {most:,} connections with requests in progress, which is the limit; try "
            "again in a second.",
            retry=1,
            close=True,
        )
        response = error_response(status, problem.sentence, problem.headers)
        phrase = b"Too Many Requests" if status == 429 else b"Service Unavailable"
        head = b"".join(b"%s: %s\r\n" % header for header in response.raw_headers)
        connection.transport.write(
            b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (status, phrase, head, response.body)
        )
        connection.transport.close()


def limited(protocol: Made, admission: Admission) -> Made:
    """An HTTP protocol of uvicorn whose connections are counted."""

    class Limited(protocol):  # type: ignore[misc,valid-type]
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            admission.opened(self)

        def connection_lost(self, exc: Exception | None) -> None:
            admission.closed(self)
            super().connection_lost(exc)

    return Limited  # type: ignore[return-value]


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
    """How many connections fit below the limit of descriptors, whose soft limit is raised for them.

    An EngramError if there is hardly room for any.
    """
    others = _OWN + 4 * settings.decoders + 4 * _AT_ONCE  # being opened and closed
    wanted = settings.connections + others
    soft, hard = (
        wanted if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if soft < wanted and soft < hard:
        soft = min(wanted, hard)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
    if soft < others + min(_FEWEST, settings.connections):
        raise EngramError(
            f"This process may have {soft} open files, and the service needs {others} besides its "
            f"connections; raise the limit (`ulimit -n`) to {wanted} for {flag('connections')} "
            f"{settings.connections}."
        )
    return min(settings.connections, soft - others)


def _address(connection: Connection) -> str:
    return connection.client[0] if connection.client else "unknown"


def _is_idle(connection: Connection) -> bool:
    """Whether nothing is asked, and nothing of an answer is still being sent."""
    if connection.cycle is not None and not connection.cycle.response_complete:
        return False
    return not connection.transport.get_write_buffer_size()
