"""Requests share forward passes, and the queue has a limit."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace

import pytest
import torch
from tests.support.serving import World

from engram.inference.engine import OneByOne, TorchEngine
from engram.serve.batching import Batcher
from engram.serve.catalogue import Catalogue
from engram.serve.log import Log
from engram.serve.outputs import forward_asked, forward_views
from engram.serve.problems import Problem
from engram.serve.service_settings import Settings
from engram.serve.telemetry import Telemetry


def counting(sizes: list[int]) -> Telemetry:
    """Measurements of which the sizes of batches are kept."""
    telemetry = Telemetry()
    telemetry.batch_images.observe = sizes.append  # type: ignore[method-assign,assignment]
    return telemetry


def batching(settings: Settings, telemetry: Telemetry) -> Batcher:
    return Batcher(settings, telemetry, Log("text"))


def test_a_batch_has_images_of_many_requests(world: World) -> None:
    settings = Settings(batch=4, wait_ms=200)
    snapshot = Catalogue.load(world.bundle, settings).now
    sizes: list[int] = []

    async def run() -> list[dict[str, torch.Tensor]]:
        batcher = batching(settings, counting(sizes))
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
        batcher = batching(Settings(queue=3, max_images=3), Telemetry())
        with batcher.reserve(2, "a"), pytest.raises(Problem) as refused, batcher.reserve(2, "b"):
            pass
        assert refused.value.status == 503
        assert refused.value.headers == {"Retry-After": "1"}
        with batcher.reserve(3, "a"):
            pass

    asyncio.run(run())


def test_requests_for_different_tasks_share_a_pass_that_computes_no_others(world: World) -> None:
    settings = Settings(batch=4, wait_ms=200)
    snapshot = Catalogue.load(world.bundle, settings).now
    sizes: list[int] = []
    heads: list[tuple[str, int]] = []
    for name, task in snapshot.model.tasks.items():
        task.head.register_forward_hook(
            lambda _, given, output, name=name: heads.append((name, len(output)))
        )
    views = [torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8) for _ in range(4)]
    names = [["first"], ["second", "base"], ["first", "second"], ["base"]]

    async def run() -> list[dict[str, torch.Tensor]]:
        batcher = batching(settings, counting(sizes))
        batcher.start()
        pairs = zip(views, names, strict=True)
        outputs = await asyncio.gather(*(batcher.run(snapshot, [v], tasks) for v, tasks in pairs))
        await batcher.stop()
        return [one[0] for one in outputs]

    together = asyncio.run(run())
    assert sizes == [4]
    assert heads == [("first", 2), ("second", 2)]
    for view, own, answer in zip(views, names, together, strict=True):
        lone = forward_views(snapshot, [view], own)
        assert list(answer) == own
        for name in own:
            torch.testing.assert_close(answer[name], lone[name][0].cpu(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("embeds", [False, True])
@pytest.mark.parametrize("itself", [True, False], ids=["the model", "another engine"])
def test_an_answer_is_that_of_a_lone_request(world: World, itself: bool, embeds: bool) -> None:
    snapshot = Catalogue.load(world.bundle, Settings()).now
    if not itself:  # one that cannot compute for each image other tasks
        snapshot = replace(snapshot, engine=OneByOne(snapshot.engine))
    views = [torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8) for _ in range(3)]
    asked = [["first"], ["base", "second"], ["second"]]
    answers = forward_asked(snapshot, views, asked, embeds)
    for view, own, answer in zip(views, asked, answers, strict=True):
        lone = forward_views(snapshot, [view], own, embeds)
        assert list(answer) == own
        for name in own:
            torch.testing.assert_close(answer[name], lone[name][0].cpu(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("embeds", [False, True])
def test_a_pass_has_half_the_values_that_an_answer_may_have(world: World, embeds: bool) -> None:
    settings = Settings(batch=4, wait_ms=200, max_values=2 * 2 * 7 + 1)  # base has seven classes
    snapshot = Catalogue.load(world.bundle, settings).now
    sizes: list[int] = []

    async def run() -> None:
        batcher = batching(settings, counting(sizes))
        batcher.start()
        views = [torch.zeros(16, 16, 3, dtype=torch.uint8)] * 5
        assert len(await batcher.run(snapshot, views, ["base"], embeds)) == 5
        await batcher.stop()

    asyncio.run(run())
    assert sizes == [2, 2, 1]
