"""Requests share forward passes, and the queue has a limit."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace

import pytest
import torch
from tests.support.serving import World

from engram.inference.engine import TorchEngine
from engram.serve.batching import Batcher, forward_views
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


@pytest.mark.parametrize("embeds", [False, True])
def test_a_pass_runs_where_the_model_is(world: World, embeds: bool) -> None:
    """On `meta` a tensor that was left on the CPU fails, and so does a look at a value."""
    snapshot = Catalogue.load(world.bundle, Settings()).now
    model = copy.deepcopy(snapshot.model)
    there = replace(snapshot, model=model, engine=TorchEngine(model, device=torch.device("meta")))
    names = ["base", "first", "second"]
    pictures = [torch.zeros(16, 16, 3, dtype=torch.uint8), torch.zeros(16, 16, 3).byte()]
    for views in (pictures, [*pictures, torch.zeros(3, 16, 16)]):  # or with pixels of a client
        outputs = forward_views(there, views, names, embeds)
        assert {output.device.type for output in outputs.values()} == {"meta"}
        here = forward_views(snapshot, views, names, embeds)
        assert [one.shape for one in outputs.values()] == [one.shape for one in here.values()]


def test_images_beyond_the_queue_are_refused() -> None:
    async def run() -> None:
        batcher = Batcher(Settings(queue=3, max_images=3))
        with batcher.reserve(2), pytest.raises(Problem) as refused:
            batcher.check_capacity(2)
        assert refused.value.status == 503
        assert refused.value.headers == {"Retry-After": "1"}
        batcher.check_capacity(3)

    asyncio.run(run())
