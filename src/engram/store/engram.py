"""An engram: what one task learned, and what is needed to attach it (`store.format` has the file).

Its `content` is a SHA-256 over the tensors and everything else that determines the outputs of the
task. A task that extends others records their contents.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engram.backbones.load import check_dtype, load_backbone
from engram.backbones.shape import MAX_PATCHES, BackboneShape, can_be_cut
from engram.errors import EngramError, flag
from engram.images.preprocessing import Preprocessing
from engram.tasks.class_statistics import HALF, PREFIX
from engram.tasks.feature_sums import DOUBLE, FeatureSums
from engram.tasks.spec import TaskSpec, check_shared_pass
from engram.util.documents import jsonable
from engram.util.hub import PathOrHubId
from engram.util.tensors import tensors_hash
from engram.util.text import printable, summarise_names, utf8
from engram.vit import ViT
from engram.vit.vit import Stored

if TYPE_CHECKING:
    from engram.tasks.task import Task

#: The version of the format of engrams and bundles.
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
            **vars(BackboneShape.measure(backbone)),
            heads=backbone.config.heads,
            source=backbone.source,
            fingerprint=backbone.fingerprint,
            antialias=backbone.config.antialias,
            dtype=backbone.stored,
        )


@dataclass(frozen=True, repr=False, eq=False)
class Engram:
    """The file of one task in memory. `str` of it is a short summary."""

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
        return {
            "format": FORMAT,
            "task": jsonable({**self.spec.recorded(), "extends": list(self.parents)}),
            "parents": dict(self.parents),
            "preprocessing": self.preprocessing and self.preprocessing.to_dict(),
        }

    def header(self) -> dict[str, Any]:
        """The JSON header of the file, without `content`."""
        known = self._identity()
        preprocessing = known.pop("preprocessing")
        backbone = asdict(self.backbone)
        for name, default in (("dtype", "fp32"), ("pooler", False)):
            if backbone[name] == default:
                del backbone[name]
        return {
            **known,
            "backbone": jsonable(backbone, _utf8_text),
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
        """The fields of the header that are no part of its content."""
        return {n: getattr(self, n) for n in ("metrics", "recipe", "created", "library")}

    def renamed(self, name: str) -> Engram:
        """The task under another name (and so with another content)."""
        return replace(self, spec=replace(self.spec, name=name))

    @property
    def has_statistics(self) -> bool:
        """Whether it has class statistics of its training images."""
        return any(name.startswith(PREFIX) and name not in DOUBLE for name in self.tensors)

    @property
    def has_sums(self) -> bool:
        """Whether it has feature sums, so that it can learn more images, and forget some."""
        return any(name in DOUBLE for name in self.tensors)

    @property
    def sums(self) -> FeatureSums:
        return FeatureSums(*(self.tensors[name] for name in DOUBLE))

    @property
    def without_statistics(self) -> dict[str, Tensor]:
        """The tensors that decide the outputs: all but the statistics of its training images."""
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
        dtype = f", in {backbone.dtype}" if backbone.dtype != "fp32" else ""
        origin = " ".join(filter(None, (self.created, self.library)))
        lines = (
            f"engram {spec.name}: {spec.kind}, {classes}",
            f"  regime   {summarise_regime(spec)}, {self.parameters:,} parameters",
            f"  backbone {backbone.source}, fingerprint {backbone.fingerprint[:12]}{dtype}",
            f"  content  {self.content[:12]}" + (f", {origin}" if origin else ""),
        )
        return "\n".join(printable(line, 400) for line in lines)

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
        found = self.difference(backbone, preprocessing)
        if found:
            name, (trained, load) = self.spec.name, found
            raise EngramError(
                f"The engram {name!r} was trained {trained}; load the backbone {load}."
            )

    def difference(
        self, backbone: BackboneInfo, preprocessing: Preprocessing | None
    ) -> tuple[str, str] | None:
        """The difference of its training from these, and what to load; None if there is none."""
        own = self.backbone
        if backbone.fingerprint != own.fingerprint:
            return (
                f"on {printable(own.source)} (fingerprint {own.fingerprint[:12]}), and not on "
                f"{printable(backbone.source)} ({backbone.fingerprint[:12]})"
            ), "it was trained on"
        for item in fields(BackboneInfo):  # the same tensors can be read in more than one way
            ours, theirs = getattr(own, item.name), getattr(backbone, item.name)
            if item.name not in ("source", "antialias", "dtype") and ours != theirs:
                return (
                    f"on a backbone with {item.name} {printable(str(ours))}, and "
                    f"{printable(backbone.source)} has {item.name} {printable(str(theirs))}"
                ), "as it was when the engram was made"
        if preprocessing != self.preprocessing:
            both = [p and json.dumps(p.to_dict()) for p in (self.preprocessing, preprocessing)]
            return (
                f"with the preprocessing {both[0] or 'none'}, and not with {both[1] or 'none'}"
            ), "with preprocessing=engram.inspect(FILE).preprocessing"
        resized = preprocessing is not None and preprocessing.size != backbone.image_size
        if resized and backbone.antialias != own.antialias:
            how = f"with antialias={own.antialias}"
            return f"{how} when position embeddings are resized", how
        return None

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
        if self.has_sums:
            task.sums = FeatureSums.empty(len(self.spec.classes), task.head.in_features)
        targets = task.tensors()  # detached, but the same storage
        mismatch = shape_mismatch(self.tensors, {n: tuple(t.shape) for n, t in targets.items()})
        if mismatch:
            raise EngramError(f"The engram {self.spec.name!r} does not fit: {mismatch}.")
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(self.tensors[name])


def stored_dtype(spec: TaskSpec, name: str) -> torch.dtype:
    """The type that a tensor of a task has in a file."""
    if name in DOUBLE:
        return torch.float64
    return torch.float16 if name in HALF or name in spec.method.half else torch.float32


def shape_mismatch(
    tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]
) -> str | None:
    """The first tensor whose shape is not as expected, as part of a sentence; None if all fit."""
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(set(found) | set(expected)):
        if found.get(name) != expected.get(name):
            return (
                f"the tensor {name} has the shape {found.get(name, 'none')}, and "
                f"{expected.get(name, 'none')} is needed"
            )
    return None


def summarise_regime(spec: TaskSpec) -> str:
    parts = [spec.regime, *(f"{label} {value}" for label, value in spec.method.details())]
    if spec.extends:
        parts.append(f"extends {', '.join(spec.extends)}")
    return ", ".join(parts)


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
    """An engram of freshly trained or converted tensors, made now, in the precision of the file."""
    stored = {
        name: tensor.detach().to("cpu", stored_dtype(spec, name)).contiguous()
        for name, tensor in tensors.items()
    }
    return Engram(
        spec, stored, BackboneInfo.from_backbone(backbone), backbone.preprocessing, parents,
        _without_long_lists(metrics or {}), _without_long_lists(recipe or {}), **origin(),
    )  # fmt: skip


def origin() -> dict[str, Any]:
    """The fields of a header that say when and by which version it was made: now, by this one."""
    from engram import __version__

    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"created": now, "library": f"engram-vit {__version__}"}


# Engrams that fit together: one backbone, one preprocessing, and the parents that they extend

Located = tuple[str, Engram]  # where an engram was found, for errors, and the engram


def in_order(found: Sequence[Located]) -> tuple[Engram, ...]:
    """The engrams, parents first, after checking everything that needs no backbone."""
    if not found:
        raise EngramError("There are no engrams; give at least one file or bundle.")
    by_name: dict[str, Located] = {}
    for where, engram in found:
        other_place, other = by_name.setdefault(engram.spec.name, (where, engram))
        if other.content != engram.content:
            raise EngramError(
                f"{other_place} and {where} are both called {engram.spec.name!r} but differ "
                f"(content {other.content[:12]} and {engram.content[:12]}); leave one out."
            )
    (first_place, first), *rest = by_name.values()
    for where, engram in rest:
        check_same_backbone(first_place, first, where, engram, "share a pass")
        check_shared_pass(first.spec, engram.spec)
    for where, engram in by_name.values():
        for parent, content in engram.parents.items():
            if parent not in by_name:
                raise EngramError(
                    f"{where} extends {parent!r} (content {content[:12]}), which is not among the "
                    "engrams given; add its file."
                )
            place, given = by_name[parent]
            if given.content != content:
                raise EngramError(
                    f"{where} extends a {parent!r} with the content {content[:12]}, but {place} "
                    f"has {given.content[:12]}; give the one it was trained with."
                )
    ordered: dict[str, Engram] = {}
    while len(ordered) < len(by_name):  # no cycles: a content includes those of the parents
        for name, (_, engram) in by_name.items():
            if engram.parents.keys() <= ordered.keys():
                ordered.setdefault(name, engram)
    return tuple(ordered.values())


def check_same_backbone(
    place: str, engram: Engram, where: str, other: Engram, purpose: str
) -> None:
    """Refuse two engrams of different backbones or preprocessings; `purpose` says for what."""
    found = other.difference(engram.backbone, engram.preprocessing)
    if found:
        raise EngramError(
            f"{where} was trained {found[0]}, as {place} was; engrams {purpose} only on the same "
            "backbone, with the same preprocessing."
        )


def load_engram_backbone(engram: Engram, backbone: PathOrHubId | None, dtype: str = "fp32") -> ViT:
    """Load the backbone as it was in training; `backbone` is its path or Hub id if it moved."""
    info = engram.backbone
    check_dtype(dtype)
    try:
        return load_backbone(
            info.source if backbone is None else backbone,
            preprocessing=engram.preprocessing,
            antialias=info.antialias,
            heads=info.heads,
            activation=info.activation,
            dtype=dtype,
        )
    except EngramError as error:
        if backbone is not None:
            raise
        raise EngramError(
            f"{error} The engram {engram.spec.name!r} names {printable(info.source)!r} as its "
            f"backbone; give its path or Hub id with {flag('backbone')}."
        ) from None
