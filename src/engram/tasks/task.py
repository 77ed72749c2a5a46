"""One task of a model: its spec, the parameters that its method trains, and its head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from engram.backbones.shape import BackboneShape
from engram.errors import EngramError
from engram.methods import Base
from engram.methods.method import Method, TaskInput
from engram.tasks.class_statistics import ClassStatistics
from engram.tasks.heads import BackboneHead, Fitted, TaskHead
from engram.tasks.kinds import KINDS, Kind
from engram.tasks.spec import TaskSpec
from engram.tasks.task_settings import CLASS_INITS
from engram.util.flag_names import flag
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
        shape = BackboneShape.of(backbone)
        self.spec = spec = spec.fitted(shape, class_init)
        parameters = spec.method.parameters(spec.shape(shape, class_init))
        self._own = tuple(parameters)
        for name, initial in parameters.items():
            _put(self, name, nn.Parameter(initial.draw(backbone)))
        self.backbone = spec.method.own_backbone(backbone)
        self.head = self.kind.head(spec.head_config(shape))
        self.statistics: ClassStatistics | None = None  # `keep_statistics` makes room for them
        self.to(backbone.device, backbone.dtype)
        self._on_cpu: VersionedCache[Fitted] = VersionedCache(1)

    @property
    def method(self) -> Method:
        """How it learns: the class that knows what differs between regimes."""
        return self.spec.method

    @property
    def kind(self) -> Kind:
        """What it learns from and answers; `kind.name` is the word for it."""
        return KINDS[self.spec.kind]

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
        """The answer for one image, from its row of `model(pixels)[name]`, as JSON can hold it.

        The `answer` of each kind in `kinds.py` says what it contains.
        """
        fitted: Fitted = self.head.fitted
        if output.is_cpu and fitted:  # copied once: a copy for every image synchronises a GPU
            buffers = self.head.fitted
            fitted = self._on_cpu.get(
                "", buffers.values(), lambda: {name: value.cpu() for name, value in buffers.items()}
            )
        return self.kind.answer(output, self.spec.classes, fitted, top_k)

    def tensors(self) -> dict[str, Tensor]:
        """What the task's file holds: all that was trained, and what was found in the data."""
        found = {f"head.{name}": value for name, value in self.head.fitted.items()}
        found |= {} if self.statistics is None else self.statistics.tensors()
        return {name: t.detach() for name, t in (*self.named_parameters(), *found.items())}


class BaseTask(Task):
    """`base`: the backbone's own answer, a task without parameters. It has no file."""

    def __init__(self, backbone: ViT) -> None:
        nn.Module.__init__(self)
        self.spec = TaskSpec(Base.name, backbone.class_names, method=Base())
        self._own = ()
        self.backbone = self.statistics = None
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
