"""Bulk prediction on a cluster: batches go to a pipeline, and to a new one if it is lost."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any

from engram.cluster.connect import connected, room
from engram.cluster.settings import ClusterSettings
from engram.errors import EngramError
from engram.inference.bulk.answers import Answering, Batch, Questions, Row
from engram.inference.bulk.items import is_address
from engram.util.progress import Progress, silent
from engram.util.text import counted, first_line

_POLL = 2.0  # seconds
_PATIENCE = 60.0  # seconds for the pipeline to say anything, even that nothing is new
_SPARE = 1.0  # CPUs that actors leave for reading and decoding


class _Lost(Exception):
    """A pipeline that does not go on."""


def answered_on(
    on: str, sources: Sequence[str], settings: ClusterSettings, progress: Progress = silent
) -> Answering:
    """Answers batches on Ray, where `on` says (see `connected`).

    Ray is started or joined when there is a batch to answer. What answers raises an EngramError if
    the cluster cannot be reached or cannot hold the actors, or if the work failed too often.
    """

    def answering(
        questions: Questions, batches: Iterator[Batch]
    ) -> Generator[tuple[Batch, list[Row]] | None, None, None]:
        if questions.settings.device not in ("auto", "cpu") and not settings.gpus_per_actor:
            raise EngramError(
                f"--device is {questions.settings.device!r}, but the actors have no GPU; give them "
                "one with --gpus-per-actor 1."
            )
        first = next(batches, None)
        if first is None:
            return
        progress("starting actors on Ray", 0, 0)
        with connected(on) as ray:
            job = _Job(ray, questions, sources, settings)
            yield from _persistent(job, chain([first], batches))

    return answering


def _persistent(job: _Job, batches: Iterator[Batch]) -> Iterator[tuple[Batch, list[Row]] | None]:
    """Answers of one pipeline after another, as long as each of some gives any."""
    failures, most = 0, job.settings.retries
    while True:
        try:
            for new in job.answers(batches):
                failures = 0 if new is not None else failures
                yield new
            return
        except (_Lost, ConnectionError, job.ray.exceptions.RayError) as error:
            failures += 1
            if failures > most:
                raise EngramError(
                    f"The cluster gave no answer in {counted(failures, 'attempt')}; at last: "
                    f"{first_line(error)}. Run the same command again to continue."
                ) from error
        finally:
            job.stop()


def _fitting(ray: Any, settings: ClusterSettings) -> int:
    """The actors that the living nodes can hold."""
    return room(ray, gpus=settings.gpus_per_actor, spare=_SPARE)


def actors_for(ray: Any, settings: ClusterSettings) -> int:
    """The number of actors; more than the cluster can hold are refused, as they would wait."""
    most = _fitting(ray, settings)
    wanted = settings.actors or max(1, most)
    if wanted <= most:
        return wanted
    each = "1 CPU" + (f" and {settings.gpus_per_actor:g} GPUs" if settings.gpus_per_actor else "")
    have = ray.cluster_resources()
    raise EngramError(
        f"--actors {wanted} need {each} each, and one more CPU to read and decode images; the "
        f"cluster has {have.get('CPU', 0):g} CPUs and {have.get('GPU', 0):g} GPUs, and can hold "
        f"{counted(most, 'actor')}. Ask for fewer, or add nodes."
    )


class _Job:
    """The batches that are under way, and the pipeline that has them."""

    def __init__(
        self,
        ray: Any,
        questions: Questions,
        sources: Sequence[str],
        settings: ClusterSettings,
    ) -> None:
        self.ray, self.settings = ray, settings
        self.actors = actors_for(ray, settings)
        self.preprocessing = questions.model.preprocessing
        self.questions = ray.put(questions)
        self.roots = tuple(
            os.path.abspath(one) for one in sources if not is_address(one) and os.path.exists(one)
        )
        self.pending: dict[int, Batch] = {}
        self.pipeline: Any = None
        self.attempts = 0
        height, width = self.preprocessing.size
        self.window = self._window(questions.settings.batch * height * width * 3)

    def _window(self, size: int) -> int:
        """Batches under way: enough for all CPUs, and half of Ray's shared memory at most."""
        have = self.ray.cluster_resources()
        store = int(have.get("object_store_memory", 0) / 2 / size)
        return max(self.actors + 1, min(4 * int(have.get("CPU", 1)) + 4 * self.actors, store))

    def answers(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, list[Row]] | None]:
        """Answers of one pipeline, until there are no more batches or it is lost."""
        self._start()
        self._offer(list(self.pending.values()))
        offered, ended, latest = len(self.pending), False, time.monotonic()
        while True:
            more = list(islice(batches, self.window - len(self.pending)))
            self._offer(more)
            offered += len(more)
            if not self.pending:
                return
            if not ended and len(self.pending) < self.window:
                self.pipeline.end.remote(offered)
                ended = True
            rows = self._take()
            if rows:
                latest = time.monotonic()
            for row in rows:
                batch = self.pending.pop(row["number"], None)
                if batch is not None:  # else its answer was there already
                    yield batch, self._unpacked(row)
            if not rows:
                self._check(latest)
                yield None

    def _start(self) -> None:
        from engram.cluster.pipeline import ON_HEAD, RESERVATION, Pipeline, Plan, unpacked

        self._unpacked = unpacked
        fit = _fitting(self.ray, self.settings)
        if not fit:
            raise _Lost("the nodes that are left cannot hold an actor")
        self.running = min(self.actors, fit)
        plan = Plan(
            self.running, self.settings.gpus_per_actor, self.settings.memory_per_actor * 1e9,
            os.getcwd(), self.roots, isolated=self.attempts > 0,
        )  # fmt: skip
        self.attempts += 1
        environment = {"env_vars": RESERVATION}
        options = {"max_concurrency": 8, "runtime_env": environment, **ON_HEAD}
        remote = self.ray.remote(**options)(Pipeline)
        self.pipeline = remote.remote([self.questions], self.preprocessing, plan)

    def _offer(self, batches: Sequence[Batch]) -> None:
        from engram.cluster.pipeline import packed

        for batch in batches:
            self.pending[batch.number] = batch
            self.pipeline.offer.remote(packed(batch.number, batch.items))

    def _take(self) -> list[dict[str, Any]]:
        try:
            asked = self.pipeline.take.remote(_POLL)
            rows: list[dict[str, Any]] = self.ray.get(asked, timeout=_POLL + _PATIENCE)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, EngramError):
                raise error.cause from None
            raise
        return rows

    def _check(self, latest: float) -> None:
        """Nothing is new: has it been too long, or did a node take the room of an actor along?"""
        silence = time.monotonic() - latest
        if silence > self.settings.timeout:
            raise _Lost(f"no answer for {silence:.0f} seconds")
        fit = _fitting(self.ray, self.settings)
        if fit < self.running:
            raise _Lost(f"the nodes that are left hold {counted(fit, 'actor')}")

    def stop(self) -> None:
        """End the pipeline and all that it started."""
        if self.pipeline is not None:
            with suppress(ConnectionError, self.ray.exceptions.RayError):
                self.ray.kill(self.pipeline)
            self.pipeline = None
