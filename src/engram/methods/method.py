"""A method: the code that teaches a task beside a frozen backbone, and what it must say of itself.

Everything that differs between methods is in their classes; other modules ask the method of a task
and never look at its name. A method is a frozen dataclass whose fields are its settings: flags of
the command line, fields of an engram's header and rows of the documentation at once.

One pass goes like this. The tasks of a family join (`SharedPassMethod.join`): what depends on no
image is stacked, once for as many passes as no parameter changes. For every batch of images that
gives a `Branch`, whose `layer` is called with the backbone's normed tokens at every layer, live or
from a cache, and whose `head_inputs` ends the pass. `docs/own-method.md` writes one step by step.

Axes, in this folder: b images, n tokens of the backbone, D their width, l layers, t tasks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Flag, auto
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from engram.backbones.shape import BackboneShape
from engram.errors import EngramError
from engram.util.settings import check
from engram.util.tensors import to_device
from engram.vit import ViT

if TYPE_CHECKING:
    from engram.methods.attention_maps import AttentionMaps
    from engram.methods.memory import BackboneView, Streams
    from engram.methods.routing import Route


class Needs(Flag):
    """Features of the backbone that a method reads beside its pooled token, which caches keep."""

    POOLED = 0
    STATISTICS = auto()  # layer statistics (readout.py)
    FINAL = auto()  # the final normed tokens
    LAYERS = auto()  # the normed tokens of every layer


@dataclass(frozen=True)
class TaskShape:
    """All that the shapes of a task's parameters depend on, beside its method's settings."""

    backbone: BackboneShape
    classes: int
    parents: int = 0  # tasks that it extends
    per_pixel: bool = False  # the head answers for every pixel (segmentation)
    class_init: str = "backbone"  # where class tokens start: there, or at random


@dataclass(frozen=True)
class Initial:
    """The shape of a parameter, and the value it starts from: N(0, std^2), then `then`."""

    shape: tuple[int, ...]
    std: float = 0.0  # 0: zeros
    then: Callable[[Tensor, ViT], None] | None = None  # writes into what was drawn

    def draw(self, backbone: ViT) -> Tensor:
        value = torch.randn(self.shape) * self.std if self.std else torch.zeros(self.shape)
        value = value.to(backbone.device, backbone.dtype)
        if self.then is not None:
            with torch.no_grad():
                self.then(value, backbone)
        return value


@dataclass(frozen=True)
class TaskInput:
    """One task as it joins a pass."""

    name: str
    method: Method
    tensors: Mapping[str, Tensor]  # its trained parameters, without the head's
    extends: tuple[str, ...] = ()  # earlier tasks of the pass
    per_pixel: bool = False


@dataclass(frozen=True)
class Patches:
    """The last layer's patch tokens after the final norm, and the size that answers have."""

    tokens: Tensor  # (b, rows * columns, D)
    grid: tuple[int, int]
    size: tuple[int, int]  # height, width


@dataclass(frozen=True)
class HeadInput:
    """The input of a task's head."""

    own: Tensor  # the task's own tokens (b, k, D), or one vector (b, features)
    patches: Patches | None = None
    raw: Tensor | None = None  # of the backbone's own head: its last tokens before the norm

    def map(self, change: Callable[[Tensor], Tensor]) -> HeadInput:
        """Apply a function to every tensor, such as the selection of rows."""
        patches, raw = self.patches, self.raw
        if patches is not None:
            patches = replace(patches, tokens=change(patches.tokens))
        return HeadInput(change(self.own), patches, None if raw is None else change(raw))


@dataclass(frozen=True, eq=False)
class Batch:
    """The images of a pass: their (height, width), where they are, and what each asks for."""

    backbone: ViT
    size: tuple[int, int]
    device: torch.device
    route: Route | None = None  # None: every task for every image

    def rows(self, name: str) -> Tensor:
        """The images that the route asks a task for, as an index."""
        assert self.route is not None
        return to_device(torch.tensor(self.route.rows[name]), self.device)


@dataclass(frozen=True, eq=False)
class Cached:
    """Features of the backbone for a batch that are there, as far as they are needed."""

    pooled: Tensor | None = None  # (b, D)
    layers: Sequence[BackboneView] = ()
    final: Tensor | None = None  # the final normed tokens (b, n, D)
    statistics: Tensor | None = None  # all layer statistics (b, features)
    raw: Tensor | None = None  # the last tokens before the final norm (b, n, D)
    streams: Mapping[str, Tensor] | None = None  # those of tasks (b, k, D)


class Features:
    """Features of the backbone once the last layer is done, each computed when first asked for."""

    def __init__(self, batch: Batch, cached: Cached) -> None:
        self.batch, self.statistics = batch, cached.statistics
        self._raw, self._tokens, self._pooled = cached.raw, cached.final, cached.pooled

    @property
    def raw(self) -> Tensor:
        """The last layer's tokens before the final norm: (b, n, D)."""
        assert self._raw is not None, "a cache keeps no tokens before the final norm"
        return self._raw

    @property
    def tokens(self) -> Tensor:
        """The final normed tokens: (b, n, D)."""
        if self._tokens is None:
            self._tokens = self.batch.backbone.norm(self.raw)
        return self._tokens

    @property
    def pooled(self) -> Tensor:
        """The pooled token: (b, D)."""
        if self._pooled is None:
            self._pooled = self.batch.backbone.pool(self.tokens)
        return self._pooled

    @property
    def patches(self) -> Patches:
        """The patches among the final tokens, which come behind all others."""
        size = self.batch.size
        rows, columns = (side // self.batch.backbone.config.patch for side in size)
        n = self.tokens.shape[1]
        return Patches(self.tokens[:, n - rows * columns :], (rows, columns), size)

    def patches_for(self, task: TaskInput) -> Patches | None:
        """The patches, for a task that answers for every pixel."""
        return self.patches if task.per_pixel else None


class Branch(ABC):
    """The tasks of one family in one pass."""

    #: The optional entry of class tokens that go through the layers themselves, beside a backbone
    #: that runs alone or, outside of training, shares its matrix products with them. `final` is
    #: then set to their last tokens (b, s, D).
    streams: Sequence[Streams] = ()
    final: Sequence[Tensor] = ()
    #: The tasks that it was started for, parents first.
    tasks: Sequence[TaskInput]
    #: Whether autograd records what it computes.
    trains = False
    #: The tasks whose head inputs are wanted; others are there because these extend them.
    asked: Collection[str] | None = None  # None: all
    #: Whether its batch has a route: the head inputs have only rows of the images that asked then.
    routed = False

    @property
    def reads_layers(self) -> bool:
        """Whether `layer` has to be called."""
        return type(self).layer is not Branch.layer

    def last_tokens(self, n: int) -> int:
        """Number of the last layer's n tokens that the head inputs need, from the first on."""
        return n

    def layer(self, index: int, tokens: Tensor) -> None:  # noqa: B027
        """Read the backbone's normed tokens (b, n, D) of a layer; the final ones are the last."""

    @abstractmethod
    def head_inputs(self, features: Features) -> dict[str, HeadInput]:
        """Head inputs by task, once every layer is done."""


#: Joined tasks: starts the branch of a batch.
Joined = Callable[[Batch], Branch]


@dataclass(frozen=True)
class Method(ABC):
    """A way to teach a task: a `SharedPassMethod` or an `OwnPassMethod`.

    Subclasses are dataclasses; their fields are the settings.
    """

    name: ClassVar[str]  # the regime
    about: ClassVar[str]  # what trains, in a few words
    shares_pass: ClassVar[bool]
    #: The head is solved from all images at once, not trained in steps (but per pixel it is).
    solved: ClassVar[bool] = False
    #: Solving a head stays near the one that the task starts with.
    keeps_start: ClassVar[bool] = False
    #: It learns from good images alone (one-class classification): for kinds of task that do so.
    one_class: ClassVar[bool] = False
    #: Made by `auto` from other tasks, and not trained by itself.
    composed: ClassVar[bool] = False
    #: An MLP in place of a linear head.
    mlp_head: ClassVar[bool] = False
    #: Whether the head can answer for every pixel.
    answers_pixels: ClassVar[bool] = True
    #: Whether its tasks have class tokens that go through the layers (`Branch.streams`); in
    #: segmentation one for every class, which the head reads.
    streams: ClassVar[bool] = False
    #: Whether its branches compute for each image only the tasks that `Batch.route` asks for.
    routes: ClassVar[bool] = False
    #: Whether tasks can extend others of the same family.
    extendable: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs.POOLED
    #: Parameters that files hold in half precision; they have to be rounded in memory as well.
    half: ClassVar[frozenset[str]] = frozenset()
    #: Learning rates that suit it, by optimiser.
    rates: ClassVar[Mapping[str, float]] = {"adamw": 1e-3, "sgd": 0.1}

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def family(cls) -> type[Method]:
        """The class whose tasks join together: the one that `join` is inherited from."""
        return next((one for one in cls.__mro__ if "join" in vars(one)), cls)

    @classmethod
    def setting_names(cls) -> tuple[str, ...]:
        return tuple(item.name for item in fields(cls))

    @property
    def reads_grid(self) -> bool:
        """Whether the layer statistics that it needs include the grids."""
        return False

    def settings(self) -> dict[str, Any]:
        """The settings by name, as a file holds them."""
        return {name: getattr(self, name) for name in self.setting_names()}

    def fitted(self, task: TaskShape) -> Method:
        """The method with every setting filled in that depends on the task."""
        return self

    def check_task(self, task: TaskShape) -> None:
        """Refuse a task that it cannot teach; a sentence as an EngramError."""
        if task.per_pixel and not self.answers_pixels:
            raise EngramError(
                f"the regime {self.name!r} sees averages over the patches, so it cannot answer "
                "for every pixel; choose side or masked."
            )
        if task.parents and not self.extendable:
            raise EngramError(
                f"its regime is {self.name!r}, whose tasks extend no others; choose masked, "
                "masked+adapter or side, or leave extends out."
            )

    def check_parent(self, parent: Method) -> None:
        """Refuse a parent that its tasks cannot extend; a sentence as an EngramError."""
        if parent.family() is not self.family() or not parent.extendable:
            raise EngramError(
                f"its regime is {self.name!r} and that of the other {parent.name!r}; tasks extend "
                "those of the same family, as masked tasks extend masked ones and side tasks side "
                "ones"
            )

    def check_backbone(self, backbone: ViT) -> None:  # noqa: B027
        """Refuse a backbone that its tasks cannot read; a sentence as an EngramError."""

    def concatenates(self, other: Method) -> bool:
        """Whether cells of both can be concatenated without a mask (the paper's section 4.4)."""
        return False

    def parameters(self, task: TaskShape) -> dict[str, Initial]:
        """Shapes and initial values of what it trains beside the head, by name."""
        return {}

    def own_backbone(self, backbone: ViT) -> ViT | None:
        """The copy of the backbone that trains with the task, if there is one."""
        return None

    def backbone_parameters(self, backbone: BackboneShape) -> int:
        """Number of trained parameters in a backbone of the task's own."""
        return 0

    def features(self, task: TaskShape) -> int:
        """The width of the head's input: of an image, or of every patch in segmentation."""
        return task.backbone.width

    def head_rows(self, task: TaskShape) -> int:
        """The rows of the head's weight: one a class, or one for each patch of a memory bank."""
        return task.classes

    def macs(self, task: TaskShape, n: int, ancestors: Sequence[Method]) -> tuple[int, int]:
        """Multiply-accumulates for an image of n tokens, and those that depend on no image.

        Without the head, beyond the plain pass.
        """
        return 0, 0

    def details(self) -> list[tuple[str, str]]:
        """The settings for people, such as ("cells per layer", "5")."""
        return [
            (item.metadata.get("label") or item.name.replace("_", " "), str(value))
            for item in fields(self)
            if (value := getattr(self, item.name)) != item.default or item.metadata.get("label")
        ]

    def average(
        self, tasks: Sequence[Mapping[str, Tensor]], shares: Sequence[float]
    ) -> tuple[Method, dict[str, Tensor]]:
        """The weighted mean of tasks of this method, from all their tensors: method and tensors."""
        return self, {
            name: torch.stack(
                [share * task[name].double() for task, share in zip(tasks, shares, strict=True)]
            )
            .sum(0)
            .to(torch.float16 if name in self.half else torch.float32)
            for name in tasks[0]
        }

    def attention_maps(
        self, tasks: Sequence[TaskInput], task: TaskInput, backbone: ViT, pixels: Tensor
    ) -> AttentionMaps:
        """Attention maps of a task; by default those of the backbone's own class token.

        `tasks` are the task and all it extends, parents first.
        """
        from engram.methods.attention_maps import first_token_maps

        return first_token_maps(backbone, pixels, task.name, {})


@dataclass(frozen=True)
class SharedPassMethod(Method):
    """A method that leaves the backbone's tokens as they are: its tasks share one pass with all."""

    shares_pass: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def join(cls, tasks: Sequence[TaskInput], backbone: ViT) -> Joined:
        """Stack all that depends on no image; the result starts the branch of a batch.

        It is kept for later passes as long as no parameter changes, so it must not depend on a
        batch. `tasks` are of one family, parents before children.
        """

    def head_input(self, task: TaskInput, own: HeadInput, features: Features) -> HeadInput:
        """The head input of a task, from its `own`: what the branch of its family gave it.

        With a route, that has rows of the images that asked for the task.
        """
        return own


@dataclass(frozen=True)
class OwnPassMethod(Method):
    """A method that changes the backbone's own tokens: each of its tasks has a pass of its own."""

    shares_pass: ClassVar[bool] = False

    @abstractmethod
    def own_pass(
        self, tasks: Sequence[TaskInput], task: TaskInput, backbone: ViT, pixels: Tensor
    ) -> HeadInput:
        """The head input of a task; `tasks` are all attached ones."""


def parameter_count(shapes: Mapping[str, Initial]) -> int:
    return sum(math.prod(one.shape) for one in shapes.values())


# Multiply-accumulates (MACs) of a ViT's parts: matrix products, the patch embedding and attention;
# norms, softmax and activations are left out, as is usual. A layer costs a token its projections
# and its MLP (12 D^2 where the MLP is 4 D wide) and 2 D for every key it reads.


def token_macs(backbone: BackboneShape) -> int:
    """One layer, for one token, without attention."""
    gates = 2 if backbone.activation == "swiglu" else 1
    return 4 * backbone.width**2 + (gates + 1) * backbone.width * backbone.mlp_width


def layers_macs(backbone: BackboneShape, tokens: int) -> int:
    """All layers, for tokens that all read each other."""
    return backbone.depth * (tokens * token_macs(backbone) + 2 * tokens**2 * backbone.width)


def keys_values_macs(backbone: BackboneShape, cells: int) -> int:
    """Keys and values of the cells of all layers."""
    return 2 * cells * backbone.width**2 * backbone.depth
