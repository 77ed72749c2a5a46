"""An engram: what one task learned, and what is needed to attach it (`store.format` has the file).

Its `content` is a SHA-256 over the tensors and everything else that determines the outputs of the
task. A task that extends others records their contents.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engram.backbones.shape import MAX_PATCHES, BackboneShape, can_be_cut
from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing
from engram.tasks.class_statistics import HALF, PREFIX
from engram.tasks.spec import TaskSpec
from engram.util.documents import jsonable
from engram.util.flag_names import flag
from engram.util.tensors import tensors_hash
from engram.util.text import printable, summarise_names, utf8
from engram.vit import ViT
from engram.vit.vit import Stored

if TYPE_CHECKING:
    from engram.tasks.task import Task

#: The version of the format, and that of files which the first cannot have: with statistics, or
#: with one of these fields of a task, which it has only where they matter.
FORMAT = 1
#: The most values that the metrics of an engram may have, and so its recipe.
MAX_METRICS = 100_000
_LONG_LIST = 1_000  # longer ones in metrics and recipe are recorded as their length


@dataclass(frozen=True)
class BackboneInfo(BackboneShape):
    """The backbone that a task was trained on, with its shape, so that costs need no backbone."""

    heads: int
    source: str
    fingerprint: str
    antialias: bool  # of position embeddings, when they are resized
    dtype: Stored = "fp32"  # of its weights, while the task was trained

    @classmethod
    def from_backbone(cls, backbone: ViT) -> BackboneInfo:
        return cls(
            **vars(BackboneShape.of(backbone)),
            heads=backbone.config.heads,
            source=backbone.source,
            fingerprint=backbone.fingerprint,
            antialias=backbone.config.antialias,
            dtype=backbone.stored,
        )


@dataclass(frozen=True, repr=False, eq=False)
class Engram:
    """What is in the file of one task. `str` of it is a short summary."""

    spec: TaskSpec
    tensors: Mapping[str, Tensor]
    backbone: BackboneInfo
    preprocessing: Preprocessing | None
    parents: Mapping[str, str]  # the tasks that it extends: name -> content
    metrics: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""  # date and time
    library: str = ""  # name and version

    @property
    def content(self) -> str:
        """A hash of everything that determines the outputs of the task, and of nothing else."""
        hashed = {**self._identity(), "backbone": self.backbone.fingerprint}
        text = json.dumps(hashed, sort_keys=True) + tensors_hash(dict(self.tensors))
        return hashlib.sha256(text.encode()).hexdigest()

    def _identity(self) -> dict[str, Any]:
        """The fields of the header that determine the outputs of the task."""
        spec = {**self.spec.recorded(), "extends": list(self.parents)}
        return {
            "format": FORMAT,
            "task": {name: list(v) if isinstance(v, tuple) else v for name, v in spec.items()},
            "parents": dict(self.parents),
            "preprocessing": self.preprocessing and self.preprocessing.to_dict(),
        }

    def header(self) -> dict[str, Any]:
        """The JSON header of the file, without `content`."""
        known = self._identity()
        preprocessing = known.pop("preprocessing")
        backbone = asdict(self.backbone)
        if backbone["dtype"] == "fp32":
            del backbone["dtype"]
        return {
            **known,
            "backbone": {
                **backbone,
                "image_size": list(self.backbone.image_size),
                "source": utf8(self.backbone.source).decode(),
            },
            "preprocessing": preprocessing,
            "metrics": jsonable(self.metrics, _utf8_text),
            "recipe": jsonable(self.recipe, _utf8_text),
            "created": self.created,
            "library": self.library,
        }

    @property
    def file_name(self) -> str:
        """The name of its file in a bundle or a Hub repository."""
        return f"{self.spec.name}.safetensors"

    def record(self) -> dict[str, Any]:
        """What it records about itself that is no part of its content."""
        return {n: getattr(self, n) for n in ("metrics", "recipe", "created", "library")}

    def renamed(self, name: str) -> Engram:
        """The same task under another name (and so with another content)."""
        return replace(self, spec=replace(self.spec, name=name))

    @property
    def has_statistics(self) -> bool:
        """Whether it says what its training images were like."""
        return any(name.startswith(PREFIX) for name in self.tensors)

    @property
    def without_statistics(self) -> dict[str, Tensor]:
        """What decides the outputs: the tensors, but for what it says of its training images."""
        return {name: t for name, t in self.tensors.items() if not name.startswith(PREFIX)}

    @property
    def parameters(self) -> int:
        """The number of parameters that were trained."""
        computed = {f"head.{name}" for name in self.spec.kind_object.fitted}
        learned = self.without_statistics.items()
        return sum(tensor.numel() for name, tensor in learned if name not in computed)

    def __str__(self) -> str:
        spec, backbone = self.spec, self.backbone
        classes = summarise_names(spec.classes, nouns=spec.kind_object.nouns)
        origin = " ".join(part for part in (self.created, self.library) if part)
        return "\n".join(
            printable(line, 400)
            for line in (
                f"engram {spec.name}: {spec.kind}, {classes}",
                f"  regime   {summarise_regime(spec)}, {self.parameters:,} parameters",
                f"  backbone {backbone.source}, fingerprint {backbone.fingerprint[:12]}"
                + (f", in {backbone.dtype}" if backbone.dtype != "fp32" else ""),
                f"  content  {self.content[:12]}" + (f", {origin}" if origin else ""),
            )
        )

    def __repr__(self) -> str:
        return f"<Engram {self.spec.name!r}, {self.spec.regime}, content {self.content[:12]}>"

    def check_image_size(self) -> None:
        """Refuse a preprocessing for images that the backbone cannot take."""
        patch = self.backbone.patch
        if self.preprocessing is not None and not can_be_cut(self.preprocessing.size, patch):
            height, width = self.preprocessing.size
            raise EngramError(
                f"The preprocessing has images of {height} x {width} pixels; height and width "
                f"must be multiples of the backbone's patch size {patch}, with at most "
                f"{MAX_PATCHES:,} patches."
            )

    def check_backbone(self, backbone: BackboneInfo, preprocessing: Preprocessing | None) -> None:
        """Refuse a backbone or a preprocessing that the task was not trained with."""
        name = self.spec.name
        if backbone.fingerprint != self.backbone.fingerprint:
            raise EngramError(
                f"The engram {name!r} was trained on {printable(self.backbone.source)} "
                f"(fingerprint {self.backbone.fingerprint[:12]}), but this backbone is "
                f"{backbone.source} ({backbone.fingerprint[:12]}); load the backbone it was "
                "trained on."
            )
        for item in fields(BackboneInfo):  # the same tensors can be read in more than one way
            ours, theirs = getattr(self.backbone, item.name), getattr(backbone, item.name)
            if item.name not in ("source", "antialias", "dtype") and ours != theirs:
                raise EngramError(
                    f"The engram {name!r} was trained on a backbone with {item.name} "
                    f"{printable(str(ours))}, but {backbone.source} has {item.name} {theirs}; load "
                    "the backbone as it was when the engram was made."
                )
        if preprocessing != self.preprocessing:
            raise EngramError(
                f"The engram {name!r} was trained with the preprocessing "
                f"{_json(self.preprocessing)}, but this backbone has {_json(preprocessing)}; load "
                "the backbone with preprocessing=engram.inspect(FILE).preprocessing."
            )
        resized = preprocessing is not None and preprocessing.size != backbone.image_size
        if resized and backbone.antialias != self.backbone.antialias:
            raise EngramError(
                f"The engram {name!r} was trained with antialias={self.backbone.antialias} when "
                f"position embeddings are resized, but this backbone has {backbone.antialias}; "
                f"load the backbone with antialias={self.backbone.antialias}."
            )

    def other_dtype(self, backbone: BackboneInfo) -> str | None:
        """A sentence if the weights of the backbone have another type than in training; or None."""
        if backbone.dtype == self.backbone.dtype:
            return None
        wanted = flag("backbone_dtype", self.backbone.dtype)
        return (
            f"The engram {self.spec.name!r} was trained on a backbone in {self.backbone.dtype}, "
            f"and here the backbone is in {backbone.dtype}: its answers differ a little from those "
            f"that were measured. {wanted}, where it can be given, loads the backbone as it was."
        )

    def fill(self, task: Task) -> None:
        """Copy the tensors into a task of the same spec."""
        if self.has_statistics:
            task.keep_statistics()
        targets = task.tensors()  # detached, but the same storage
        mismatch = shape_mismatch(self.tensors, {n: tuple(t.shape) for n, t in targets.items()})
        if mismatch:
            raise EngramError(f"The engram {self.spec.name!r} does not fit: {mismatch}.")
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(self.tensors[name])


def dtype_of(name: str) -> torch.dtype:
    """In which precision a file holds a tensor of this name."""
    return torch.float16 if name in HALF else torch.float32


def shape_mismatch(
    tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]
) -> str | None:
    """The first tensor whose shape is not as expected, as part of a sentence; None if all fit."""
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(set(found) | set(expected)):
        if found.get(name) != expected.get(name):
            return (
                f"the tensor {name} has the shape {found.get(name, 'none')}, but the header "
                f"requires {expected.get(name, 'none')}"
            )
    return None


# One line each, for people


def summarise_regime(spec: TaskSpec) -> str:
    """The regime of a task with its settings."""
    parts = [spec.regime, *(f"{label} {value}" for label, value in spec.method.details())]
    if spec.extends:
        parts.append(f"extends {', '.join(spec.extends)}")
    return ", ".join(parts)


def summarise_settings(spec: TaskSpec) -> str:
    """The settings of a task's method, as a cell of a table."""
    return ", ".join(f"{k} {v}" for k, v in spec.method.settings().items() if v) or "-"


def summarise_shape(shape: BackboneShape) -> str:
    """The sizes of a backbone."""
    return (
        f"width {shape.width}, {shape.depth} layers, patches of {shape.patch}, images of "
        f"{shape.image_size[0]} x {shape.image_size[1]}"
    )


def summarise_preprocessing(preprocessing: Preprocessing | None) -> str:
    """How images are prepared."""
    if preprocessing is None:
        return "unknown"
    height, width = preprocessing.size
    how = "squashed" if preprocessing.resize is None else f"cropped from {preprocessing.resize}"
    mean, std = (
        str(values[0]) if len(set(values)) == 1 else ", ".join(map(str, values))
        for values in (preprocessing.mean, preprocessing.std)
    )
    return f"{height} x {width}, {how}, {preprocessing.interpolation}, mean {mean}, std {std}"


def _json(preprocessing: Preprocessing | None) -> str:
    return "none" if preprocessing is None else json.dumps(preprocessing.to_dict())


def _utf8_text(value: object) -> str:
    return utf8(str(value)).decode()


def _without_long_lists(value: Any) -> Any:
    """Metrics or a recipe with long lists replaced by their length: names of unreadable images."""
    if isinstance(value, Mapping):
        return {key: _without_long_lists(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return len(value) if len(value) > _LONG_LIST else list(map(_without_long_lists, value))
    return value


def new_engram(
    spec: TaskSpec,
    tensors: Mapping[str, Tensor],
    *,
    backbone: ViT,
    parents: Mapping[str, str],
    metrics: Mapping[str, Any] | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> Engram:
    """An engram of freshly trained or converted tensors, with the current time and version.

    Args:
        spec: What the task is.
        tensors: What it learned. They are kept on the CPU, in the precision of the file.
        backbone: The backbone that it was trained on.
        parents: The tasks that it extends: name -> content.
        metrics: What was measured, by split.
        recipe: The settings of the training.
    """
    from engram import __version__

    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Engram(
        spec,
        {
            name: tensor.detach().to("cpu", dtype_of(name)).contiguous()
            for name, tensor in tensors.items()
        },
        BackboneInfo.from_backbone(backbone),
        backbone.preprocessing,
        parents,
        _without_long_lists(metrics or {}),
        _without_long_lists(recipe or {}),
        now,
        f"engram-vit {__version__}",
    )
