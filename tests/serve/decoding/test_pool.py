"""Whatever a picture does to its decoder, the decoder is replaced and other requests go on."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing import forkserver
from typing import Any

import psutil
import pytest
from tests.support.decoders import work_for
from tests.support.serving import flat_png, picture
from tests.support.waiting import FUSE, running, wait_until

from benchmarks.serve.malformed import BOUNDARY, form
from engram.images.preprocessing import Preprocessing
from engram.serve.decoding.pool import Decoder, DecoderPool
from engram.serve.decoding.upload import read_upload
from engram.serve.decoding.worker import BodyDecoder
from engram.serve.log import Log
from engram.serve.problems import Problem
from engram.serve.schemas import PredictOptions
from engram.serve.service_settings import Settings
from engram.serve.telemetry import Telemetry

PREPROCESSING = Preprocessing((16, 16), None)
KIND = f"multipart/form-data; boundary={BOUNDARY.decode()}"
READ = partial(read_upload, PredictOptions, KIND, 9)


def body(*images: bytes) -> bytearray:
    return bytearray(form(*[("image", data, True) for data in images]))


def pid_of(decoder: Decoder) -> int:
    assert decoder.process.pid is not None
    return decoder.process.pid


async def ask(decoder: Decoder, data: bytes) -> tuple[int, ...]:
    """The shape of the view of a picture."""
    names, _ = await decoder.read(PredictOptions, READ, body(data))
    assert names == ["image.png"]
    view = (await decoder.decode("image.png", PREPROCESSING)).view
    return tuple(view.shape)


class Reasons(Log):
    """A log of which the reasons are kept."""

    def __init__(self) -> None:
        super().__init__("text")
        self.found: list[str] = []

    def event(self, event: str, **facts: Any) -> None:
        self.found.append(facts["reason"])


def run(work: Callable[[DecoderPool], Awaitable[None]], **settings: Any) -> list[str]:
    """Run with a pool, and give the reasons why decoders were killed."""
    log = Reasons()

    async def main() -> None:
        pool = DecoderPool(Settings(**settings), Telemetry(), log)
        await pool.start()
        await work(pool)
        async with asyncio.timeout(FUSE), pool.decoder("b") as decoder:  # it can still be used
            assert await ask(decoder, picture()) == (16, 16, 3)
        pool.stop()

    asyncio.run(main())
    return log.found


def test_a_picture_that_takes_for_ever_ends_its_decoder_alone() -> None:
    async def work(pool: DecoderPool) -> None:
        stopped = asyncio.Event()

        async def stuck() -> None:
            async with pool.decoder("a") as decoder:
                await decoder.read(PredictOptions, READ, body(picture()))
                os.kill(pid_of(decoder), signal.SIGSTOP)
                stopped.set()
                await decoder.decode("a.jpg", PREPROCESSING)

        async def others() -> None:
            async with pool.decoder("b") as decoder:
                assert await ask(decoder, picture()) == (16, 16, 3)

        task = asyncio.create_task(stuck())
        await stopped.wait()
        await others()
        assert not task.done()
        with pytest.raises(Problem, match=r"a\.jpg: it takes more than 2 seconds"):
            await task
        for _ in range(3):  # the one that replaces it, too
            await others()

    assert run(work, decoders=2, decode_timeout=2.0) == ["2 seconds were over"]


def test_a_decoder_has_a_limit_on_memory() -> None:
    async def work(pool: DecoderPool) -> None:
        with pytest.raises(Problem, match="it takes too much memory"):
            async with pool.decoder("b") as decoder:
                await ask(decoder, flat_png(7000))
        async with pool.decoder("b") as decoder:
            assert await ask(decoder, picture()) == (16, 16, 3)

    assert run(work, decoders=1, decode_memory=30_000_000) == ["out of memory"]


@pytest.mark.parametrize(
    ("ended_by", "status", "reason"),
    [
        (signal.SIGSEGV, 422, "it had ended by itself"),  # as a flaw of a library would
        (signal.SIGKILL, 503, "somebody else had killed it"),
    ],
)
def test_a_decoder_that_dies_at_work_is_replaced(
    ended_by: signal.Signals, status: int, reason: str
) -> None:
    async def work(pool: DecoderPool) -> None:
        async with pool.decoder("b") as decoder:
            os.kill(pid_of(decoder), ended_by)
            with pytest.raises(Problem, match="the process") as caught:
                await ask(decoder, picture())
            assert caught.value.status == status
        async with pool.decoder("b") as decoder:
            assert await ask(decoder, picture()) == (16, 16, 3)

    assert run(work, decoders=1) == [reason]


def test_a_decoder_that_died_while_it_was_idle_is_not_noticed() -> None:
    async def work(pool: DecoderPool) -> None:
        async with pool.decoder("b") as decoder:
            pid = pid_of(decoder)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not running(pid))
        async with pool.decoder("b") as decoder:
            assert await ask(decoder, picture()) == (16, 16, 3)
            assert pid_of(decoder) != pid

    assert run(work, decoders=1) == []


def test_a_cancelled_request_takes_its_decoder_with_it() -> None:
    async def work(pool: DecoderPool) -> None:
        stopped = asyncio.Event()

        async def stuck() -> None:
            async with pool.decoder("b") as decoder:
                os.kill(pid_of(decoder), signal.SIGSTOP)
                stopped.set()
                await decoder.read(PredictOptions, READ, body(picture()))

        task = asyncio.create_task(stuck())
        await stopped.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with pool.decoder("b") as decoder:
            assert await ask(decoder, picture()) == (16, 16, 3)

    assert run(work, decoders=1) == ["its request was cancelled"]


def test_images_of_a_request_that_was_refused_are_forgotten() -> None:
    async def work(pool: DecoderPool) -> None:
        async with pool.decoder("b") as decoder:
            await decoder.read(PredictOptions, READ, body(picture()))
        async with pool.decoder("b") as decoder:
            assert await ask(decoder, picture()) == (16, 16, 3)

    assert run(work, decoders=1) == []


def test_slow_images_of_one_client_leave_a_decoder_for_others() -> None:
    async def work(pool: DecoderPool) -> None:
        entered = asyncio.Event()

        async def hold() -> None:
            async with pool.decoder("a"):
                await entered.wait()

        held = [asyncio.create_task(hold()) for _ in range(5)]
        await asyncio.sleep(0)
        async with asyncio.timeout(FUSE), pool.decoder("b") as decoder:
            assert await ask(decoder, picture()) == (16, 16, 3)
        entered.set()
        await asyncio.gather(*held)
        assert not pool._turns  # addresses do not add up

    assert run(work, decoders=2) == []


def test_signals_of_a_terminal_do_not_end_a_decoder() -> None:
    async def work(pool: DecoderPool) -> None:
        async with pool.decoder("b") as decoder:
            assert await ask(decoder, picture()) == (16, 16, 3)
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(pid_of(decoder), number)
            assert await ask(decoder, picture()) == (16, 16, 3)

    assert run(work, decoders=1) == []


def test_a_decoder_is_started_after_the_fork_server_was_killed() -> None:
    async def work(pool: DecoderPool) -> None:
        async with pool.decoder("b") as decoder:
            before = psutil.Process(pid_of(decoder))
            server = before.parent()
            assert server is not None
            assert server.pid != os.getpid()
            server.kill()
            wait_until(lambda: not running(server.pid))
            assert await ask(decoder, picture()) == (16, 16, 3)  # it goes on
            before.kill()
            wait_until(lambda: not running(before.pid))
        async with pool.decoder("b") as decoder:
            assert await ask(decoder, picture()) == (16, 16, 3)

    assert run(work, decoders=1) == []


def test_a_decoder_does_not_know_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGRAM_TOKEN", "a-secret")
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # the next one is started now

    async def work(pool: DecoderPool) -> None:
        async with pool.decoder("b") as decoder:
            process = psutil.Process(pid_of(decoder))
            assert await ask(decoder, picture()) == (16, 16, 3)
            for one in (process, *process.parents()[:1]):
                assert "ENGRAM_TOKEN" not in one.environ()
        assert os.environ["ENGRAM_TOKEN"] == "a-secret"

    assert run(work, decoders=1) == []


@pytest.mark.parametrize("busy", [False, True])
def test_a_decoder_ends_without_its_service(busy: bool) -> None:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=work_for, args=(theirs, FUSE if busy else 0), daemon=True)
    process.start()
    theirs.close()
    if busy:
        ours.send(("a", BodyDecoder.decode, (PREPROCESSING, 1), False))
    else:
        ours.close()
    process.join(FUSE)
    assert process.exitcode == (-signal.SIGALRM if busy else 0)
