"""The tasks of a running service: snapshots that never change, and how one replaces another."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from engram.errors import EngramError
from engram.export.runtime import make_engine
from engram.inference.engine import Engine, TorchEngine, on_cpu
from engram.methods import Base
from engram.model import MemoryViT
from engram.serve.problems import Problem
from engram.serve.service_settings import Settings
from engram.store.bundles import VERSIONS, Bundle, manifest_state, read_bundle, read_manifest
from engram.store.compose import LOCK, BundleChanged, update_bundle
from engram.store.engram import Engram
from engram.store.format import parse_engram
from engram.store.portable import without_local_paths
from engram.store.remote import MANIFEST
from engram.tasks.spec import NAME
from engram.util.hub import PathOrHubId
from engram.util.text import without_paths
from engram.vit import ViT

Condition = Callable[[str, str | None], None]  # of a task and its content, None if it is missing

_TRIES = 10  # to write a change while other services write theirs


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A model that does not change any more. A request uses one snapshot from start to end."""

    bundle: Bundle
    model: MemoryViT
    engine: Engine
    contents: Mapping[str, str]  # by task; hashing all tensors is too slow for the event loop
    shapes: Mapping[str, tuple[int, ...]]  # of the output for one image, by name
    #: By task, a new version of it that does not answer yet: a snapshot of it and of its parents.
    shadows: Mapping[str, Snapshot] = field(default_factory=dict)
    #: Descriptions of tasks as JSON, and of all under "", as they were written for requests.
    documents: dict[str, bytes] = field(default_factory=dict)

    @cached_property
    def computing(self) -> TorchEngine:
        """The engine for vectors, which exported graphs do not have."""
        return self.engine if isinstance(self.engine, TorchEngine) else TorchEngine(self.model)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Tasks that can be run, parents first, and base, if the backbone has classes."""
        return tuple(self.shapes)

    @cached_property
    def embedding_names(self) -> tuple[str, ...]:
        """Tasks that have vectors, and base, with or without classes."""
        return tuple(self.model.embedding_names())

    @cached_property
    def tag(self) -> str:
        """Changes with the tasks, and with nothing else."""
        return hashlib.sha256(",".join(self.contents.values()).encode()).hexdigest()[:16]

    @cached_property
    def public_engrams(self) -> Mapping[str, Engram]:
        """The engrams as clients may see them: without paths of this machine."""
        return {engram.spec.name: without_local_paths(engram)[0] for engram in self.bundle.engrams}

    def check_task(self, name: str, known: Container[str] = ()) -> None:
        """Refuse the name of what is no task, and not among `known` either, with a Problem."""
        if name not in self.contents and name not in known:
            raise Problem(404, f"There is no task {name!r}; there are {', '.join(self.names)}.")

    def answering(self, names: Iterable[str]) -> dict[str, str]:
        """The content of each of these tasks; of base, the fingerprint of the backbone."""
        base = self.model.backbone.fingerprint
        return {name: self.contents.get(name, base) for name in names}

    def version(self, name: str) -> str:
        """The start of the content of a task, by which versions are told apart."""
        return self.answering([name])[name][:16]


class Catalogue:
    """The current snapshot. A change builds another one, writes the bundle, then replaces it.

    Other services may change the same folder: `follow` takes over what they wrote. Its methods are
    slow and belong in a thread; `now` may be read at any moment.
    """

    def __init__(self, snapshot: Snapshot, settings: Settings) -> None:
        self.now, self.settings = snapshot, settings
        #: Of the manifest that was followed last; () has to be followed, None cannot be seen.
        self._state: tuple[int, ...] | None = ()
        self._lock = threading.RLock()  # a change follows first

    @classmethod
    def load(cls, folder: Path, settings: Settings, backbone: str | None = None) -> Catalogue:
        """Read a bundle and its backbone, and try the engine once."""
        return cls(_snapshot(read_bundle(folder), settings, backbone), settings)

    def attach(
        self, name: str, data: bytes, *, shadow: bool, condition: Condition
    ) -> tuple[Snapshot, Snapshot]:
        """Add the engram in these bytes, or replace the task of its name, which is kept.

        With `shadow` it does not answer; the task goes on answering. The condition may refuse what
        is there with a Problem. Gives the snapshots before and after, one if nothing changed.
        """
        engram = _parse(name, data)

        def plus(now: Snapshot) -> Bundle | None:
            content = now.contents.get(name)
            condition(name, content)
            if shadow:
                now.check_task(name)
                old = now.bundle.shadows.get(name)
                if old is not None and old.content == engram.content:
                    return None
                return now.bundle.with_shadow(engram)
            return None if content == engram.content else now.bundle.plus(engram)

        return self._change(plus)

    def change(self, name: str, change: Callable[[Bundle, str], Bundle]) -> Snapshot:
        """Change the bundle where a task is in it; gives the snapshot afterwards."""

        def changed(now: Snapshot) -> Bundle:
            now.check_task(name)
            return change(now.bundle, name)

        return self._change(changed)[1]

    def follow(self) -> bool:
        """Take over what others wrote to the folder; gives whether anything changed.

        A bundle that cannot be read, or has another backbone, is an EngramError once. Then the
        tasks stay as they are until the folder changes again.
        """
        with self._lock:
            folder = self.now.bundle.folder
            state = _state(folder)
            if state == self._state:
                return False
            self._state = state
            try:
                if read_manifest(folder) == self.now.bundle.manifest():
                    return False
                self.now = self._rebuilt(read_bundle(folder))
            except EngramError:
                if _state(folder) != state:  # it was being written
                    self._state = ()
                raise
            return True

    def _change(self, change: Callable[[Snapshot], Bundle | None]) -> tuple[Snapshot, Snapshot]:
        """Make a change on top of what is in the folder now; None if there is nothing to do.

        Gives the snapshots before and after.
        """
        with self._lock:
            for _ in range(_TRIES):
                with contextlib.suppress(EngramError):  # what cannot be followed is said elsewhere
                    self.follow()
                try:
                    old, bundle = self.now, change(self.now)
                    if bundle is None:
                        return old, old
                    new = self._rebuilt(bundle)
                except EngramError as error:
                    raise Problem(409, self._sentence(error)) from None
                _refuse_links(self.now.bundle, bundle)
                try:
                    update_bundle(self.now.bundle, bundle)
                except BundleChanged:  # by another service; what it wrote comes first
                    self._state = ()
                    continue
                except EngramError as error:
                    raise Problem(503, self._sentence(error), retry=60) from None
                self._state = ()  # others may have written since
                self.now = new
                return old, new
        raise Problem(
            503, "The bundle's folder is being changed by others; try again in a second.", retry=1
        )

    def _sentence(self, error: EngramError) -> str:
        """The sentence of an error for a client: without paths of this machine."""
        sentence, folder = str(error), self.now.bundle.folder
        paths = {os.path.realpath(folder), os.path.abspath(folder), str(folder)}
        for path in sorted(paths, key=len, reverse=True):
            if os.sep in path:  # it may have spaces, which end other paths
                sentence = sentence.replace(path + os.sep, "").replace(path, "the bundle's folder")
        sentence = without_paths(sentence)
        return sentence[:1].upper() + sentence[1:] if sentence.startswith("the ") else sentence

    def _rebuilt(self, bundle: Bundle) -> Snapshot:
        """A snapshot of another bundle on the same backbone."""
        return _snapshot(bundle, self.settings, self.now.model.backbone, self.now.engine)


def _shadowed(bundle: Bundle, name: str) -> Bundle:
    """The shadow of a task with the tasks that it reads, in their order."""
    shadow = bundle.shadows[name]
    wanted = set(shadow.parents)
    for engram in reversed(bundle.engrams):  # parents come first
        if engram.spec.name in wanted:
            wanted |= set(engram.parents)
    parents = [engram for engram in bundle.engrams if engram.spec.name in wanted]
    return Bundle(bundle.folder, (*parents, shadow))


def _state(folder: Path) -> tuple[int, ...] | None:
    """Changes when the manifest is written again; None if it cannot be seen."""
    with contextlib.suppress(OSError):
        return manifest_state(folder)
    return None


def _refuse_links(old: Bundle, new: Bundle) -> None:
    """Whoever sends an engram must not write where a link in the folder leads."""
    for name in sorted({MANIFEST, LOCK, VERSIONS, *old.files, *new.files}):
        if (new.folder / name).is_symlink():
            raise Problem(
                409,
                f"{name} in the bundle's folder is a link, and the service writes no links; put "
                "the file itself there. Nothing was changed.",
            )


def _parse(name: str, data: bytes) -> Engram:
    """The engram in these bytes, which must be called `name`."""
    if not NAME.fullmatch(name) or name == Base.name:
        raise Problem(
            422,
            "The last part of the URL cannot name a task: use 1 to 64 of a-z, 0-9, '.', '_' and "
            "'-', starting with a letter or a digit, and not 'base', which is the backbone itself.",
        )
    engram = parse_engram(data, f"{name}.safetensors")
    if engram.spec.name != name:
        raise Problem(
            409,
            f"The engram in the body is called {engram.spec.name!r}, not {name!r}; send it to "
            f"/v1/tasks/{engram.spec.name}.",
        )
    return engram


def _snapshot(
    bundle: Bundle,
    settings: Settings,
    backbone: ViT | PathOrHubId | None,
    before: Engine | None = None,
) -> Snapshot:
    """A snapshot whose engine has run once, so that errors occur before any request uses it."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    dtype = settings.backbone_dtype
    model = MemoryViT.from_engrams(bundle.engrams, backbone, backbone_dtype=dtype)
    engine = make_engine(model, settings, before)
    contents = {engram.spec.name: engram.content for engram in bundle.engrams}
    names = [name for name in model.output_names() if model.task(name).spec.classes]
    grey = torch.zeros(1, 3, *model.preprocessing.size)
    outputs = on_cpu(engine.run(grey, names))
    for name in names:
        if not bool(outputs[name].isfinite().all()):
            raise EngramError(f"The output of {name!r} is not finite.")
    shapes = {name: tuple(outputs[name].shape[1:]) for name in names}
    shadows = {
        name: _snapshot(_shadowed(bundle, name), settings, model.backbone, engine)
        for name in bundle.shadows
    }
    return Snapshot(bundle, model, engine, contents, shapes, shadows)
