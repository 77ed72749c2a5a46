"""The tasks of a running service: snapshots that never change, and how one follows another."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing
from engram.inference.engine import Engine
from engram.inference.load import load_model
from engram.model import MemoryViT
from engram.serve.engines import make_engine
from engram.serve.problems import Problem
from engram.serve.settings import Settings
from engram.store.bundles import Bundle, read_bundle, update_bundle
from engram.store.engram import Engram
from engram.store.format import parse_engram
from engram.store.portable import without_local_paths
from engram.tasks.spec import NAME


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A model that does not change any more. A request is answered by the one it began with."""

    bundle: Bundle
    model: MemoryViT
    engine: Engine
    contents: Mapping[str, str]  # by task; hashing all tensors is too slow for the event loop

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All that can answer: base, if the trunk has classes, and the tasks, parents first."""
        base = ["base"] if self.model.trunk.class_names else []
        return (*base, *self.model.tasks)

    @cached_property
    def preprocessing(self) -> Preprocessing:
        return self.model.preprocessing

    @cached_property
    def tag(self) -> str:
        """Changes with the tasks, and with nothing else."""
        return hashlib.sha256(",".join(self.contents.values()).encode()).hexdigest()[:16]

    @cached_property
    def told(self) -> Mapping[str, Engram]:
        """The engrams as others may see them: without paths of this machine."""
        return {engram.spec.name: without_local_paths(engram)[0] for engram in self.bundle.engrams}

    def engram(self, name: str) -> Engram:
        for engram in self.bundle.engrams:
            if engram.spec.name == name:
                return engram
        raise Problem(404, f"There is no task {name!r}; there are {', '.join(self.names)}.")


class Catalogue:
    """The snapshot of now. Changes are made beside it, written to the bundle, then take its place.

    `attach` and `detach` take their time and belong in a thread; `now` may be read at any moment.
    """

    def __init__(self, folder: Path, settings: Settings, backbone: str | None = None) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        bundle = read_bundle(folder)
        model = load_model(folder, backbone)
        self.now = self._snapshot(bundle, model)

    def attach(self, name: str, data: bytes) -> tuple[Snapshot, bool]:
        """Add the engram in these bytes; gives the new snapshot and whether anything changed."""
        if not NAME.fullmatch(name) or name == "base":
            raise Problem(
                422,
                "That cannot name a task: use 1 to 64 of a-z, 0-9, '.', '_' and '-', beginning "
                "with a letter or a digit, and not 'base', which is the trunk itself.",
            )
        try:
            engram = parse_engram(data, f"{name}.safetensors")
        except EngramError as error:
            raise Problem(422, str(error)) from None
        if engram.spec.name != name:
            raise Problem(
                409,
                f"The engram that was sent is called {engram.spec.name!r}, not {name!r}; put it "
                f"to /v1/tasks/{engram.spec.name}.",
            )
        with self._lock:
            if name in self.now.model.tasks:
                if self.now.contents[name] == engram.content:
                    return self.now, False
                raise Problem(
                    409, f"Another {name!r} is attached already; delete it first, then put this."
                )
            return self._change(lambda bundle: bundle.plus(engram)), True

    def detach(self, name: str) -> Snapshot:
        """Take a task away; one that others extend, and the last one, stay."""
        with self._lock:
            self.now.engram(name)
            return self._change(lambda bundle: bundle.minus(name))

    def _change(self, change: Callable[[Bundle], Bundle]) -> Snapshot:
        old = self.now
        try:
            bundle = change(old.bundle)
            model = MemoryViT(old.model.trunk)
            for engram in bundle.engrams:
                model.attach(engram)
            new = self._snapshot(bundle, model)
        except EngramError as error:
            raise Problem(409, str(error)) from None
        try:
            update_bundle(old.bundle, bundle)
        except EngramError as error:
            raise Problem(503, str(error), retry=60) from None
        self.now = new
        return new

    def _snapshot(self, bundle: Bundle, model: MemoryViT) -> Snapshot:
        """With an engine that has answered once: what fails, fails before anybody asks."""
        engine = make_engine(model.eval(), self.settings.engine, self.settings.threads)
        contents = {engram.spec.name: engram.content for engram in bundle.engrams}
        snapshot = Snapshot(bundle, model, engine, contents)
        grey = torch.zeros(1, 3, *snapshot.preprocessing.size)
        for name, logits in engine.run(grey, snapshot.names).items():
            if not bool(logits.isfinite().all()):
                raise EngramError(f"{name!r} answers with numbers that are not finite.")
        return snapshot
