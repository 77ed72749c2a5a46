"""The tasks that share one backbone: who may join, and who reads whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from engram.errors import EngramError
from engram.tasks.spec import TaskSpec
from engram.tasks.task import Task


class TaskRegistry(Mapping[str, Task]):
    """Tasks by name, parents before children.

    `unmasked` lets tasks share a pass whose cells every token reads: the experiment of the paper's
    section 4.4.
    """

    def __init__(self, unmasked: bool = False) -> None:
        self.unmasked = unmasked
        self._tasks: dict[str, Task] = {}
        self._depths: dict[str, int] = {}  # 1 for a task that extends none

    def __getitem__(self, name: str) -> Task:
        return self._tasks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def put(self, task: Task) -> None:
        self._tasks[task.spec.name] = task
        for name, one in self.items():  # all: it may have taken the place of another
            parents = (self._depths[parent] for parent in one.spec.extends)
            self._depths[name] = 1 + max(parents, default=0)

    def remove(self, name: str) -> None:
        """Remove a task; one that others extend is refused."""
        self.check_removable(name)
        del self._tasks[name], self._depths[name]

    def check_removable(self, name: str) -> None:
        """Refuse to remove a task that others extend."""
        children = [child for child, task in self.items() if name in task.spec.extends]
        if children:
            raise EngramError(f"{name!r} is extended by {', '.join(children)}; detach those first.")

    def check(self, spec: TaskSpec) -> None:
        """Refuse a task that cannot join: its name, its parents or its regime."""
        if spec.name in self:
            raise EngramError(
                f"A task {spec.name!r} is attached already; detach it first, or give one of the "
                "two another name."
            )
        for parent in spec.extends:
            if parent not in self:
                raise EngramError(
                    f"{spec.name!r} extends {parent!r}, which is not attached; attach it first."
                )
            self._check_parent(spec, self[parent].spec)
        for other in self.values():
            self._check_pass(spec, other.spec)

    def _check_parent(self, spec: TaskSpec, parent: TaskSpec) -> None:
        try:
            spec.method.check_parent(parent.method)
        except EngramError as error:
            raise EngramError(f"{spec.name!r} cannot extend {parent.name!r}: {error}.") from None

    def _check_pass(self, spec: TaskSpec, other: TaskSpec) -> None:
        alone = next((s for s in (spec, other) if not s.method.shares_pass), None)
        together = self.unmasked and spec.method.concatenates(other.method)
        if alone is not None and not together:
            raise EngramError(
                f"{alone.name!r} has the regime {alone.regime!r}, which changes the backbone's own "
                f"tokens, so {spec.name!r} and {other.name!r} cannot share a pass; use one "
                "MemoryViT for each, or train with the regime masked."
            )

    def closure(self, names: Sequence[str]) -> list[str]:
        """These tasks and all they extend, parents first, in an order that attaching leaves alone.

        Sums in another order differ in their last bits, so `exact` needs an order of its own.
        """
        wanted = set(names)
        for name in reversed(self._tasks):
            if name in wanted:
                wanted.update(self[name].spec.extends)
        return sorted(wanted, key=lambda name: (self._depths.get(name, 0), name))
