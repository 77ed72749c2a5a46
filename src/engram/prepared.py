"""What tasks bring into a pass that depends on no image, kept from pass to pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from engram.memory import Memory, Stream
from engram.side import Member, Sides
from engram.tasks.registry import TaskRegistry
from engram.util.devices import autocast_dtype
from engram.util.tensors import version
from engram.vit import ViT

_Made = TypeVar("_Made", Memory, Sides)
_KEPT = 8  # selections of tasks whose cells' keys and values are kept


def memory_of(trunk: ViT, tasks: TaskRegistry, names: Sequence[str]) -> Memory:
    """The streams of these masked tasks and of all they read, parents first."""
    closure = tasks.closure(names)
    streams = []
    for name in closure:
        task = tasks[name]
        assert task.class_token is not None
        assert task.cells is not None
        ancestors = tasks.closure(task.spec.extends)
        streams.append(
            Stream(
                name=name,
                token=task.class_token,
                cells=task.cells,
                extends=tuple(closure.index(ancestor) for ancestor in ancestors),
                after_norm=task.spec.after_norm,
                adapters=task.adapters,
            )
        )
    return Memory(trunk, streams)


def sides_of(tasks: TaskRegistry, names: Sequence[str]) -> Sides:
    """The side patches of these tasks and of all they extend, parents first."""
    members = []
    for name in tasks.closure(names):
        task = tasks[name]
        assert task.side is not None
        assert task.cells is not None
        spec = task.spec
        members.append(Member(name, task.side, task.cells, spec.extends, spec.side_form))
    return Sides(members)


def builds_graph(tasks: TaskRegistry, names: Sequence[str], x: Tensor) -> bool:
    """Whether autograd records a pass of these tasks over the trunk's tokens x."""
    if not torch.is_grad_enabled():
        return False
    found = (tasks[name] for name in tasks.closure(names))
    return x.requires_grad or any(p.requires_grad for task in found for p in task.parameters())


class Prepared:
    """Streams and side patches of selections of tasks, ready to read a trunk.

    Outside of training they are kept until a parameter changes. In a copy of a model that is to be
    traced they are `constant`.
    """

    def __init__(self) -> None:
        self.constant: Memory | None = None
        self.constant_sides: Sides | None = None
        self._kept: dict[tuple[str, ...], tuple[object, Any]] = {}  # the newest is last

    def clear(self) -> None:
        """Forget what was kept: the tasks are other ones."""
        self._kept.clear()

    def memories(
        self, trunk: ViT, tasks: TaskRegistry, groups: Sequence[Sequence[str]], x: Tensor
    ) -> list[Memory]:
        """By group of tasks, their streams and those that they read, for the trunk's tokens x."""
        if self.constant is not None:
            return [self.constant]
        return self._while_same(partial(memory_of, trunk), trunk, tasks, groups, x)

    def sides(
        self, trunk: ViT, tasks: TaskRegistry, groups: Sequence[Sequence[str]], x: Tensor
    ) -> list[Sides]:
        """By group of tasks, their side patches and those that they extend, for the same."""
        if self.constant_sides is not None:
            return [self.constant_sides]
        return self._while_same(sides_of, trunk, tasks, groups, x)

    def _while_same(
        self,
        make: Callable[[TaskRegistry, Sequence[str]], _Made],
        trunk: ViT,
        tasks: TaskRegistry,
        groups: Sequence[Sequence[str]],
        x: Tensor,
    ) -> list[_Made]:
        """What `make` makes of these tasks; outside of training it is kept until they change.

        torch.compile cannot ask whether they changed: a compiled pass makes it every time.
        """
        if torch.compiler.is_compiling():
            return [make(tasks, names) for names in groups]
        if any(builds_graph(tasks, names, x) for names in groups):
            self.clear()  # some optimisers write where `version` does not see it
            return [make(tasks, names) for names in groups]
        trunk_state, found = _trunk_versions(trunk), []
        for names in groups:
            key = tuple(tasks.closure(names))
            own = [p for name in key for p in tasks[name].parameters()]
            state = trunk_state, tuple(map(version, own))
            kept = self._kept.pop(key, None)
            if kept is None or kept[0] != state:
                kept = (state, make(tasks, names))
            self._kept[key] = kept
            found.append(kept[1])
        while len(self._kept) > _KEPT + len(tasks):  # `exact` has one for each task
            del self._kept[next(iter(self._kept))]
        return found


def _trunk_versions(trunk: ViT) -> object:
    """Changes with all that a `Memory` is made from of the trunk."""
    parameters = [p for b in trunk.layers for m in (b.norm1, b.qkv) for p in m.parameters()]
    parameters += [p for p in (trunk.prefix_position,) if p is not None]
    if trunk.pre_norm is not None:
        parameters += trunk.pre_norm.parameters()
    return autocast_dtype(trunk.device), tuple(map(version, parameters))
