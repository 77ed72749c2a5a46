"""HTTP connections: a time limit for the head of a request, and answers to half-closed ones."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class ServiceProtocol(H11Protocol):
    """Closes a connection when the head of a request is not complete in time.

    The server itself closes only connections that are idle after a response: one that sends
    nothing at first, or one header now and then, would stay open for ever.

    A client that has sent all of its request may close its side of the connection, and is answered.
    """

    _timer: asyncio.TimerHandle | None = None
    _half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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

    def _answering(self) -> bool:
        received = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        return received and self.cycle is not None and not self.cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _update_timer(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._timer is None:  # the time starts once: more bytes do not extend it
            self._timer = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
