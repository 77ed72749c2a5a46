"""Images of many requests in one forward pass: a bounded queue, a bounded wait, one thread."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch import Tensor

from engram.serve.catalogue import Snapshot
from engram.serve.limits import Shares
from engram.serve.log import Log
from engram.serve.outputs import Outputs, computed_values, forward_asked, is_finite
from engram.serve.problems import Problem
from engram.serve.service_settings import Settings
from engram.serve.telemetry import PASS, QUEUE, Telemetry

Result = TypeVar("Result")

MOST_SKIPPED = 9  # passes in a row that are not compared, of a service with images waiting


@dataclass(eq=False)
class _Job:
    snapshot: Snapshot
    view: Tensor  # uint8 (h, w, 3), or normalised pixels (3, h, w)
    names: Sequence[str]  # of the outputs that it is asked for
    embeds: bool
    outputs: asyncio.Future[Outputs]
    began: int = 0  # when its pass began, in nanoseconds


class Batcher:
    """Collects images from requests and runs the engine on several at once.

    All images of a batch belong to one snapshot, and either all or none are to be vectors; each
    gets the outputs of the tasks it asked for, and the model itself computes no others for it.
    """

    def __init__(self, settings: Settings, telemetry: Telemetry, log: Log) -> None:
        self.settings, self._telemetry = settings, telemetry
        self._shadows = Shadows(telemetry, log)
        # For images accepted and not yet answered. One client gets half, or one request.
        most = max(settings.max_images, settings.queue // 2)
        self.places = Shares(most, "images waiting", settings.queue)
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
        self.places.check()

    @contextmanager
    def reserve(self, images: int, client: str) -> Iterator[None]:
        """Hold places in the queue, or refuse with a Problem that says when to try again."""
        with self.places.taken(client, images):
            self._telemetry.queued_images.inc(images)
            try:
                yield
            finally:
                self._telemetry.queued_images.dec(images)

    async def run(
        self,
        snapshot: Snapshot,
        views: Sequence[Tensor],
        names: Sequence[str],
        embeds: bool = False,
    ) -> list[Outputs]:
        """The outputs of these names for each image, or the vectors of these tasks.

        The caller has reserved places for the images.
        """
        loop = asyncio.get_running_loop()
        jobs = [_Job(snapshot, view, names, embeds, loop.create_future()) for view in views]
        self._jobs += jobs
        self._some.set()
        if len(self._jobs) >= self.settings.batch:
            self._enough.set()
        waiting = time.time_ns()
        outputs = await asyncio.gather(*(job.outputs for job in jobs))
        began = max(job.began for job in jobs)
        self._telemetry.record_stage(QUEUE, waiting, began)
        self._telemetry.record_stage(PASS, began, time.time_ns())
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
                self._telemetry.batch_images.observe(len(jobs))
                outputs = await self._run_batch(jobs)
                if outputs and self._shadows.compares(jobs[0], waiting=bool(self._jobs)):
                    await self.in_engine_thread(partial(self._shadows.compare, jobs, outputs))
            if not self._jobs:
                self._some.clear()

    def _next_batch(self) -> list[_Job]:
        """The oldest image, and those after it that can share its forward pass.

        Their outputs together have half the values that one answer may have, unless those of one
        image are more: masks, too, are made of logits, and a pass of many images would be large.
        """
        jobs, names, size = list[_Job](), set[str](), 0
        while self._jobs and len(jobs) < self.settings.batch:
            if self._jobs[0].outputs.done():  # its request was cancelled
                self._jobs.popleft()
                continue
            job = self._jobs[0]
            if jobs and (job.snapshot, job.embeds) != (jobs[0].snapshot, jobs[0].embeds):
                break
            if not names.issuperset(job.names):  # some engines compute for each what any asks for
                names |= set(job.names)
                size = computed_values(job.snapshot, names)
            if jobs and 2 * size * (len(jobs) + 1) > self.settings.max_values:
                break
            jobs.append(self._jobs.popleft())
        return jobs

    async def _run_batch(self, jobs: Sequence[_Job]) -> list[Outputs]:
        """Answer these images; gives their outputs, or none after an error."""
        snapshot, embeds, began = jobs[0].snapshot, jobs[0].embeds, time.time_ns()
        for job in jobs:
            job.began = began

        views, asked = [job.view for job in jobs], [job.names for job in jobs]
        forward = partial(forward_asked, snapshot, views, asked, embeds)
        try:
            outputs = await self.in_engine_thread(forward)
        except Exception as error:
            for job in jobs:
                if not job.outputs.done():
                    job.outputs.set_exception(error)
            return []
        for job, own in zip(jobs, outputs, strict=True):
            if not job.outputs.done():
                job.outputs.set_result(own)
        return outputs


class Shadows:
    """Compares new versions of tasks, which do not answer yet, with those that clients hear.

    After a pass, and after its requests have their outputs, each shadow of a task that was asked
    for runs on the same images. What it says goes into metrics and the log only. A service with
    images waiting skips this for up to nine passes in ten, so that its clients wait for at most a
    tenth more.
    """

    def __init__(self, telemetry: Telemetry, log: Log) -> None:
        self._telemetry, self._log, self._skipped = telemetry, log, 0

    def compares(self, job: _Job, waiting: bool) -> bool:
        """Whether the pass of an image, which just ended, is compared."""
        if job.embeds or not job.snapshot.shadows:
            return False
        self._skipped = self._skipped + 1 if waiting and self._skipped < MOST_SKIPPED else 0
        return not self._skipped

    def compare(self, jobs: Sequence[_Job], outputs: Sequence[Outputs]) -> None:
        """Run the shadows of what these images were asked for; an error is a line in the log."""
        snapshot, seconds = jobs[0].snapshot, (time.time_ns() - jobs[0].began) / 1e9
        for name, shadow in snapshot.shadows.items():
            rows = [i for i, own in enumerate(outputs) if name in own]
            if not rows:
                continue
            began = time.perf_counter()
            try:
                views = [jobs[i].view for i in rows]
                found = forward_asked(shadow, views, [[name]] * len(rows), False)
                own = time.perf_counter() - began
                pairs = [(outputs[i][name], one[name]) for i, one in zip(rows, found, strict=True)]
                shares = [agreement(snapshot, shadow, name, *pair) for pair in pairs]
            except Exception as error:
                self._log.event_seldom("shadow failed", task=name, reason=repr(error))
                continue
            version = shadow.version(name)
            self._telemetry.shadow_seconds.labels(name, version).observe(own)
            for share in shares:
                self._telemetry.shadow_agreement.labels(name, version).observe(share)
            self._log.event("shadow", task=name, version=version, images=len(rows),
                            agreement=round(sum(shares) / len(shares), 4), ms=round(1000 * own, 1),
                            answered_ms=round(1000 * seconds, 1))  # fmt: skip


def agreement(
    snapshot: Snapshot, shadow: Snapshot, name: str, output: Tensor, other: Tensor
) -> float:
    """Agreement of a task and its shadow about an image; 0 for an output that is not finite."""
    if not is_finite(output) or not is_finite(other):
        return 0.0
    task = snapshot.model.task(name)
    return task.kind.agreement(task.reading(output), shadow.model.task(name).reading(other))
