"""Images of many requests in one pass: a bounded queue, a bounded wait, one engine thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from engram.images.preprocessing import normalise
from engram.serve.catalogue import Snapshot
from engram.serve.problems import Problem
from engram.serve.settings import Settings

Result = TypeVar("Result")
Logits = dict[str, Tensor]  # of one image, by task


@dataclass(eq=False)
class _Job:
    snapshot: Snapshot
    view: Tensor  # uint8 (h, w, 3)
    tasks: Sequence[str]
    answer: asyncio.Future[Logits]


class Batcher:
    """Collects images and asks the engine about several at once.

    All images of a pass belong to one snapshot; each gets the answers of the tasks it asked for.
    `passed` is told the size of every pass.
    """

    def __init__(self, settings: Settings, passed: Callable[[int], None] = lambda images: None):
        self.settings, self.passed = settings, passed
        self.images = 0  # accepted and not answered
        self._jobs: deque[_Job] = deque()
        self._some, self._enough = asyncio.Event(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engram-engine")
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End, after the server has seen to it that nobody waits any more."""
        if self._loop is not None:
            self._loop.cancel()
            with suppress(asyncio.CancelledError):
                await self._loop
        await asyncio.to_thread(self._thread.shutdown)

    @property
    def running(self) -> bool:
        return self._loop is not None and not self._loop.done()

    def check_room(self, images: int = 1) -> None:
        if self.images + images > self.settings.queue:
            raise Problem(
                503,
                f"{self.images} images are waiting already, and at most {self.settings.queue} may; "
                "try again in a second.",
                retry=1,
            )

    @contextmanager
    def room(self, images: int) -> Iterator[None]:
        """A place in the queue for so many images, or a Problem that says when to come back."""
        self.check_room(images)
        self.images += images
        try:
            yield
        finally:
            self.images -= images

    async def answer(
        self, snapshot: Snapshot, views: Sequence[Tensor], tasks: Sequence[str]
    ) -> list[Logits]:
        """Logits of every image, for requests that have `room`."""
        loop = asyncio.get_running_loop()
        jobs = [_Job(snapshot, view, tasks, loop.create_future()) for view in views]
        self._jobs += jobs
        self._some.set()
        if len(self._jobs) >= self.settings.batch:
            self._enough.set()
        return await asyncio.gather(*(job.answer for job in jobs))

    async def between(self, work: Callable[[], Result]) -> Result:
        """Do something in the engine's thread, between two passes."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _run(self) -> None:
        while True:
            await self._some.wait()
            if len(self._jobs) < self.settings.batch:
                self._enough.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._enough.wait(), self.settings.wait_ms / 1000)
            jobs = self._next()
            if jobs:
                self.passed(len(jobs))
                await self._pass(jobs)
            if not self._jobs:
                self._some.clear()

    def _next(self) -> list[_Job]:
        """The oldest image, and those behind it that can share its pass."""
        jobs: list[_Job] = []
        while self._jobs and len(jobs) < self.settings.batch:
            if self._jobs[0].answer.done():  # its request gave up
                self._jobs.popleft()
            elif jobs and self._jobs[0].snapshot is not jobs[0].snapshot:
                break
            else:
                jobs.append(self._jobs.popleft())
        return jobs

    async def _pass(self, jobs: Sequence[_Job]) -> None:
        snapshot = jobs[0].snapshot
        wanted = {name for job in jobs for name in job.tasks}
        names = [name for name in snapshot.names if name in wanted]

        def ask() -> Logits:
            pixels = normalise(torch.stack([job.view for job in jobs]), snapshot.preprocessing)
            return snapshot.engine.run(pixels, names)

        try:
            logits = await self.between(ask)
        except Exception as error:
            for job in jobs:
                if not job.answer.done():
                    job.answer.set_exception(error)
            return
        for i, job in enumerate(jobs):
            if not job.answer.done():
                job.answer.set_result({name: logits[name][i] for name in job.tasks})
