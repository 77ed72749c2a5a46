"""Images of many requests in one forward pass: a bounded queue, a bounded wait, one thread."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from engram.inference.engine import on_cpu, pixels_of
from engram.serve.catalogue import Snapshot
from engram.serve.clients import Shares
from engram.serve.problems import Problem
from engram.serve.settings import Settings
from engram.serve.stages import PASS, QUEUE

Result = TypeVar("Result")
#: Of one image, by task. Where a task tells how familiar the image looks, that is under
#: `score_of(task)`, which no task can be called.
Outputs = dict[str, Tensor]


def score_of(task: str) -> str:
    """Where outputs have the score of a task."""
    return f"{task}:score"


@dataclass(eq=False)
class _Job:
    snapshot: Snapshot
    view: Tensor  # uint8 (h, w, 3), or normalised pixels (3, h, w)
    tasks: Sequence[str]
    embeds: bool
    outputs: asyncio.Future[Outputs]
    began: int = 0  # when its pass began, in nanoseconds


class Batcher:
    """Collects images from requests and runs the engine on several at once.

    All images of a batch belong to one snapshot, and either all or none are to be vectors; each
    gets the outputs of the tasks it asked for, and the model itself computes no others for it.
    `on_batch` is called with the size of every batch, `on_pending` with the images in the queue,
    and `on_stage` with the name of what a request has gone through and its times.
    """

    def __init__(
        self,
        settings: Settings,
        on_batch: Callable[[int], None] = lambda images: None,
        on_pending: Callable[[int], None] = lambda images: None,
        on_stage: Callable[[str, int, int], None] = lambda name, began, ended: None,
    ) -> None:
        self.settings = settings
        self.pending = 0  # images accepted and not yet answered
        self._shares = Shares(max(settings.max_images, settings.queue // 2), "images waiting")
        self._on_batch, self._on_pending, self._on_stage = on_batch, on_pending, on_stage
        self._jobs: deque[_Job] = deque()
        self._some, self._enough = asyncio.Event(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engram-engine")
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop running batches. Requests that still wait get no answer."""
        if self._loop is not None:
            self._loop.cancel()
            with suppress(asyncio.CancelledError):
                await self._loop
        await asyncio.to_thread(self._thread.shutdown)

    @property
    def running(self) -> bool:
        return self._loop is not None and not self._loop.done()

    def check_ready(self) -> None:
        """Refuse with a Problem if the next request would get no answer."""
        if not self.running:
            raise Problem(503, "The engine has stopped; restart the service.", retry=5)
        self.check_capacity()

    def check_capacity(self, images: int = 1) -> None:
        """Refuse images beyond the length of the queue with a Problem."""
        if self.pending + images > self.settings.queue:
            raise Problem(
                503,
                f"Images already waiting: {self.pending}; the limit is {self.settings.queue}. Try "
                "again in a second.",
                retry=1,
            )

    @contextmanager
    def reserve(self, images: int, client: str = "") -> Iterator[None]:
        """Hold places in the queue, or refuse with a Problem that says when to try again.

        One client gets half of the queue, so that there is room for others.
        """
        self.check_capacity(images)
        with self._shares.taken(client, images):
            self._count(images)
            try:
                yield
            finally:
                self._count(-images)

    def _count(self, images: int) -> None:
        self.pending += images
        self._on_pending(self.pending)

    async def run(
        self,
        snapshot: Snapshot,
        views: Sequence[Tensor],
        tasks: Sequence[str],
        embeds: bool = False,
    ) -> list[Outputs]:
        """The outputs of the tasks for each image, or their vectors.

        The caller has reserved places for the images.
        """
        loop = asyncio.get_running_loop()
        jobs = [_Job(snapshot, view, tasks, embeds, loop.create_future()) for view in views]
        self._jobs += jobs
        self._some.set()
        if len(self._jobs) >= self.settings.batch:
            self._enough.set()
        waiting = time.time_ns()
        outputs = await asyncio.gather(*(job.outputs for job in jobs))
        began = max(job.began for job in jobs)
        self._on_stage(QUEUE, waiting, began)
        self._on_stage(PASS, began, time.time_ns())
        return outputs

    async def in_engine_thread(self, work: Callable[[], Result]) -> Result:
        """Call `work` in the engine's thread, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _run(self) -> None:
        while True:
            await self._some.wait()
            if len(self._jobs) < self.settings.batch:
                self._enough.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._enough.wait(), self.settings.wait_ms / 1000)
            jobs = self._next_batch()
            if jobs:
                self._on_batch(len(jobs))
                await self._run_batch(jobs)
            if not self._jobs:
                self._some.clear()

    def _next_batch(self) -> list[_Job]:
        """The oldest image, and those after it that can share its forward pass."""
        jobs: list[_Job] = []
        while self._jobs and len(jobs) < self.settings.batch:
            if self._jobs[0].outputs.done():  # its request was cancelled
                self._jobs.popleft()
            elif jobs and not _share_a_pass(self._jobs[0], jobs[0]):
                break
            else:
                jobs.append(self._jobs.popleft())
        return jobs

    async def _run_batch(self, jobs: Sequence[_Job]) -> None:
        snapshot, embeds, began = jobs[0].snapshot, jobs[0].embeds, time.time_ns()
        for job in jobs:
            job.began = began

        def forward() -> list[Outputs]:
            views, asked = [job.view for job in jobs], [job.tasks for job in jobs]
            return forward_asked(snapshot, views, asked, embeds)

        try:
            outputs = await self.in_engine_thread(forward)
        except Exception as error:
            for job in jobs:
                if not job.outputs.done():
                    job.outputs.set_exception(error)
            return
        for job, own in zip(jobs, outputs, strict=True):
            if not job.outputs.done():
                job.outputs.set_result(own)


def forward_asked(
    snapshot: Snapshot, views: Sequence[Tensor], asked: Sequence[Sequence[str]], embeds: bool
) -> list[Outputs]:
    """For each view the outputs of the tasks that it is asked for, or their vectors, fetched.

    One pass. Where views are asked for different tasks, the model computes only those; an exported
    graph computes for all what any of them is asked for.
    """
    wanted = {name for names in asked for name in names}
    names = [name for name in snapshot.embedding_names if name in wanted]
    if len({frozenset(own) for own in asked}) == 1 or not snapshot.routes(names, embeds):
        outputs = on_cpu(forward_views(snapshot, views, names, embeds))
        places: Mapping[str, Sequence[int]] = {name: range(len(views)) for name in names}
    else:
        outputs = on_cpu(forward_views(snapshot, views, (), embeds, route=asked))
        places = snapshot.model.rows(asked)
    rows = {name: {i: row for row, i in enumerate(images)} for name, images in places.items()}
    found: list[Outputs] = []
    for i, own in enumerate(asked):
        keys = [(name, key) for name in own for key in (name, score_of(name)) if key in outputs]
        found.append({key: outputs[key][rows[name][i]] for name, key in keys})
    return found


def forward_views(
    snapshot: Snapshot,
    views: Sequence[Tensor],
    names: Sequence[str],
    embeds: bool = False,
    route: Sequence[Sequence[str]] | None = None,
) -> Outputs:
    """The outputs and scores of these tasks for all views, or vectors, where they are computed.

    With a `route`, those of each view's own tasks, as `MemoryViT.rows` says. An exported graph has
    no scores, and no routes.
    """
    own = snapshot.computing
    pixels = pixels_of(views, snapshot.preprocessing, own.device)
    if embeds:
        return own.embed(pixels, names, route)
    if own is not snapshot.engine:
        return snapshot.engine.run(pixels, names)
    outputs, scores = own.scored(pixels, names, route)
    return outputs | {score_of(name): score for name, score in scores.items()}


def _share_a_pass(one: _Job, other: _Job) -> bool:
    return one.snapshot is other.snapshot and one.embeds == other.embeds
