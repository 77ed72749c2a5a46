"""Requests share forward passes, and the queue has a limit."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tests.support.serving import World

from engram.serve.batching import Batcher
from engram.serve.catalogue import Catalogue
from engram.serve.problems import Problem
from engram.serve.settings import Settings


def test_a_batch_has_images_of_many_requests(world: World) -> None:
    settings = Settings(batch=4, wait_ms=200)
    snapshot = Catalogue.load(world.bundle, settings).now
    sizes: list[int] = []

    async def run() -> list[dict[str, torch.Tensor]]:
        batcher = Batcher(settings, sizes.append)
        batcher.start()
        views = [torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8) for _ in range(6)]
        names = [["first"], ["second", "base"], ["first"], ["base"], ["second"], ["first"]]
        waiting = [
            batcher.run(snapshot, [view], tasks) for view, tasks in zip(views, names, strict=True)
        ]
        outputs = await asyncio.gather(*waiting)
        await batcher.stop()
        assert [list(one[0]) for one in outputs] == names
        return [one[0] for one in outputs]

    asyncio.run(run())
    assert sizes == [4, 2]


def test_images_beyond_the_queue_are_refused() -> None:
    async def run() -> None:
        batcher = Batcher(Settings(queue=3, max_images=3))
        with batcher.reserve(2), pytest.raises(Problem) as refused:
            batcher.check_capacity(2)
        assert refused.value.status == 503
        assert refused.value.headers == {"Retry-After": "1"}
        batcher.check_capacity(3)

    asyncio.run(run())
