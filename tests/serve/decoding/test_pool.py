"""Whatever a picture does to its decoder, the decoder is replaced and other requests go on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.support.serving import flat_png, picture
from tests.support.waiting import FUSE, running, wait_until

from benchmarks.serve.malformed import BOUNDARY, form
from engram.images.decode import BadImage, LargeImage
from engram.images.preprocessing import Preprocessing
from engram.serve.decoding.pool import Decoder, Pool
from engram.serve.routes.schemas import PredictOptions
from engram.serve.service_settings import Settings

PREPROCESSING = Preprocessing((16, 16), None)
KIND = f"multipart/form-data; boundary={BOUNDARY.decode()}"


def body(*images: bytes) -> bytearray:
    return bytearray(form(*[("image", data, True) for data in images]))


async def ask(decoder: Decoder, data: bytes) -> tuple[int, ...]:
    """The shape of the view of a picture."""
    received = await decoder.read(PredictOptions, KIND, body(data))
    assert received.names == ["image.png"]
    view = (await decoder.decode(0, "image.png", PREPROCESSING)).view
    return tuple(view.shape)


def run(work: Callable[[Pool], Awaitable[None]], **settings: Any) -> list[str]:
    """Run with a pool, and give the reasons why decoders were killed."""
    killed: list[str] = []

    async def main() -> None:
        pool = Pool(Settings(**settings), killed.append)
        await pool.start()
        await work(pool)
        await pool.stop()
        async with asyncio.timeout(FUSE), pool.decoder() as decoder:  # it can be used again
            assert await ask(decoder, picture()) == (16, 16, 3)
        await pool.stop()

    asyncio.run(main())
    return killed


def test_a_picture_that_takes_for_ever_ends_its_decoder_alone() -> None:
    async def work(pool: Pool) -> None:
        stopped = asyncio.Event()

        async def stuck() -> None:
            async with pool.decoder("a") as decoder:
                await decoder.read(PredictOptions, KIND, body(picture()))
                os.kill(decoder.child.pid, signal.SIGSTOP)
                stopped.set()
                await decoder.decode(0, "a.jpg", PREPROCESSING)

        async def others() -> None:
            async with pool.decoder() as decoder:
                assert await ask(decoder, picture()) == (16, 16, 3)

        task = asyncio.create_task(stuck())
        await stopped.wait()
        await others()
        assert not task.done()
        with pytest.raises(LargeImage, match=r"a\.jpg: it takes more than 2 seconds"):
            await task
        for _ in range(3):  # the one that replaces it, too
            await others()

    assert run(work, decoders=2, decode_timeout=2.0) == ["2 seconds were over"]


def test_a_decoder_has_a_limit_on_memory() -> None:
    async def work(pool: Pool) -> None:
        with pytest.raises(LargeImage, match="it takes too much memory"):
            async with pool.decoder() as decoder:
                await ask(decoder, flat_png(7000))
        async with pool.decoder() as decoder:
            assert await ask(decoder, picture()) == (16, 16, 3)

    assert run(work, decoders=1, decode_memory=30_000_000) == ["it ran out of memory"]


def test_a_decoder_that_dies_at_work_is_replaced() -> None:
    async def work(pool: Pool) -> None:
        async with pool.decoder() as decoder:
            os.kill(decoder.child.pid, signal.SIGKILL)
            with pytest.raises(BadImage, match="ended the process"):
                await ask(decoder, picture())
        async with pool.decoder() as decoder:
            assert await ask(decoder, picture()) == (16, 16, 3)

    assert run(work, decoders=1) == ["it had ended by itself"]


def test_a_decoder_that_died_while_it_was_idle_is_not_noticed() -> None:
    async def work(pool: Pool) -> None:
        async with pool.decoder() as decoder:
            pid = decoder.child.pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not running(pid))
        async with pool.decoder() as decoder:
            assert await ask(decoder, picture()) == (16, 16, 3)
            assert decoder.child.pid != pid

    assert run(work, decoders=1) == []


def test_a_cancelled_request_takes_its_decoder_with_it() -> None:
    async def work(pool: Pool) -> None:
        stopped = asyncio.Event()

        async def stuck() -> None:
            async with pool.decoder() as decoder:
                os.kill(decoder.child.pid, signal.SIGSTOP)
                stopped.set()
                await decoder.read(PredictOptions, KIND, body(picture()))

        task = asyncio.create_task(stuck())
        await stopped.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with pool.decoder() as decoder:
            assert await ask(decoder, picture()) == (16, 16, 3)

    assert run(work, decoders=1) == ["its request was cancelled"]


def test_images_of_a_request_that_was_refused_are_forgotten() -> None:
    async def work(pool: Pool) -> None:
        async with pool.decoder() as decoder:
            await decoder.read(PredictOptions, KIND, body(picture()))
        async with pool.decoder() as decoder:
            assert await ask(decoder, picture()) == (16, 16, 3)

    assert run(work, decoders=1) == []


def test_slow_images_of_one_client_leave_a_decoder_for_others() -> None:
    async def work(pool: Pool) -> None:
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
