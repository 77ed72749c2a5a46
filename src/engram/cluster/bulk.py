"""Bulk prediction on a Ray cluster: actors that read, decode and answer batches of images.

A batch has the images that share a forward pass on one machine, so its answers are the same.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Lock
from typing import Any

import torch

from engram.cluster.connect import ClusterSettings, connected, room
from engram.errors import EngramError
from engram.inference.bulk.addresses import is_address
from engram.inference.bulk.answering import Answerer, Answering, ItemBatch, Questions, Row
from engram.inference.bulk.decoders import Decoders
from engram.inference.bulk.items import Item
from engram.util.progress import Progress, silent
from engram.util.text import first_line

_AT_ONCE = 2  # batches of an actor: it decodes one while the model answers another
_SILENT = "actors hang, or no node has room for one"
_Answers = Generator[tuple[ItemBatch, list[Row]], None, None]


def answered_on(
    on: str, sources: Sequence[str], settings: ClusterSettings, progress: Progress = silent
) -> Answering:
    """Answer batches on Ray, which is started or joined (see `connected`) when there is one.

    Answering raises an EngramError if the cluster cannot be reached, holds no actor, or gives no
    answer for too long.
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
            actors = _Actors(ray, questions, list(filter(os.path.exists, roots)), settings)
            try:
                yield from actors.answers(first, batches)
            finally:
                actors.stop()

    return answering


class _Actors:
    """Actors, and the calls under way.

    An actor gets batches once it has answered a call without images: one that waits for room on the
    cluster gets none. For one that is lost another is started, and its batches are given out again.
    """

    def __init__(
        self, ray: Any, questions: Questions, roots: Sequence[str], settings: ClusterSettings
    ) -> None:
        self._ray, self._timeout = ray, settings.timeout
        cpus, gpus = max(1, questions.settings.decoders), settings.gpus_per_actor
        number = settings.actors or room(ray, cpus=cpus, gpus=gpus)
        if not number:
            raise EngramError(
                f"No node of the cluster has {cpus} CPUs and {gpus:g} GPUs, which each actor "
                "takes; give other --decoders or --gpus-per-actor."
            )
        self._class = ray.remote(num_cpus=cpus, num_gpus=gpus, max_concurrency=_AT_ONCE)(ModelActor)
        self._given = ray.put(questions), os.getcwd(), roots, gpus > 0
        self._actors: list[Any] = []
        self._calls: dict[Any, tuple[Any, ItemBatch | None]] = {}
        for _ in range(number):
            self._start()

    def _start(self) -> None:
        self._actors.append(self._class.remote(*self._given))
        for _ in range(_AT_ONCE):
            self._ask(self._actors[-1], None)

    def _ask(self, actor: Any, batch: ItemBatch | None) -> None:
        self._calls[actor.rows.remote(batch.items if batch else ())] = actor, batch

    def answers(self, first: ItemBatch, batches: Iterator[ItemBatch]) -> _Answers:
        """Answer batches in any order."""
        again, free, latest, why = [first], deque[Any](), time.monotonic(), _SILENT
        while True:
            while free and (batch := again.pop() if again else next(batches, None)):
                self._ask(free.popleft(), batch)
            if not again and not any(batch for _, batch in self._calls.values()):
                return
            patience = max(0.0, latest + self._timeout - time.monotonic())
            ready, _ = self._ray.wait(list(self._calls), timeout=patience)
            if not ready:
                raise EngramError(
                    f"The cluster gave no answer for {self._timeout:g} seconds ({why}). Run the "
                    "same command again to continue."
                )
            for call in ready:
                actor, batch = self._calls.pop(call)
                try:
                    rows = self._ray.get(call)
                except self._ray.exceptions.RayTaskError as error:  # an exception of ours
                    if isinstance(error.cause, EngramError):
                        raise EngramError(str(error.cause)) from None
                    raise
                except self._ray.exceptions.RayError as error:  # its process or its node is gone
                    why = first_line(error)
                    again += [batch] if batch else []
                    if actor in self._actors:
                        self._actors.remove(actor)
                        self._start()
                    continue
                free.append(actor)
                if batch:
                    yield batch, rows
                    latest, why = time.monotonic(), _SILENT

    def stop(self) -> None:
        """End all actors; the batches under way are lost."""
        for actor in self._actors:
            with suppress(ConnectionError, self._ray.exceptions.RayError):
                self._ray.kill(actor)


class ModelActor:
    """The model and processes that decode, on a node.

    Relative paths start at `home`. A node that does not see the `roots` of images is refused: it
    would make an error of each.
    """

    def __init__(self, questions: Questions, home: str, roots: Sequence[str], gpu: bool) -> None:
        if not gpu:  # Ray gives it none, but does not hide them
            questions = replace(questions, settings=replace(questions.settings, device="cpu"))
            torch.set_num_threads(1)
        if os.path.isdir(home):
            os.chdir(home)
        self._questions, self._roots, self._answerer = questions, roots, None
        self._decoders = Decoders(questions.model.preprocessing, questions.settings.decoders)
        self._decoding, self._answering = Lock(), Lock()

    def rows(self, items: Sequence[Item]) -> list[Row]:
        """Answer a batch; one without images as soon as there is an actor."""
        for root in self._roots:
            if not os.path.exists(root):
                raise EngramError(
                    f"The node {socket.gethostname()} has no {root}; put images on storage that "
                    "all nodes see at the same path, or give addresses such as s3://…."
                )
        if not items:
            return []
        with self._decoding:
            images = list(self._decoders.decoded(items))
        with self._answering:
            self._answerer: Answerer | None = self._answerer or Answerer(self._questions)
            return self._answerer.rows(images)
