"""A trunk and the tasks attached to it: add, attach, detach, save. `model.py` has its answers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engram.errors import EngramError, Notice
from engram.images.preprocessing import Preprocessing
from engram.prepared import Prepared
from engram.store.engram import Engram, TrunkInfo, new_engram
from engram.store.format import read_engram, write_engram
from engram.store.records import Records
from engram.store.remote import single_engram_path
from engram.tasks.keys import check_tasks, module_name, name_tasks, task_name
from engram.tasks.kinds import IGNORED
from engram.tasks.registry import TaskRegistry
from engram.tasks.settings import TaskSettings
from engram.tasks.spec import TaskSpec
from engram.tasks.task import Task
from engram.vit import ViT


class Composition(nn.Module):
    """All of `MemoryViT` but its answers.

    `registry` has the tasks, `prepared` what is kept of them from pass to pass.
    """

    def __init__(self, trunk: ViT, *, unmasked: bool = False) -> None:
        super().__init__()
        self.trunk = trunk.requires_grad_(False)
        self.registry = TaskRegistry(unmasked)
        self.prepared = Prepared()
        self._records = Records()

    def __repr__(self) -> str:
        height, width = self.trunk.config.image_size
        size = sum(parameter.numel() for parameter in self.trunk.parameters())
        tasks = [f"{name} ({task.spec.regime})" for name, task in self.registry.items()]
        return (
            f"MemoryViT({self.trunk.source!r}, {height} x {width} pixels, {size:,} parameters; "
            f"tasks: {', '.join(tasks) or 'none'})"
        )

    @property
    def preprocessing(self) -> Preprocessing:
        """How pictures become pixels: the trunk's way, or plain ones of its size if it has none."""
        size = self.trunk.config.image_size
        return self.trunk.preprocessing or Preprocessing(size=size, resize=None)

    @property
    def tasks(self) -> Mapping[str, Task]:
        """The attached tasks by name, parents before children."""
        return self.registry

    def task(self, name: str) -> Task:
        """The attached task of this name.

        Args:
            name: The task's name.

        Returns:
            The task: a module with its parameters, its `spec` and its `kind`.

        Raises:
            EngramError: No task of this name is attached.

        Examples:
            >>> model.task("flowers").spec.classes
            ('rose', 'tulip')
        """
        if name not in self.registry:
            there = ", ".join(self.registry) or "none"
            raise EngramError(f"There is no task {name!r} in this model; attached: {there}.")
        return self.registry[name]

    def add_task(
        self,
        name: str,
        classes: int | Sequence[str],
        cells: int = 5,
        *,
        regime: str = "masked",
        extends: Sequence[str] = (),
        update: str = "fresh",
        tokens: int | None = None,
        adapter_width: int = 32,
        rank: int = 16,
        class_init: str = "trunk",
        kind: str = "classification",
        values: Sequence[int] | None = None,
        ignore: int = IGNORED,
        seed: int | None = None,
    ) -> Task:
        """Add a new, untrained task.

        Args:
            name: Its name: lower-case letters, digits, `.`, `_` and `-`, and not `base`.
            classes: The number of classes or their names. In regression, the numbers to predict.
            cells: Memory cells at every layer. 0 leaves a class token and a head.
            regime: Which parameters train, and whether attention is masked.
            extends: Names of attached tasks whose class tokens and cells this task reads.
            update: How the regime `memory` passes cells from layer to layer: `fresh`, `propagate`
                or `add`.
            tokens: Number of class tokens. By default 1, or one for each class in masked
                segmentation.
            adapter_width: Width of the bottleneck, in regimes with adapters.
            rank: Width of the side patches, in the regimes `side` and `side+readout`.
            class_init: Where the class token starts: `trunk` (a copy of the trunk's) or `random`.
            kind: What the task answers: `classification`, `multilabel`, `regression` or
                `segmentation`.
            values: In segmentation, the pixel value of each class in masks. By default 0, 1, ….
            ignore: In segmentation, the value of pixels that count nowhere.
            seed: Random seed for initialisation. Without one, torch's global generator is used.

        Returns:
            The task, attached.

        Raises:
            EngramError: A setting is wrong, the name is taken, or the task cannot share a pass with
                those attached.

        Examples:
            >>> task = model.add_task("roses", classes=3, cells=5, extends=["flowers"])
            >>> list(model.tasks)
            ['flowers', 'roses']
        """
        if isinstance(extends, str):
            raise EngramError(
                f"extends is the text {extends!r}; give a list such as [{extends!r}]."
            )
        settings = TaskSettings(
            regime, cells, tuple(extends), update, adapter_width, class_init, rank
        )
        spec = TaskSpec.create(
            name, classes, settings, kind=kind, tokens=tokens, values=values, ignore=ignore
        )
        return self.add(spec, class_init=class_init, seed=seed)

    def add(self, spec: TaskSpec, *, class_init: str = "trunk", seed: int | None = None) -> Task:
        """Add an untrained task of this spec; `add_task` makes the spec for you."""
        self.check(spec)
        if seed is None:
            return self._put(Task(spec, self.trunk, class_init))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self._put(Task(spec, self.trunk, class_init))

    def check(self, spec: TaskSpec) -> None:
        """Refuse a task that could not be added: its name, its parents or its regime."""
        self.registry.check(spec)

    def swap(self, spec: TaskSpec) -> Task:
        """Put an untrained task of another spec in the place of the one of this name."""
        self.task(spec.name)
        return self._put(Task(spec, self.trunk))

    def detach(self, name: str) -> None:
        """Remove a task. The answers of all others stay the same.

        Args:
            name: The task's name.

        Raises:
            EngramError: No task of this name is attached, or others extend it.

        Examples:
            >>> task = model.add_task("roses", classes=3, extends=["flowers"])
            >>> model.detach("roses")  # flowers can be detached only after it
        """
        self.task(name)
        self.registry.remove(name)
        self._refresh()

    def save(
        self,
        name: str,
        path: str | Path,
        *,
        metrics: Mapping[str, Any] | None = None,
        recipe: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write one task as an engram. The file appears whole or not at all.

        Args:
            name: The task's name.
            path: The file to write, usually `NAME.safetensors`. An existing file is replaced.
            metrics: Results to record in the file's header.
            recipe: Training settings to record in the file's header.

        Returns:
            The path.

        Raises:
            EngramError: No task of this name is attached, a value is not finite, or the file cannot
                be written.

        Examples:
            >>> model.save("flowers", "flowers.safetensors")
            PosixPath('flowers.safetensors')
        """
        engram = self.engram(name, metrics=metrics, recipe=recipe)
        written = write_engram(path, engram)
        self._records.remember(engram)
        return written

    def engram(
        self,
        name: str,
        *,
        metrics: Mapping[str, Any] | None = None,
        recipe: Mapping[str, Any] | None = None,
    ) -> Engram:
        """One task as an engram in memory: what `save` would write.

        Args:
            name: The task's name.
            metrics: Results to record in the header.
            recipe: Training settings to record in the header. Without both, the header says what it
                said when these weights were attached or saved.

        Returns:
            The engram.

        Examples:
            >>> model.engram("flowers").spec.cells
            5
        """
        task = self.task(name)
        parents = {parent: self.engram(parent).content for parent in task.spec.extends}
        engram = new_engram(
            task.spec,
            task.tensors(),
            trunk=self.trunk,
            parents=parents,
            metrics=metrics,
            recipe=recipe,
        )
        return self._records.restore(engram) if metrics is None and recipe is None else engram

    def attach(self, source: str | Path | Engram) -> Task:
        """Attach an engram, after checking that it belongs to this trunk.

        Args:
            source: A path, an engram in memory, or one on the Hub (`hf:owner/name/FILE`, pinned by
                `@revision` or `#content`). A bundle or repository with a single engram is enough.

        Returns:
            The attached task.

        Raises:
            EngramError: The file is damaged, was trained on another trunk or with other
                preprocessing, its name is taken, or a task that it extends is not attached.

        Examples:
            >>> other = engram.MemoryViT(engram.load_trunk("pico"))
            >>> task = other.attach("flowers.safetensors")
        """
        engram = source if isinstance(source, Engram) else read_engram(single_engram_path(source))
        own = TrunkInfo.from_trunk(self.trunk)
        engram.check_trunk(own, self.trunk.preprocessing)
        notice = engram.other_dtype(own)
        if notice is not None:
            warnings.warn(notice, Notice, stacklevel=2)
        self.check(engram.spec)
        for parent, content in engram.parents.items():
            attached = self.engram(parent).content
            if attached != content:
                raise EngramError(
                    f"The engram {engram.spec.name!r} extends a {parent!r} with the content "
                    f"{content[:12]}, but the attached {parent!r} has {attached[:12]}; attach the "
                    "one it was trained with."
                )
        with torch.random.fork_rng(devices=[]):  # the draws are overwritten
            task = Task(engram.spec, self.trunk)
        engram.fill(task)
        self._records.remember(engram)
        return self._put(task)

    def _put(self, task: Task) -> Task:
        self.registry.put(task.to(self.trunk.device))
        self._refresh()
        return task.train(self.training)

    def _refresh(self) -> None:
        for name in [name for name in self._modules if task_name(name) is not None]:
            del self._modules[name]
        for name, task in self.registry.items():
            self.add_module(module_name(name), task)
        self.prepared.clear()

    # State dicts

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what `state_dict` gave. The keys name the tasks, so their order does not matter.

        Args:
            state_dict: Tensors by key: `trunk.…`, and `task:NAME.…` for every task.
            strict: Refuse a state dict that has not all tasks of this model, or others.
            assign: Use the tensors themselves in place of copies.

        Returns:
            torch's lists of the keys that were missing and of those that were not expected.

        Raises:
            EngramError: The tasks differ, or the state dict is of an earlier version, whose keys
                number the tasks, and it has several. Nothing is loaded then.

        Examples:
            >>> other = engram.load_model("flowers.safetensors")
            >>> keys = other.load_state_dict(model.state_dict())
        """
        if strict:
            check_tasks(state_dict, self.registry)
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:
        name_tasks(state_dict, prefix, list(self.registry))  # also inside of another module
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)

    # The forward pass
