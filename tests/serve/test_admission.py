"""Connections that clients only hold keep nobody out, and nobody can have all of them."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from tests.support.nursery import Nursery
from tests.support.serving import Launch, Server
from tests.support.waiting import FUSE, wait_until
from uvicorn.server import ServerState

from engram.serve.connections import ServiceProtocol
from engram.serve.log import Log
from engram.serve.service_settings import Settings

ASK = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
PROXY, CLIENT, OTHER = "127.0.0.1", "127.0.0.2", "127.0.0.3"
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[str], Awaitable[Stream]]


# In one process


def connecting(
    talk: Callable[[Connect, asyncio.Event], Awaitable[None]], most: int, most_of_one: int
) -> None:
    """Talk to a server with these limits, which answers when the event is set."""

    async def main() -> None:
        answering, state = asyncio.Event(), ServerState()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await answering.wait()
            await PlainTextResponse("yes")(scope, receive, send)

        protocol = partial(
            ServiceProtocol, Settings(client_connections=most_of_one), most, Log("text")
        )
        config = uvicorn.Config(
            app,
            http=protocol,  # type: ignore[arg-type]
            log_level="error",
        )
        config.load()
        server = await asyncio.get_running_loop().create_server(
            lambda: protocol(config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        address = server.sockets[0].getsockname()

        async def connect(source: str) -> Stream:
            return await asyncio.open_connection(*address, local_addr=(source, 0))

        async with server, asyncio.timeout(FUSE):
            await talk(connect, answering)
            for connection in tuple(state.connections):
                connection.transport.abort()

    asyncio.run(main())


async def asked(stream: Stream) -> bytes:
    stream[1].write(ASK)
    return await stream[0].readuntil(b"\r\n\r\n") + await stream[0].readexactly(3)


async def refusal(stream: Stream) -> tuple[bytes, str]:
    head, _, body = (await stream[0].read()).partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return head.split()[1], json.loads(body)["error"]


def test_the_oldest_idle_connection_of_an_address_makes_room_for_its_next() -> None:
    async def talk(connect: Connect, answering: asyncio.Event) -> None:
        answering.set()
        other = await connect(OTHER)
        first, second = await connect(CLIENT), await connect(CLIENT)
        assert b"200" in await asked(first)  # idle again
        third = await connect(CLIENT)
        assert await first[0].read() == b""
        for stream in (second, third, other):
            assert b"200" in await asked(stream)

    connecting(talk, 10, 2)


def test_a_trusted_proxy_may_have_more_connections_than_a_client_and_keeps_them() -> None:
    async def talk(connect: Connect, answering: asyncio.Event) -> None:
        answering.set()
        streams = [await connect(PROXY) for _ in range(8)]
        for _ in range(2):
            for stream in streams:
                assert b"200" in await asked(stream)

    connecting(talk, 10, 2)


def test_whoever_has_most_connections_makes_room_when_all_are_taken() -> None:
    async def talk(connect: Connect, answering: asyncio.Event) -> None:
        answering.set()
        lonely = await connect(CLIENT)
        many = [await connect(PROXY) for _ in range(3)]
        newest = await connect(OTHER)
        assert await many[0][0].read() == b""
        for stream in (lonely, *many[1:], newest):
            assert b"200" in await asked(stream)

    connecting(talk, 4, 4)


def test_what_is_being_answered_is_never_closed_for_another() -> None:
    async def talk(connect: Connect, answering: asyncio.Event) -> None:
        busy = [await connect(CLIENT) for _ in range(2)]
        answers = [asyncio.create_task(asked(stream)) for stream in busy]
        await asyncio.sleep(0.05)
        status, sentence = await refusal(await connect(CLIENT))
        assert status == b"429"
        assert "address has 2 connections" in sentence
        answers.append(asyncio.create_task(asked(await connect(PROXY))))
        await asyncio.sleep(0.05)
        status, sentence = await refusal(await connect(OTHER))
        assert status == b"503"
        assert "service has 3 connections" in sentence
        answering.set()
        assert all(b"200" in answer for answer in await asyncio.gather(*answers))
        assert b"200" in await asked(await connect(OTHER))

    connecting(talk, 3, 2)


# The service itself


@contextmanager
def held(server: Server, count: int, source: str = PROXY) -> Iterator[list[socket.socket]]:
    """So many connections that say nothing."""
    address = urlsplit(server.url)
    connections = [socket.socket() for _ in range(count)]
    try:
        for connection in connections:
            connection.bind((source, 0))
            connection.setblocking(False)
            connection.connect_ex((address.hostname, address.port))
        yield connections
    finally:
        for connection in connections:
            connection.close()


def healthy(server: Server, source: str = PROXY) -> bool:
    transport = httpx.HTTPTransport(local_address=source)
    with httpx.Client(transport=transport, timeout=60) as client:
        return client.get(f"{server.url}/healthz").status_code == 200


def descriptors(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.running.pid}/fd"))


def test_idle_connections_beyond_the_descriptors_stop_nobody(bundle: Path, launch: Launch) -> None:
    server = launch(bundle, nofile=(64, 400))
    assert 50 < server.document["connections"] < 400
    before = descriptors(server)
    with held(server, 500), held(server, 200, CLIENT):
        for source in (PROXY, CLIENT, OTHER):
            assert healthy(server, source)
        assert descriptors(server) < 400
    wait_until(lambda: descriptors(server) <= before + 1)
    assert server.stop() == 0
    lines = server.running.stderr.splitlines()
    assert all("/healthz 200" in line for line in lines), lines


def test_the_limit_of_descriptors_is_raised_for_the_connections(
    bundle: Path, launch: Launch
) -> None:
    server = launch(bundle, nofile=(64, 4000))
    assert server.document["connections"] == 1000
    soft, _ = resource.prlimit(server.running.pid, resource.RLIMIT_NOFILE)
    assert 1000 < soft < 4000
    server.stop(signal.SIGKILL)


def test_a_limit_that_leaves_no_room_is_a_sentence(bundle: Path, nursery: Nursery) -> None:
    ended = nursery.start("serve", bundle, nofile=(100, 100)).wait()
    assert ended.code == 2
    assert "open files" in ended.stderr
    assert "ulimit -n" in ended.stderr


def test_an_error_that_comes_again_and_again_is_logged_once(bundle: Path, launch: Launch) -> None:
    """The limit is lowered while the service runs, so that accepting itself fails."""
    server = launch(bundle)
    limits = resource.prlimit(server.running.pid, resource.RLIMIT_NOFILE)
    few = (descriptors(server) + 3, limits[1])
    resource.prlimit(server.running.pid, resource.RLIMIT_NOFILE, few)
    with held(server, 200):
        wait_until(lambda: "accept" in server.running.stderr)
    resource.prlimit(server.running.pid, resource.RLIMIT_NOFILE, limits)
    assert healthy(server)
    server.stop()
    assert server.running.stderr.count("Traceback") == 1


def test_answers_that_are_not_read_do_not_hold_their_connections(
    bundle: Path, launch: Launch
) -> None:
    server = launch(bundle, "--timeout", "2")
    before, address = descriptors(server), urlsplit(server.url)
    with ExitStack() as until_the_end:
        for _ in range(5):
            connection = until_the_end.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((address.hostname, address.port))
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
        wait_until(lambda: descriptors(server) > before + 2)
        wait_until(lambda: descriptors(server) <= before)
    server.stop()
