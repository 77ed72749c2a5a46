"""The Ray Data pipeline of bulk prediction, as it runs on the nodes of a cluster.

    batches of addresses  ->  decode: tasks  ->  model: a pool of actors  ->  rows of answers

`Pipeline` is an actor on the head that owns it all: when the actor ends, in whatever way, Ray ends
the tasks and actors that it started. A row of the dataset is a batch of images, so the images that
share a forward pass are those of the job on one machine. Import it in `connected` only: it imports
Ray.
"""

from __future__ import annotations

import os
import pickle
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import psutil
import pyarrow
import ray
import ray.data
import torch
from ray.data import ActorPoolStrategy, DataContext, Datasource, ReadTask
from ray.data.block import BlockMetadata

from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing
from engram.inference.bulk.answers import Answerer, Questions
from engram.inference.bulk.decoders import Decoders
from engram.inference.bulk.items import Item

#: A row of the dataset: the number of a batch, and what it is at this stage, pickled.
Row = dict[str, Any]

#: Where the pipeline itself runs: if the head is lost, all is.
ON_HEAD = {"resources": {"node:__internal_head__": 0.001}, "num_cpus": 0}
#: Ray Data reserves the CPUs of a dataset for three minutes after the last word of its owner, which
#: the next pipeline would wait for if this one is killed. Here it is seconds, and said as often.
RESERVATION = {
    "RAY_DATA_AUTOSCALING_REQUEST_EXPIRE_TIME_S": "15",
    "RAY_DATA_MIN_GAP_BETWEEN_AUTOSCALING_REQUESTS": "2",
}
_DECODE_ATTEMPTS = 2  # Ray Data's own are without end: an image that ends its process would hang it
_DECODE_CALLS = 1000  # batches after which a process that decodes is replaced, and its memory freed
_ACTOR_RESTARTS = 3
_AHEAD = 2  # batches that an actor has, with the one that it computes


@dataclass(frozen=True)
class Plan:
    """How a pipeline runs."""

    actors: int
    gpus: float  # of each actor
    memory: float  # bytes of each actor after which it ends; 0: no limit
    home: str  # the folder that relative paths start from
    roots: tuple[str, ...]  # paths that every node has to see
    isolated: bool  # decode in processes of their own, as an image may have ended one


class Pipeline:
    """Takes batches of images and gives their answers, in any order."""

    def __init__(self, questions: list[Any], preprocessing: Preprocessing, plan: Plan) -> None:
        self._questions, self._preprocessing, self._plan = questions, preprocessing, plan
        self._offered: queue.Queue[Row] = queue.Queue()
        self._answered: queue.Queue[Row] = queue.Queue()
        self._pulled, self._total = 0, -1
        self._failure: Exception | None = None
        self._own = ray.get_runtime_context().current_actor
        threading.Thread(target=self._run, daemon=True).start()

    def offer(self, row: Row) -> None:
        """Take one more batch."""
        self._offered.put(row)

    def end(self, total: int) -> None:
        """No more than so many batches come."""
        self._total = total

    def pull(self) -> Row | None:
        """The next batch, as soon as there is one; None after the last."""
        while self._pulled != self._total:
            with suppress(queue.Empty):
                row = self._offered.get(timeout=0.1)
                self._pulled += 1
                return row
        return None

    def take(self, seconds: float) -> list[Row]:
        """The answers that are there, or come within so many seconds; an exception if none can."""
        try:
            rows = [self._answered.get(timeout=seconds)]
        except queue.Empty:
            if self._failure is not None:
                raise self._failure from None
            return []
        while not self._answered.empty():
            rows.append(self._answered.get())
        return rows

    def _run(self) -> None:
        try:
            for answers in self._dataset().iter_batches(
                batch_size=None, prefetch_batches=0, batch_format="pyarrow"
            ):
                for row in answers.to_pylist():
                    self._answered.put(row)
            self._failure = RuntimeError("it ended before all its answers came")
        except Exception as error:
            self._failure = _own_error(error) or RuntimeError(str(error))

    def _dataset(self) -> Any:
        context, plan = DataContext.get_current(), self._plan
        context.target_max_block_size = 1  # every row is a block, and goes on alone
        context.enable_progress_bars = False
        return (
            ray.data.read_datasource(
                _Offered(self._own),
                override_num_blocks=1,
                ray_remote_args={**ON_HEAD, "max_retries": 0},
            )
            .map(
                decoded,
                fn_args=(self._preprocessing, plan),
                num_cpus=1,
                max_retries=_DECODE_ATTEMPTS,
                max_calls=_DECODE_CALLS,
            )
            .map(
                Model,
                fn_constructor_args=(self._questions, plan),
                compute=ActorPoolStrategy(size=plan.actors, max_tasks_in_flight_per_actor=_AHEAD),
                num_cpus=1,
                num_gpus=plan.gpus,
                memory=plan.memory or None,
                max_restarts=_ACTOR_RESTARTS,
                max_task_retries=_ACTOR_RESTARTS,
            )
        )


def _own_error(error: BaseException | None) -> EngramError | None:
    """The sentence to a user behind an exception of Ray, if there is one."""
    while error is not None:
        cause = getattr(error, "cause", None)
        for one in (error, cause):
            if isinstance(one, EngramError):
                return EngramError(str(cause or one))
        error = error.__cause__ or error.__context__
    return None


class _Offered(Datasource):
    """What is offered to a pipeline, as one read task that ends with the job."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,
    ) -> list[ReadTask]:
        pipeline = self._pipeline

        def read() -> Iterator[pyarrow.Table]:
            while (row := ray.get(pipeline.pull.remote())) is not None:
                yield pyarrow.Table.from_pylist([row])

        about = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(read, about)]


def packed(number: int, content: object) -> Row:
    """A row of the dataset."""
    return {"number": number, "content": pickle.dumps(content, protocol=5)}


def unpacked(row: Row) -> Any:
    """What the row is at its stage: items, decoded items, or rows of a table."""
    return pickle.loads(row["content"])


_decoders: dict[tuple[Preprocessing, bool], Decoders] = {}  # of this process


def decoded(row: Row, preprocessing: Preprocessing, plan: Plan) -> Row:
    """Decode the images of a row; one that cannot be read has an error."""
    _check_roots(plan)
    key = (preprocessing, plan.isolated)
    decoders = _decoders.setdefault(key, Decoders(preprocessing, int(plan.isolated)))
    items: Sequence[Item] = unpacked(row)
    return packed(row["number"], list(decoders.decoded(items)))


def _check_roots(plan: Plan) -> None:
    """A node that does not see the images would make an error of each."""
    for root in plan.roots:
        if not os.path.exists(root):
            raise EngramError(
                f"The node {socket.gethostname()} has no {root}; put images on storage that all "
                "nodes see at the same path, or give addresses such as s3://…."
            )
    if os.path.isdir(plan.home):
        os.chdir(plan.home)


class Model:
    """One actor: the model, and its answers about decoded images."""

    def __init__(self, questions: list[Any], plan: Plan) -> None:
        loaded: Questions = ray.get(questions[0])
        if not plan.gpus:  # Ray gives it none, but does not hide them
            loaded = replace(loaded, settings=replace(loaded.settings, device="cpu"))
            torch.set_num_threads(1)
        self._answerer, self._most = Answerer(loaded), plan.memory
        if self._full():
            raise EngramError(
                f"The model alone takes {_resident() / 1e9:.2f} GB; --memory-per-actor has to be "
                "more than that."
            )

    def _full(self) -> bool:
        return 0 < self._most < _resident()

    def __call__(self, row: Row) -> Row:
        if self._full():  # Ray starts it again and repeats the call
            os._exit(1)
        return packed(row["number"], self._answerer.rows(unpacked(row)))


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)
