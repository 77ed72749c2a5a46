"""What a task is made of: regime -> parameters that train, and proof that the rest is frozen."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from engram.adapters import Adapters
from engram.errors import EngramError
from engram.memory import Update
from engram.tasks.kinds import IGNORED, KINDS, Kind
from engram.vit import ViT

if TYPE_CHECKING:
    from engram.model import MemoryViT


@dataclass(frozen=True)
class Regime:
    """Which parameters a task has (all of them train), and how its tokens attend."""

    about: str
    masked: bool = False  # Table 1: nothing but the task's own stream changes
    token: bool = True
    cells: bool = False
    adapters: bool = False
    mlp: bool = False  # an MLP instead of a linear head
    trunk: bool = False  # a whole trunk of its own

    @property
    def changes_trunk(self) -> bool:
        """Whether the trunk's own tokens change, so that no other task can share the pass."""
        return not self.masked and (self.token or self.cells or self.adapters or self.trunk)


REGIMES = {
    "masked": Regime("cells + class token + head, Table 1", masked=True, cells=True),
    "masked+adapter": Regime(
        "masked + adapters on the task's own stream", masked=True, cells=True, adapters=True
    ),
    "memory": Regime("cells + class token + head, every token reads the cells", cells=True),
    "class": Regime("class token + head"),
    "head": Regime("a linear head", token=False),
    "mlp-head": Regime("an MLP head", token=False, mlp=True),
    "full": Regime("everything", token=False, trunk=True),
    "adapter": Regime("adapters + class token + head", adapters=True),
    "memory+adapter": Regime("cells + adapters + class token + head", cells=True, adapters=True),
}

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True)
class TaskSpec:
    """What a task is, without its values. A setting that makes no sense is an EngramError."""

    name: str
    classes: tuple[str, ...]
    kind: str = "classification"
    regime: str = "masked"
    cells: int = 5  # at every layer
    tokens: int = 1  # class tokens; the paper has one
    extends: tuple[str, ...] = ()
    update: Update = "fresh"  # Figure 2b; only where every token reads the cells
    after_norm: bool = False  # cells join behind the norm: converted checkpoints
    adapter_width: int = 32
    # Of segmentation: the value that each class has in a mask, and the one of ignored pixels.
    values: tuple[int, ...] = ()
    ignore: int = IGNORED

    def __post_init__(self) -> None:
        def refuse(problem: str) -> None:
            raise EngramError(f"Task {self.name!r}: {problem}")

        if not NAME.fullmatch(self.name) or self.name == "base":
            raise EngramError(
                f"{self.name!r} cannot name a task: use 1 to 64 of a-z, 0-9, '.', '_' and '-', "
                "beginning with a letter or a digit, and not 'base', which is the trunk itself."
            )
        if self.regime not in REGIMES:
            refuse(f"there is no regime {self.regime!r}; choose one of {', '.join(REGIMES)}.")
        if self.kind not in KINDS:
            refuse(f"there is no kind of task {self.kind!r}; choose one of {', '.join(KINDS)}.")
        count, (noun, nouns) = len(self.classes), self.does.nouns
        if not self.classes:
            refuse(f"it has no {nouns}; give how many there are, or their names.")
        if count < self.does.least:
            refuse(f"{self.kind} needs at least {self.does.least} {nouns}, not {count}.")
        garbled = next((name for name in self.classes if not _is_text(name)), None)
        if garbled is not None:
            refuse(
                f"the {noun} {garbled!r} is no text in UTF-8, so no answer could name it; rename "
                "its folder, or what else it is named after."
            )
        if len(set(self.classes)) < len(self.classes):
            twice = Counter(self.classes).most_common(1)[0][0]
            refuse(f"the {noun} {twice!r} is there twice; every {noun} needs a name of its own.")
        for what in ("cells", "tokens", "adapter_width"):
            least, value = int(what != "cells"), getattr(self, what)
            if not isinstance(value, int) or not least <= value <= 10_000:
                refuse(f"{what} is {value!r}; it must be a whole number from {least} to 10,000.")
        if self.update not in get_args(Update):
            refuse(f"there is no update {self.update!r}; choose fresh, propagate or add.")
        if self.update != "fresh" and (self.parts.masked or not self.parts.cells):
            refuse(f"update={self.update!r} is for the regimes memory and memory+adapter only.")
        if self.extends and not self.parts.masked:
            refuse(
                f"only masked tasks extend others, and its regime is {self.regime!r}; "
                "choose masked or masked+adapter, or leave extends out."
            )
        if self.tokens > 1 and not self.parts.masked:
            refuse(f"the regime {self.regime!r} has one class token, not {self.tokens}.")
        if self.does.per_pixel:
            self._check_masks(refuse)
        elif self.values or self.ignore != IGNORED:
            refuse(f"values and ignore say what is in masks, and {self.kind} learns from none.")

    def _check_masks(self, refuse: Callable[[str], None]) -> None:
        count = len(self.classes)
        if count > IGNORED:
            refuse(f"{count} classes are too many for masks, which can have {IGNORED}.")
        if self.tokens != self.does.tokens(count, self.parts.masked):
            refuse(f"segmentation has one class token a class, not {self.tokens} for {count}.")
        values = (*self.values, self.ignore)
        if len(self.values) != count or len(set(values)) < len(values):
            refuse(
                f"{count} classes need as many values in the masks, all different and not the "
                f"ignored {self.ignore}; got {', '.join(map(str, self.values)) or 'none'}."
            )
        if not all(isinstance(value, int) and 0 <= value < 2**16 for value in values):
            refuse(f"values in masks are whole numbers from 0 to 65,535, not {values}.")

    @property
    def parts(self) -> Regime:
        return REGIMES[self.regime]

    @property
    def does(self) -> Kind:
        return KINDS[self.kind]


class Task(nn.Module):
    """One task's parameters, named as in its file: cells, class_token, head.weight, head.bias.

    Cells are drawn from N(0, 0.02^2). The class token starts as a copy of the trunk's own
    (`class_init="trunk"`; the paper does not say), or from N(0, 0.02^2) where the trunk has none
    or with `class_init="random"`. Draws come from torch's global generator.
    """

    def __init__(self, spec: TaskSpec, trunk: ViT, class_init: str = "trunk") -> None:
        super().__init__()
        if class_init not in ("trunk", "random"):
            raise EngramError(f"class_init is {class_init!r}; choose 'trunk' or 'random'.")
        parts, width, depth = spec.parts, trunk.config.width, trunk.config.depth
        if not parts.cells:
            spec = replace(spec, cells=0)
        self.spec = spec
        self.cells = self.class_token = self.adapters = self.trunk = None
        if parts.cells:
            layers = 1 if spec.update == "propagate" else depth
            self.cells = nn.Parameter(torch.randn(layers, spec.cells, width) * 0.02)
        if parts.token:
            token = (torch.randn(spec.tokens, width) * 0.02).to(trunk.position)
            if class_init == "trunk" and trunk.class_token is not None:
                token[:1] = trunk.class_token.detach()
                token[1:] += trunk.class_token.detach()  # apart from each other, so they differ
            self.class_token = nn.Parameter(token)
        if parts.adapters:
            self.adapters = Adapters(depth, width, spec.adapter_width)
        if parts.trunk:
            self.trunk = copy.deepcopy(trunk)
            self.trunk.head = None
            self.trunk.requires_grad_(True)
        classes = len(spec.classes)
        self.head = spec.does.head(width, classes, mlp=parts.mlp, masked=parts.masked)
        device, dtype = trunk.position.device, trunk.position.dtype
        self.to(device, dtype)

    @property
    def kind(self) -> Kind:
        """What it learns from and answers; `kind.name` is the word for it."""
        return self.spec.does

    def answer(self, output: Tensor, top_k: int = 5) -> Any:
        """What to tell about one picture, from its row of `model(pixels)[name]`; JSON can hold it.

        What it looks like is told by the `answer` of each kind in `kinds.py`.
        """
        return self.kind.answer(output, self.spec.classes, self.head.settled, top_k)

    def tensors(self) -> dict[str, Tensor]:
        """What the task's file holds: all that was trained, and what the head found in the data."""
        settled = {f"head.{name}": value for name, value in self.head.settled.items()}
        return {name: t.detach() for name, t in (*self.named_parameters(), *settled.items())}


def _is_text(name: str) -> bool:
    """Not of bytes that are no UTF-8, which file names can be and Python keeps as surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def class_names(classes: int | Sequence[str]) -> tuple[str, ...]:
    if isinstance(classes, str):
        raise EngramError(f"classes is the text {classes!r}; give a number or a list of names.")
    if isinstance(classes, Integral):  # numpy's numbers too
        return tuple(str(i) for i in range(int(classes)))
    if not isinstance(classes, Iterable):
        raise EngramError(f"classes is {classes!r}; give a whole number or a list of names.")
    return tuple(map(str, classes))


def train_only(model: MemoryViT, *names: str) -> list[tuple[str, nn.Parameter]]:
    """Let exactly these tasks' parameters train, and give them; all others are frozen.

    A parameter that belongs neither to the trunk nor to a task of the model (somebody's own
    module put into it) is an error: nothing trains or stays frozen by accident.
    """
    trained = {id(p) for name in names for p in model.task(name).parameters()}
    known = {id(p) for p in _known(model)}
    for path, parameter in model.named_parameters():
        if id(parameter) not in known:
            raise EngramError(
                f"The parameter {path} belongs neither to the trunk nor to a task, so it is "
                "neither trained nor frozen on purpose; remove its module from the model."
            )
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    return [(path, p) for path, p in model.named_parameters() if id(p) in trained]


def _known(model: MemoryViT) -> Iterator[nn.Parameter]:
    yield from model.trunk.parameters()
    for task in model.tasks.values():
        yield from task.parameters()
