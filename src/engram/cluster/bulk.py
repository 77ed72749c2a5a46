"""Bulk prediction on a Ray cluster: tasks decode, a pool of actors answers.

    batch of addresses  ->  decode_batch: on any free CPU  ->  ModelActor.rows: the answers

A batch has the images that share a forward pass on one machine, so its answers are the same.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import chain, islice
from typing import Any

import psutil
import torch

from engram.cluster.connect import ClusterSettings, connected, room
from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing
from engram.inference.bulk.addresses import is_address
from engram.inference.bulk.answering import Answerer, Answering, ItemBatch, Questions, Row
from engram.inference.bulk.decoders import DecodedItem, Decoders
from engram.inference.bulk.items import Item
from engram.util.progress import Progress, silent
from engram.util.text import counted, first_line

_POLL = 2.0  # seconds
_SPARE = 1.0  # CPUs that actors leave for reading and decoding
_RETRIES = 2  # of a batch whose decoder crashed
_DECODE_CALLS = 1000  # batches after which a process that decodes is replaced, and its memory freed
_Answers = Generator[tuple[ItemBatch, list[Row]] | None, None, None]


def answered_on(
    on: str, sources: Sequence[str], settings: ClusterSettings, progress: Progress = silent
) -> Answering:
    """Answer batches on Ray, which is started or joined (see `connected`) when there is one.

    Answering raises an EngramError if the cluster cannot be reached or cannot hold the actors, or
    if the work failed too often.
    """

    def answering(questions: Questions, batches: Iterator[ItemBatch]) -> _Answers:
        device = questions.settings.device
        if device not in ("auto", "cpu") and not settings.gpus_per_actor:
            raise EngramError(
                f"--device is {device!r}, but actors have no GPU; add --gpus-per-actor 1."
            )
        first = next(batches, None)
        if first is None:
            return
        progress("starting actors on Ray", 0, 0)
        roots = [os.path.abspath(source) for source in sources if not is_address(source)]
        with connected(on) as ray:
            pool = ActorPool(ray, questions, list(filter(os.path.exists, roots)), settings)
            try:
                yield from pool.answers(chain([first], batches))
            finally:
                pool.stop()

    return answering


def actors_for(ray: Any, settings: ClusterSettings) -> int:
    """The number of actors; more than the cluster can hold are refused, as they would wait."""
    most = room(ray, gpus=settings.gpus_per_actor, spare=_SPARE)
    wanted = settings.actors or max(1, most)
    if wanted > most:
        raise EngramError(
            f"--actors {wanted} need 1 CPU and {settings.gpus_per_actor:g} GPUs each, and one more "
            f"CPU to decode images; the nodes can hold {most}. Ask for fewer, or add nodes."
        )
    return wanted


class ActorPool:
    """Actors, and the batches under way; one that is lost, for any reason, is given out again."""

    def __init__(
        self, ray: Any, questions: Questions, roots: Sequence[str], settings: ClusterSettings
    ) -> None:
        self._ray, self._settings, self._size = ray, settings, actors_for(ray, settings)
        preprocessing = questions.model.preprocessing
        self._decoding = (preprocessing, os.getcwd(), roots)
        self._questions = ray.put(questions)
        have, (height, width) = ray.cluster_resources(), preprocessing.size
        fit = have.get("object_store_memory", 0) / (questions.settings.batch * height * width * 3)
        # Enough to keep all CPUs busy, and half of Ray's shared memory at most.
        self._window = max(self._size + 1, int(min(2 * (have["CPU"] + self._size), fit / 2)))
        self._actors: list[Any] = []
        self._pending: dict[Any, tuple[ItemBatch, Any, Any]] = {}  # batch, its images, its actor
        self._failures = 0  # in a row, without any answer

    def answers(self, batches: Iterator[ItemBatch]) -> _Answers:
        """Answer batches in any order; None says that nothing is new for a while."""
        self._adjust()
        latest = time.monotonic()
        while True:
            for batch in islice(batches, self._window - len(self._pending)):
                self._submit(batch)
            if not self._pending:
                return
            ready, _ = self._ray.wait(list(self._pending), timeout=_POLL)
            for answer in ready:
                batch, _, actor = self._pending.pop(answer)
                rows = self._rows(answer, actor)
                if rows is None:
                    self._adjust()
                    self._submit(batch, isolated=True)  # perhaps an image ended its decoder
                else:
                    latest, self._failures = time.monotonic(), 0
                    yield batch, rows
            if not ready:
                silence = time.monotonic() - latest
                if silence > self._settings.timeout:
                    self._count_failure(f"no answer for {silence:.0f} seconds")
                    self.stop()
                    latest = time.monotonic()
                self._adjust()
                yield None

    def _adjust(self) -> None:
        """Have as many actors as fit on the living nodes: more would take the CPU that decodes."""
        gpus, memory = self._settings.gpus_per_actor, self._settings.memory_per_actor * 1e9
        fit = min(self._size, room(self._ray, gpus=gpus, spare=_SPARE))
        if not fit:
            raise EngramError(
                "The nodes that are left hold no actor. Add nodes, and run the same command again."
            )
        for actor in self._actors[fit:]:
            self._end(actor)
        while len(self._actors) < fit:
            new = self._ray.remote(num_cpus=1, num_gpus=gpus, memory=memory or None)(ModelActor)
            self._actors.append(new.remote(self._questions, gpus > 0, memory))

    def _submit(self, batch: ItemBatch, isolated: bool = False) -> None:
        decode = self._ray.remote(max_retries=_RETRIES, max_calls=_DECODE_CALLS)(decode_batch)
        images = decode.remote(batch.items, *self._decoding, isolated)
        busy = [actor for _, _, actor in self._pending.values()]
        actor = min(self._actors, key=busy.count)
        self._pending[actor.rows.remote(images)] = batch, images, actor

    def _rows(self, answer: Any, actor: Any) -> list[Row] | None:
        """The rows of an answer; None if it was lost."""
        try:
            rows: list[Row] = self._ray.get(answer)
            return rows
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)  # an exception of ours, or of the decoder
            if isinstance(cause, EngramError):
                raise EngramError(str(cause)) from None
            if actor in self._actors:  # else its loss is counted already
                self._count_failure(first_line(cause or error))
                if cause is None:
                    self._end(actor)
            return None

    def _count_failure(self, why: str) -> None:
        self._failures += 1
        if self._failures > self._settings.retries:
            raise EngramError(
                f"The cluster gave no answer in {counted(self._failures, 'attempt')}; at last: "
                f"{why}. Run the same command again to continue."
            )

    def _end(self, actor: Any) -> None:
        self._actors.remove(actor)
        with suppress(ConnectionError, self._ray.exceptions.RayError):
            self._ray.kill(actor)

    def stop(self) -> None:
        """End all actors and decoders; the batches under way are lost."""
        for actor in list(self._actors):
            self._end(actor)
        with suppress(ConnectionError, self._ray.exceptions.RayError):
            for _, images, _ in self._pending.values():
                self._ray.cancel(images, force=True)


# On a node

_decoders = cache(Decoders)


def decode_batch(
    items: Sequence[Item],
    preprocessing: Preprocessing,
    home: str,
    roots: Sequence[str],
    isolated: bool,
) -> list[DecodedItem]:
    """Decode images; one that cannot be read, or isolated ends its process, has an error.

    Relative paths start at `home`. A node that does not see the `roots` of images is refused: it
    would make an error of each.
    """
    for root in roots:
        if not os.path.exists(root):
            raise EngramError(
                f"The node {socket.gethostname()} has no {root}; put images on storage that all "
                "nodes see at the same path, or give addresses such as s3://…."
            )
    if os.path.isdir(home):
        os.chdir(home)
    return list(_decoders(preprocessing, int(isolated)).decoded(items))


class ModelActor:
    """The model, and its answers about decoded images."""

    def __init__(self, questions: Questions, gpu: bool, memory: float) -> None:
        if not gpu:  # Ray gives it none, but does not hide them
            questions = replace(questions, settings=replace(questions.settings, device="cpu"))
            torch.set_num_threads(1)
        self._answerer, self._most, self._used = Answerer(questions), memory, False

    def rows(self, images: Sequence[DecodedItem]) -> list[Row]:
        """Answer a batch; a process with more than its memory ends, and is replaced."""
        resident = psutil.Process().memory_info().rss
        if 0 < self._most < resident:
            if self._used:
                os._exit(1)
            size = f"The model alone takes {resident / 1e9:.2f} GB"
            raise EngramError(f"{size}; --memory-per-actor has to be more than that.")
        self._used = True
        return self._answerer.rows(images)
