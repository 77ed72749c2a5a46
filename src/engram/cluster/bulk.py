"""Bulk prediction on a Ray cluster: actors that read, decode and answer batches of images.

A batch has the images that share a forward pass on one machine, so its answers are the same.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from threading import Lock
from typing import Any

import torch

from engram.cluster.connect import ClusterSettings, connected, room
from engram.errors import EngramError
from engram.inference.bulk.answering import AnsweredBatches, Answering, ItemBatch, Questions, Row
from engram.inference.bulk.decoders import Decoders, Item
from engram.util.progress import Progress, silent
from engram.util.text import first_line

_AT_ONCE = 2  # batches of an actor: it decodes one while the model answers another
_SILENT = "actors hang, or no node has room for one"


def answered_on(
    on: str, sources: Sequence[str], settings: ClusterSettings, progress: Progress = silent
) -> Answering:
    """Answer batches on Ray, which is started or joined (see `connected`) when there is one."""

    def answering(questions: Questions, batches: Iterator[ItemBatch]) -> AnsweredBatches:
        device, gpus = questions.settings.device, settings.gpus_per_actor
        if device not in ("auto", "cpu") and not gpus:
            raise EngramError(
                f"--device is {device!r}, but actors have no GPU; add --gpus-per-actor 1."
            )
        first = next(batches, None)
        if first is None:
            return
        progress("starting actors on Ray", 0, 0)
        roots = [os.path.abspath(source) for source in sources if os.path.exists(source)]
        cpus = max(1, questions.settings.decoders)
        with connected(on) as ray:
            number = settings.actors or room(ray, cpus, gpus, "--decoders or --gpus-per-actor")
            new = ray.remote(num_cpus=cpus, num_gpus=gpus, max_concurrency=_AT_ONCE)(ModelActor)
            start = partial(new.remote, ray.put(questions), os.getcwd(), roots, gpus > 0)
            actors = [start() for _ in range(number)]
            try:
                yield from _answers(ray, actors, start, chain([first], batches), settings.timeout)
            finally:
                for actor in actors:
                    with suppress(ConnectionError, ray.exceptions.RayError):
                        ray.kill(actor)

    return answering


def _answers(
    ray: Any,
    actors: list[Any],
    start: Callable[[], Any],
    batches: Iterator[ItemBatch],
    timeout: float,
) -> AnsweredBatches:
    """Answer batches in any order, the lost ones again.

    For an actor that is lost another is started. It gets batches once it has answered a call
    without images: one that waits for room on the cluster gets none.
    """
    calls: dict[Any, tuple[Any, ItemBatch | None]] = {}
    calls |= {actor.rows.remote(()): (actor, None) for actor in actors * _AT_ONCE}
    free, again, latest, why = deque[Any](), list[ItemBatch](), time.monotonic(), _SILENT
    while True:
        while free and (batch := again.pop() if again else next(batches, None)):
            actor = free.popleft()
            calls[actor.rows.remote(batch.items)] = actor, batch
        if free and not any(batch for _, batch in calls.values()):
            return
        patience = max(0.0, latest + timeout - time.monotonic())
        ready, _ = ray.wait(list(calls), timeout=patience)
        if not ready:
            raise EngramError(
                f"The cluster gave no answer for {timeout:g} seconds ({why}). Run the same "
                "command again to continue."
            )
        for call in ready:
            actor, batch = calls.pop(call)
            try:
                rows = ray.get(call)
            except ray.exceptions.RayTaskError as error:  # an exception of ours
                if isinstance(error.cause, EngramError):
                    raise EngramError(str(error.cause)) from None
                raise
            except ray.exceptions.RayError as error:  # its process or its node is gone
                why = first_line(error)
                again += [batch] if batch else []
                if actor in actors:
                    actors.remove(actor)
                    actors.append(start())
                    calls |= {one.rows.remote(()): (one, None) for one in actors[-1:] * _AT_ONCE}
                continue
            free.append(actor)
            if batch:
                yield batch, rows
                latest, why = time.monotonic(), _SILENT


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
        self._questions, self._roots = questions, roots
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
            return self._questions.rows(images)
