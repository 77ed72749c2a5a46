"""Jobs of a farm as tasks of Ray, which starts those again whose process or node is lost."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engram.cluster.connect import connected, room
from engram.cluster.mailbox import Mailbox
from engram.cluster.travel import Files, as_seen_anywhere, mark, packed, placed, unpack
from engram.errors import EngramError
from engram.farm.events import Event
from engram.farm.jobs import FarmJob
from engram.farm.work import train_job
from engram.util.quiet import ignore_pillow_warnings
from engram.util.spelling import spelled_as_flags
from engram.util.text import counted, first_line

#: Seconds for trainings to write their checkpoints when the farm is stopped.
PATIENCE = 60.0
_LOST = "its process or its node was lost"


class RayRunner:
    """Remote tasks that train: a context, in which Ray runs or a cluster is joined.

    Ray tries a job again, `retries` times at most, where its process or node is lost or an
    exception is no mistake of the user's. Jobs of a group prefer the node that filled its cache.

    Args:
        on: Where Ray is, as `connected` takes it.
        slots: The jobs at once; None: as many as the cluster holds.
        retries: How often a job is tried again.
        cpus: CPUs of a job, and its threads.
        gpus: GPUs of a job.
        folder: The farm's folder. Nodes that see it work there; others send what they made.
    """

    def __init__(
        self, on: str, slots: int | None, retries: int, cpus: int, gpus: float, folder: Path
    ) -> None:
        self._on, self._slots, self._retries = on, slots, retries
        self._cpus, self._gpus, self._folder = cpus, gpus, folder
        self._ray: Any = None
        self._mailbox: Any = None
        self._open = ExitStack()
        self._pending: dict[Any, FarmJob] = {}
        self._groups: dict[str, str] = {}  # by job
        self._homes: dict[str, str] = {}  # by group, the node that has its cache
        self._attempts: dict[str, int] = {}

    def __enter__(self) -> RayRunner:
        self._marked = mark(self._folder)
        self._ray = ray = self._open.enter_context(connected(self._on))
        try:
            if not self.slots:
                raise EngramError(
                    f"No node of the cluster has {self._cpus} CPUs and {self._gpus:g} GPUs, which "
                    "each job takes; give other --cpus-per-job or --gpus-per-job."
                )
            # On this node and no other: its end is the end of the farm in any case.
            here = _near(ray.get_runtime_context().get_node_id(), or_elsewhere=False)
            self._mailbox = ray.remote(num_cpus=0, scheduling_strategy=here)(Mailbox).remote()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            for running in self._pending:  # as Ctrl-C in each: it writes a checkpoint
                self._ray.cancel(running, force=False)
            if self._pending:
                waiting = list(self._pending)
                self._ray.wait(waiting, num_returns=len(waiting), timeout=PATIENCE)
        finally:
            self._open.close()

    @property
    def slots(self) -> int:
        held = room(self._ray, cpus=self._cpus, gpus=self._gpus)
        return held if self._slots is None or not held else self._slots

    def start(self, job: FarmJob, group: str = "") -> None:
        self._groups[job.name] = group
        sent = dict(packed(job.out))
        for parent in job.parents:
            path = self._folder / f"{parent}.safetensors"
            sent[path.name] = path.read_bytes()
        options: dict[str, Any] = {"num_cpus": self._cpus, "num_gpus": self._gpus}
        if group in self._homes:
            options["scheduling_strategy"] = _near(self._homes[group])
        task = self._ray.remote(_train).options(
            max_retries=self._retries, retry_exceptions=True, name=f"engram {job.name}", **options
        )
        cache = os.environ.get("ENGRAM_CACHE")
        given = (as_seen_anywhere(job), self._marked, sent, self._cpus, cache, self._mailbox)
        self._pending[task.remote(*given)] = job

    def events(self, seconds: float) -> list[Event]:
        ended, _ = self._ray.wait(list(self._pending), timeout=seconds)
        heard = self._heard()
        for one in ended:
            heard.append(self._outcome(one, self._pending.pop(one)))
        return heard

    def _heard(self) -> list[Event]:
        """What jobs that still run have told."""
        running, events = {job.name for job in self._pending.values()}, list[Event]()
        try:
            told = self._ray.get(self._mailbox.take.remote())
        except self._ray.exceptions.RayError:  # it is lost: what jobs make arrives all the same
            return events
        for event, node in told:
            if event.job not in running:
                continue
            if event.kind == "started":
                attempt = self._attempts[event.job] = self._attempts.get(event.job, 0) + 1
                if attempt == 1:
                    continue
                event = Event(event.job, "retried", f"attempt {attempt}: {_LOST}")
            elif event.kind == "ready":
                self._homes[self._groups[event.job]] = node
            events.append(event)
        return events

    def _outcome(self, ended: Any, job: FarmJob) -> Event:
        """The last event of a job, after keeping what its node sent."""
        try:
            event, files = self._ray.get(ended)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)  # an exception of the job itself
            reason = f"{type(cause).__name__}: {cause}" if cause else first_line(error)
            crashed = f"It crashed {counted(self._retries + 1, 'time')}: {reason}."
            return Event(job.name, "failed", crashed)
        try:
            unpack(self._folder, files, {job.name})
        except EngramError as error:
            return Event(job.name, "failed", str(error))
        if event.kind == "done":
            return Event(job.name, "done", result={**event.result, "path": str(job.out)})
        return Event(job.name, "failed", event.text)


def _near(node: str, or_elsewhere: bool = True) -> Any:
    """On this node; or on another one if it is busy or gone."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(
        node, soft=or_elsewhere, _spill_on_unavailable=or_elsewhere
    )


# On a node


def _train(
    job: FarmJob, marked: str, sent: Files, cpus: int, cache: str | None, mailbox: Any
) -> tuple[Event, Files]:
    """Train a job there: what happened, and the files that the farm's machine may not have."""
    import ray
    import torch

    torch.set_num_threads(cpus)
    ignore_pillow_warnings()
    if cache:
        os.environ["ENGRAM_CACHE"] = cache
    node = ray.get_runtime_context().get_node_id()

    def tell(event: Event) -> None:
        mailbox.put.remote(event, node)

    tell(Event(job.name, "started"))
    here = placed(job, marked)
    unpack(here.out.parent, sent, {job.name, *job.parents})
    with spelled_as_flags():
        event = train_job(here, tell)
    made = packed(here.out) if event.kind == "done" else {}
    if here != job and event.kind != "stopped":  # a checkpoint stays for the next attempt
        shutil.rmtree(here.out.parent, ignore_errors=True)
    return event, made
