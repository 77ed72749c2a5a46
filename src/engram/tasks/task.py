"""The tasks of a model: `Task`, its parameters and its head, and `TaskRegistry`, all by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from engram.backbones.shape import BackboneShape
from engram.errors import EngramError, flag
from engram.methods import Base
from engram.methods.method import Method, TaskInput
from engram.methods.method_flags import CLASS_INITS
from engram.tasks.class_statistics import ClassStatistics
from engram.tasks.feature_sums import FeatureSums
from engram.tasks.heads import BackboneHead, Fitted, TaskHead
from engram.tasks.kind import Kind, Reading
from engram.tasks.spec import TaskSpec, check_shared_pass
from engram.util.tensors import VersionedCache
from engram.vit import ViT


class Task(nn.Module):
    """One task's parameters, named as in its file: cells, class_token, head.weight, head.bias.

    `class_init` says where class tokens start: as a copy of the backbone's own, or at random. Draws
    come from torch's global generator.
    """

    head: TaskHead

    def __init__(self, spec: TaskSpec, backbone: ViT, class_init: str = "backbone") -> None:
        super().__init__()
        if class_init not in CLASS_INITS:
            raise EngramError(
                f"{flag('class_init')} is {class_init!r}; choose 'backbone' or 'random'."
            )
        shape = BackboneShape.measure(backbone)
        try:
            spec.method.check_backbone(backbone)
        except EngramError as error:
            raise EngramError(f"Task {spec.name!r}: {error}") from None
        self.spec = spec = spec.fitted(shape, class_init)
        parameters = spec.method.parameters(spec.shape(shape, class_init))
        self._own = tuple(parameters)
        for name, initial in parameters.items():
            _put(self, name, nn.Parameter(initial.draw(backbone)))
        self.backbone = spec.method.own_backbone(backbone)
        self.head = self.kind.head_class(spec.head_config(shape), self.kind.fitted)
        self.statistics: ClassStatistics | None = None  # `keep_statistics` makes room for them
        self.sums: FeatureSums | None = None  # of a task that was taught, and can learn more
        self.to(backbone.device, backbone.dtype)
        self._on_cpu: VersionedCache[Fitted] = VersionedCache(1)

    @property
    def method(self) -> Method:
        return self.spec.method

    @property
    def kind(self) -> Kind:
        return self.spec.kind_object

    def input(self) -> TaskInput:
        """The task as it joins a pass."""
        tensors = {name: self.get_parameter(name) for name in self._own}
        spec = self.spec
        return TaskInput(spec.name, spec.method, tensors, spec.extends, self.kind.per_pixel)

    def keep_statistics(self) -> ClassStatistics:
        """New ones of its head's inputs, which are part of the task from now on."""
        groups = self.kind.groups(len(self.spec.classes))
        self.statistics = ClassStatistics(groups, self.head.in_features).to(self.head.weight.device)
        return self.statistics

    def answer(self, output: Tensor, top_k: int = 5) -> Any:
        """`Kind.answer` for one image, from its row of `model(pixels)[name]`."""
        return self.kind.answer(*self.reading(output), top_k)

    def reading(self, output: Tensor) -> Reading:
        """An output for one image with the class names and fitted buffers that explain it."""
        fitted: Fitted = self.head.fitted
        if output.is_cpu and fitted:  # copied once: a copy for every image synchronises a GPU
            own = fitted
            fitted = self._on_cpu.get(
                "", own.values(), lambda: {n: v.cpu() for n, v in own.items()}
            )
        return output, self.spec.classes, fitted

    def labels(self, output: Tensor) -> tuple[list[str], float | None]:
        """The classes that the answer for one image names, and the probability of the likeliest."""
        output, names, fitted = self.reading(output)
        found, confidence = self.kind.labels(output, fitted)
        return [names[i] for i in found], confidence

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the task's file: trained ones, fitted buffers and class statistics."""
        found = {f"head.{name}": value for name, value in self.head.fitted.items()}
        for statistics in (self.statistics, self.sums):
            found |= {} if statistics is None else statistics.tensors()
        return {name: t.detach() for name, t in (*self.named_parameters(), *found.items())}


class BaseTask(Task):
    """`base`: the backbone's own answer, a task without parameters. It has no file."""

    def __init__(self, backbone: ViT) -> None:
        nn.Module.__init__(self)
        self.spec = TaskSpec(Base.name, backbone.class_names, method=Base())
        self._own = ()
        self.backbone = self.statistics = self.sums = None
        self.head = BackboneHead(backbone)  # type: ignore[assignment]
        self._on_cpu = VersionedCache(1)


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter whose name may have dots, as in adapters.down."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)


class TaskRegistry(Mapping[str, Task]):
    """The tasks that share one backbone by name, parents before children: who may join them.

    `unmasked` lets tasks whose cells every token reads share a pass (the paper's section 4.4).
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
            try:
                spec.method.check_parent(self[parent].method)
            except EngramError as error:
                raise EngramError(f"{spec.name!r} cannot extend {parent!r}: {error}.") from None
        for other in (task.spec for task in self.values()):
            if not (self.unmasked and spec.method.concatenates(other.method)):
                check_shared_pass(spec, other)

    def closure(self, names: Sequence[str]) -> list[str]:
        """These tasks and all they extend, parents first, in an order that attaching leaves alone.

        Sums in another order differ in their last bits, so `exact` needs an order of its own.
        """
        wanted = set(names)
        for name in reversed(self._tasks):
            if name in wanted:
                wanted.update(self[name].spec.extends)
        return sorted(wanted, key=lambda name: (self._depths.get(name, 0), name))


# The keys of tasks in a model's state dict, by name, so that no order can swap two tasks. The task
# `flowers` is the submodule `task:flowers`: no attribute of a module has a colon in its name, so
# none can be hidden by a task. A dot in its name is written as `%2E`: dots separate modules.

_PREFIX = "task:"


def module_name(task: str) -> str:
    """The name of the submodule that a task is."""
    return _PREFIX + task.replace("%", "%25").replace(".", "%2E")


def task_name(module: str) -> str | None:
    """The task that a submodule is, by its name; None if it is no task."""
    if not module.startswith(_PREFIX):
        return None
    return module.removeprefix(_PREFIX).replace("%2E", ".").replace("%25", "%")


def check_keys(state: Iterable[str], tasks: Collection[str]) -> None:
    """Refuse the keys of a state dict with other tasks than these."""
    found = {name for key in state if (name := task_name(key.split(".")[0])) is not None}
    problems = []
    if missing := [name for name in tasks if name not in found]:
        problems.append(f"does not have {_quoted(missing)}, which the model has")
    if unknown := sorted(found - set(tasks)):
        problems.append(f"has {_quoted(unknown)}, which the model does not have")
    if problems:
        raise EngramError(
            f"The state dict {', and '.join(problems)}, so nothing was loaded; add or detach "
            "tasks until both have the same, or pass strict=False to load those that both have."
        )


def _quoted(names: Sequence[str]) -> str:
    return f"the task{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"
