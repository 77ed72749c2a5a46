"""`TaskSpec`: a task without its values, checked when it is made."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import torch

from engram.backbones.shape import BackboneShape
from engram.errors import EngramError
from engram.methods import METHODS, Base, Method, create_method
from engram.methods.method import TaskShape
from engram.methods.method_flags import DEFAULT_REGIME
from engram.tasks.class_statistics import statistics_shapes
from engram.tasks.feature_sums import sums_shapes
from engram.tasks.heads import HeadSizes
from engram.tasks.kind import IGNORED, Kind
from engram.tasks.kinds import KINDS

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
#: The largest size of all class names together, as they are written into the header of an engram:
#: 100,000 names of 74 characters.
MAX_CLASS_BYTES = 8_000_000


@dataclass(frozen=True)
class TaskSpec:
    """A task without its values. A setting that makes no sense is an EngramError."""

    name: str
    classes: tuple[str, ...]
    kind: str = "classification"
    method: Method = field(default_factory=lambda: create_method(DEFAULT_REGIME, {}))
    extends: tuple[str, ...] = ()
    # Of segmentation: the value that each class has in a mask, and the one of ignored pixels.
    values: tuple[int, ...] = ()
    ignore: int = IGNORED

    def __post_init__(self) -> None:
        if isinstance(self.method, Base):
            return  # the classes are those of the original model, if it has any

        def refuse(problem: str) -> None:
            raise EngramError(f"Task {self.name!r}: {problem}")

        check_name(self.name)
        if self.kind not in KINDS:
            refuse(f"there is no kind of task {self.kind!r}; choose one of {', '.join(KINDS)}.")
        kind, count = KINDS[self.kind], len(self.classes)
        noun, nouns = kind.nouns
        if not self.classes:
            refuse(f"it has no {nouns}; give how many there are, or their names.")
        if count < kind.least:
            refuse(f"{self.kind} needs at least {kind.least} {nouns}, not {count}.")
        if kind.one_class and count > 1:
            refuse(f"{self.kind} tells anomalous images from good ones: 1 class, not {count}.")
        # File names of bytes that are no UTF-8 have surrogates in Python.
        garbled = [name for name in self.classes if name.encode(errors="ignore").decode() != name]
        if garbled:
            refuse(
                f"the {noun} {garbled[0]!r} is no text in UTF-8, so no answer could name it; "
                "rename its folder, or what else it is named after."
            )
        if len(set(self.classes)) < len(self.classes):
            twice = Counter(self.classes).most_common(1)[0][0]
            refuse(f"the {noun} {twice!r} is there twice; every {noun} needs a name of its own.")
        size = len(json.dumps(json.dumps(self.classes)))  # JSON as text in JSON
        if size > MAX_CLASS_BYTES:
            refuse(
                f"the names of its {count:,} {nouns} take {size / 1e6:.1f} MB, and an engram has "
                f"room for {MAX_CLASS_BYTES / 1e6:g} MB; shorten them."
            )
        if kind.one_class != self.method.one_class:
            self._refuse_method(refuse)
        if kind.per_pixel:
            self._check_masks(refuse)
        elif self.values or self.ignore != IGNORED:
            refuse(f"values and ignore say what is in masks, and {self.kind} learns from none.")

    def _refuse_method(self, refuse: Callable[[str], None]) -> None:
        able = [name for name, method in METHODS.items() if method.one_class]
        if self.kind_object.one_class:
            refuse(
                f"{self.kind} learns from good images alone, which the regime {self.regime!r} "
                f"cannot; choose {' or '.join(able)}."
            )
        kinds = [kind.name for kind in KINDS.values() if kind.one_class]
        refuse(
            f"the regime {self.regime!r} learns from good images alone, for tasks of the kind "
            f"{' or '.join(kinds)}; this is {self.kind}."
        )

    def _check_masks(self, refuse: Callable[[str], None]) -> None:
        count = len(self.classes)
        if count > IGNORED:
            refuse(f"{count} classes are too many for masks, which can have {IGNORED}.")
        values = (*self.values, self.ignore)
        if len(self.values) != count or len(set(values)) < len(values):
            refuse(
                f"{count} classes need as many values in the masks, all different and not the "
                f"ignored {self.ignore}; got {', '.join(map(str, self.values)) or 'none'}."
            )
        if not all(isinstance(value, int) and 0 <= value < 2**16 for value in values):
            refuse(f"values in masks are whole numbers from 0 to 65,535, not {values}.")

    @classmethod
    def create(
        cls,
        name: str,
        classes: int | Sequence[str],
        method: Method,
        *,
        extends: Sequence[str] = (),
        kind: str = "classification",
        values: Sequence[int] | None = None,
        ignore: int = IGNORED,
    ) -> TaskSpec:
        """A spec in which everything that was not given is what the kind of task needs."""
        names = class_names(classes)
        per_pixel = kind in KINDS and KINDS[kind].per_pixel
        if values is None:
            values = range(len(names)) if per_pixel else ()
        parents = tuple(dict.fromkeys(extends))
        return cls(name, names, kind, method, parents, tuple(values), ignore)

    def fitted(self, backbone: BackboneShape, class_init: str = "backbone") -> TaskSpec:
        """The spec for a backbone: the method's settings that depend on it are fitted, checked."""
        shape = self.shape(backbone, class_init)
        try:
            method = self.method.fitted(shape)
            method.check_task(shape)
        except EngramError as error:
            raise EngramError(f"Task {self.name!r}: {error}") from None
        return replace(self, method=method)

    def recorded(self) -> dict[str, Any]:
        """The fields that a file has: those of the kind of task and of its method."""
        fields = {
            "name": self.name,
            "classes": self.classes,
            "kind": self.kind,
            "regime": self.regime,
            **self.method.settings(),
            "extends": self.extends,
        }
        if self.kind_object.per_pixel:
            fields |= {"values": self.values, "ignore": self.ignore}
        return fields

    def shape(self, backbone: BackboneShape, class_init: str = "backbone") -> TaskShape:
        per_pixel = self.kind_object.per_pixel
        return TaskShape(backbone, len(self.classes), len(self.extends), per_pixel, class_init)

    def shapes(self, backbone: BackboneShape) -> dict[str, tuple[int, ...]]:
        """The shape of every trained tensor by name, without a backbone of the task's own."""
        with torch.device("meta"):  # no memory and no random numbers
            kind = self.kind_object
            head = kind.head_class(self.head_config(backbone), kind.fitted)
        shape = self.shape(backbone)
        parameters = self.method.fitted(shape).parameters(shape)
        return {
            **{f"head.{name}": tuple(one.shape) for name, one in head.named_parameters()},
            **{name: one.shape for name, one in parameters.items()},
        }

    def head_config(self, backbone: BackboneShape) -> HeadSizes:
        method = self.method
        shape = self.shape(backbone)
        rows = method.fitted(shape).head_rows(shape)
        return HeadSizes(self.features(backbone), rows, method.mlp_head, method.streams)

    def statistics(self, backbone: BackboneShape) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of class statistics, by name."""
        groups = self.kind_object.groups(len(self.classes))
        return statistics_shapes(groups, self.features(backbone))

    def sums(self, backbone: BackboneShape) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of feature sums, by name."""
        return sums_shapes(len(self.classes), self.features(backbone))

    def features(self, backbone: BackboneShape) -> int:
        """The width of the head's input: of the image, or of every patch in segmentation."""
        shape = self.shape(backbone)
        return self.method.fitted(shape).features(shape)

    @property
    def regime(self) -> str:
        return self.method.name

    @property
    def kind_object(self) -> Kind:
        return KINDS[self.kind]


def check_name(name: str) -> None:
    """Refuse a name that no task can have."""
    if not NAME.fullmatch(name) or name == Base.name:
        raise EngramError(
            f"{name!r} cannot name a task: use 1 to 64 of a-z, 0-9, '.', '_' and '-', beginning "
            f"with a letter or a digit, and not {Base.name!r}, which is the backbone itself."
        )


def class_names(classes: int | Sequence[str]) -> tuple[str, ...]:
    if isinstance(classes, str):
        raise EngramError(f"classes is the text {classes!r}; give a number or a list of names.")
    if isinstance(classes, Integral):  # numpy's numbers too
        return tuple(str(i) for i in range(int(classes)))
    if not isinstance(classes, Iterable):
        raise EngramError(f"classes is {classes!r}; give a whole number or a list of names.")
    return tuple(map(str, classes))


def check_shared_pass(one: TaskSpec, other: TaskSpec) -> None:
    """Refuse two tasks of which one changes the backbone's own tokens."""
    for alone in (one, other):
        if not alone.method.shares_pass:
            raise EngramError(
                f"{alone.name!r} has the regime {alone.regime!r}, which changes the backbone's own "
                f"tokens, so {one.name!r} and {other.name!r} cannot share a pass; keep them apart, "
                "in a MemoryViT or a bundle each, or train with the regime masked."
            )
