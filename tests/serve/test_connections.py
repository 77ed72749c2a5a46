"""A client that never finishes what it asks does not keep its connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from tests.support.waiting import FUSE
from uvicorn.server import ServerState

from engram.serve.connections import ServiceProtocol
from engram.serve.log import Log
from engram.serve.service_settings import Settings

ASK = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    try:
        await Request(scope, receive).body()
    except ClientDisconnect:
        return
    await asyncio.sleep(0.02)
    await PlainTextResponse("yes")(scope, receive, send)


def talk(words: Talk, seconds: float) -> None:
    """Talk over a real socket to a server that waits so long for a head."""

    async def main() -> None:
        config = uvicorn.Config(app, http=ServiceProtocol, log_level="error")
        config.timeout_keep_alive = seconds  # type: ignore[assignment]
        config.load()
        loop, state = asyncio.get_running_loop(), ServerState()
        protocol = partial(
            ServiceProtocol, Settings(), 9, Log("text"), config, server_state=state, app_state={}
        )
        server = await loop.create_server(protocol, "127.0.0.1", 0)
        async with server, asyncio.timeout(FUSE):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            await words(reader, writer)
            writer.close()

    asyncio.run(main())


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    return await reader.readexactly(3)


@pytest.mark.parametrize("before", [0, 1])
def test_headers_that_never_end_are_not_waited_for(before: int) -> None:
    """On a new connection, and behind an answer."""

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(before):
            writer.write(ASK)
            assert await answer(reader) == b"yes"
        writer.write(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"X-More: 1\r\n")
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1), 0.02)

    talk(trickle, 0.2)


def test_silence_is_not_waited_for() -> None:
    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b""

    talk(silence, 0.1)


def test_a_head_in_pieces_and_a_slow_body_are_answered() -> None:
    """A body has a limit of its own, which the service keeps."""

    async def pieces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\n")
        await asyncio.sleep(0.05)
        writer.write(b"Content-Length: 2\r\n\r\n1")
        await asyncio.sleep(1.2)
        writer.write(b"2")
        assert await answer(reader) == b"yes"

    talk(pieces, 1)


@pytest.mark.parametrize("requests", [1, 3])
def test_a_client_that_closes_its_side_is_answered(requests: int) -> None:
    """Also when it has sent several requests; then the connection is closed."""

    async def half_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n12" * requests)
        writer.write_eof()
        for _ in range(requests):
            assert await answer(reader) == b"yes"
        assert await reader.read() == b""

    talk(half_close, 20)


def test_a_request_that_ends_too_early_is_not_waited_for() -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n12")
        writer.write_eof()
        async with asyncio.timeout(15):
            assert b"200" not in await reader.read()

    talk(cut, 20)
