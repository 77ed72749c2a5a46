"""Engrams on disk: one safetensors file a task, written atomically, verified when read.

The file's metadata holds two texts: `engram`, a JSON header, and `sha256`, the hash of that
header. The header's `content` is a SHA-256 over the tensors and over everything else that decides
what the task answers; a child names its parents by it. Nothing here can run code.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from engram.errors import EngramError
from engram.images import Preprocessing
from engram.regimes import TaskSpec
from engram.vit import ViT, tensors_hash

if TYPE_CHECKING:
    from engram.regimes import Task

FORMAT = 1
_MOST_HEADER = 50_000_000  # bytes; 100,000 classes with long names need a tenth of it


@dataclass(frozen=True)
class TrunkInfo:
    """Which trunk a task was trained on, and its shape, so that costs are known without it."""

    source: str
    fingerprint: str
    antialias: bool
    image_size: tuple[int, int]
    patch: int
    width: int
    depth: int
    heads: int
    mlp_width: int
    prefix: int


def describe_trunk(trunk: ViT) -> TrunkInfo:
    config = trunk.config
    return TrunkInfo(
        source=trunk.source,
        fingerprint=trunk.fingerprint,
        antialias=config.antialias,
        image_size=config.image_size,
        patch=config.patch,
        width=config.width,
        depth=config.depth,
        heads=config.heads,
        mlp_width=config.mlp_width,
        prefix=config.prefix,
    )


@dataclass(frozen=True)
class Engram:
    """One task as its file holds it."""

    spec: TaskSpec
    tensors: Mapping[str, Tensor]
    trunk: TrunkInfo
    preprocessing: Preprocessing | None
    parents: Mapping[str, str]  # name -> content
    metrics: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""
    library: str = ""

    @property
    def content(self) -> str:
        """What the task answers, as a hash: all that decides it, and nothing else."""
        decides = {key: self.header()[key] for key in ("format", "task", "trunk", "preprocessing")}
        decides["trunk"] = self.trunk.fingerprint
        decides["parents"] = dict(self.parents)
        text = json.dumps(decides, sort_keys=True) + tensors_hash(dict(self.tensors))
        return hashlib.sha256(text.encode()).hexdigest()

    def header(self) -> dict[str, Any]:
        """The JSON header, without `content`."""
        spec = asdict(self.spec)
        return {
            "format": FORMAT,
            "task": {**spec, "classes": list(self.spec.classes), "extends": list(self.parents)},
            "parents": dict(self.parents),
            "trunk": {**asdict(self.trunk), "image_size": list(self.trunk.image_size)},
            "preprocessing": self.preprocessing and self.preprocessing.to_dict(),
            "metrics": _json_safe(self.metrics),
            "recipe": _json_safe(self.recipe),
            "created": self.created,
            "library": self.library,
        }

    @property
    def parameters(self) -> int:
        """How many numbers the task learned."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    def check_trunk(self, trunk: TrunkInfo, preprocessing: Preprocessing | None) -> None:
        """Refuse another trunk, or other pixels, than the task was trained with."""
        name = self.spec.name
        if trunk.fingerprint != self.trunk.fingerprint:
            raise EngramError(
                f"The engram {name!r} was trained on {self.trunk.source} (fingerprint "
                f"{self.trunk.fingerprint[:12]}), but this trunk is {trunk.source} "
                f"({trunk.fingerprint[:12]}); load the trunk it was trained on."
            )
        if preprocessing != self.preprocessing:
            raise EngramError(
                f"The engram {name!r} was trained with the preprocessing "
                f"{_show(self.preprocessing)}, but this trunk has {_show(preprocessing)}; load the "
                "trunk with preprocessing=engram.inspect(FILE).preprocessing."
            )
        resized = preprocessing is not None and preprocessing.size != trunk.image_size
        if resized and trunk.antialias != self.trunk.antialias:
            raise EngramError(
                f"The engram {name!r} was trained with antialias={self.trunk.antialias} when "
                f"position embeddings are resized, but this trunk has {trunk.antialias}; load the "
                f"trunk with antialias={self.trunk.antialias}."
            )

    def fill(self, task: Task) -> None:
        """Put the tensors into a task of the same spec."""
        self._check_tensors({name: tuple(p.shape) for name, p in task.named_parameters()})
        with torch.no_grad():
            for name, parameter in task.named_parameters():
                parameter.copy_(self.tensors[name])

    def _check_tensors(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        found = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        for name in sorted(set(found) | set(expected)):
            if found.get(name) != expected.get(name):
                raise EngramError(
                    f"The engram {self.spec.name!r} holds the tensor {name} with shape "
                    f"{found.get(name, 'none')}, but its header asks for "
                    f"{expected.get(name, 'none')}; get a good copy of the file."
                )


def _show(preprocessing: Preprocessing | None) -> str:
    return "none" if preprocessing is None else json.dumps(preprocessing.to_dict())


def _json_safe(value: Any) -> Any:
    """Numbers that JSON lacks (NaN, infinity) become null; paths and tuples become texts, lists."""
    if isinstance(value, Mapping):
        return {str(key): _json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def expected_shapes(spec: TaskSpec, trunk: TrunkInfo) -> dict[str, tuple[int, ...]]:
    """The tensors of a task, known from its header alone (a `full` task's own trunk left out)."""
    parts, width = spec.parts, trunk.width
    shapes: dict[str, tuple[int, ...]] = {
        "head.weight": (len(spec.classes), width),
        "head.bias": (len(spec.classes),),
    }
    if parts.token:
        shapes["class_token"] = (spec.tokens, width)
    if parts.cells:
        layers = 1 if spec.update == "propagate" else trunk.depth
        shapes["cells"] = (layers, spec.cells, width)
    if parts.mlp:
        shapes["head.hidden.weight"], shapes["head.hidden.bias"] = (width, width), (width,)
    if parts.adapters:
        shapes["adapters.down"] = (trunk.depth, 2, width, spec.adapter_width)
        shapes["adapters.up"] = (trunk.depth, 2, spec.adapter_width, width)
    return shapes


# Writing


def new_engram(
    spec: TaskSpec,
    tensors: Mapping[str, Tensor],
    *,
    trunk: ViT,
    parents: Mapping[str, str],
    metrics: Mapping[str, Any] | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> Engram:
    """An engram of this moment, made by this library."""
    from engram import __version__

    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Engram(
        spec,
        {name: tensor.detach().cpu().float().contiguous() for name, tensor in tensors.items()},
        describe_trunk(trunk),
        trunk.preprocessing,
        parents,
        metrics or {},
        recipe or {},
        now,
        f"engram-vit {__version__}",
    )


def write_engram(path: str | Path, engram: Engram) -> Path:
    """Write an engram atomically: the path holds the old file or all of the new one."""
    bad = [name for name, tensor in engram.tensors.items() if not bool(tensor.isfinite().all())]
    if bad:
        raise EngramError(
            f"The task {engram.spec.name!r} has values that are not finite in {', '.join(bad)}; "
            "nothing was written. A lower learning rate usually helps."
        )
    header = json.dumps({**engram.header(), "content": engram.content}, allow_nan=False)
    metadata = {"engram": header, "sha256": hashlib.sha256(header.encode()).hexdigest()}
    write_atomically(path, safetensors.torch.save(dict(engram.tensors), metadata))
    return Path(path)


def write_atomically(path: str | Path, data: bytes) -> None:
    """A temporary file in the same folder, fsync, rename; a failure leaves what was there."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise EngramError(
            f"{path} cannot be written ({error.strerror or error}); check the folder, its "
            "permissions and the free space. What was there is unchanged."
        ) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


# Reading


def read_engram(path: str | Path) -> Engram:
    """Read and verify an engram: structure, shapes, types, finiteness, hashes. See `Engram`."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            metadata = _metadata(path, file.read(8), file.read)
            file.seek(0)
            data = file.read()
    except OSError as error:
        raise EngramError(
            f"{path} cannot be read ({error.strerror or error}); give the path of an engram, a "
            ".safetensors file that `engram fit` or model.save wrote."
        ) from None
    header = _header(path, metadata)
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        raise _damaged(path, f"its tensors cannot be read ({error})") from None
    engram = _parse(path, header, tensors)
    if engram.content != header["content"]:
        raise _damaged(
            path,
            f"its header says its content is {str(header['content'])[:12]}, but the content is "
            f"{engram.content[:12]}",
        )
    return engram


def _damaged(path: Path, what: str) -> EngramError:
    return EngramError(f"{path} is damaged: {what}. Get a good copy of the file.")


def _metadata(path: Path, length: bytes, read: Any) -> Mapping[str, Any]:
    """The metadata of a safetensors file, before any of its tensors is touched."""
    size = int.from_bytes(length, "little")
    text = read(size) if len(length) == 8 and size <= _MOST_HEADER else b""
    try:
        metadata = json.loads(text).get("__metadata__", {}) if len(text) == size else None
    except (ValueError, AttributeError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict):
        raise EngramError(
            f"{path} is not a safetensors file, or it is cut short; give an engram, a "
            ".safetensors file that `engram fit` or model.save wrote."
        )
    if "engram" not in metadata:
        raise EngramError(
            f"{path} is a safetensors file but not an engram (it has no engram header); if it is "
            "a trunk, load it with load_trunk or give it with --backbone."
        )
    return metadata


def _header(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    text, told = metadata["engram"], metadata.get("sha256")
    found = hashlib.sha256(str(text).encode(errors="replace")).hexdigest()
    if found != told:
        raise _damaged(path, f"its header hashes to {found[:12]}, not to {str(told)[:12]}")
    try:
        header = json.loads(text)
        version = header["format"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _damaged(path, "its header is not the JSON of an engram") from None
    if version != FORMAT:
        raise EngramError(
            f"{path} has the format {version!r}, and this version of engram reads format {FORMAT}; "
            "install a newer engram-vit."
        )
    assert isinstance(header, dict)
    return header


def _parse(path: Path, header: dict[str, Any], tensors: Mapping[str, Tensor]) -> Engram:
    try:
        task = dict(header["task"])
        task["classes"], task["extends"] = tuple(task["classes"]), tuple(task["extends"])
        trunk = dict(header["trunk"])
        trunk["image_size"] = tuple(trunk["image_size"])
        preprocessing = header["preprocessing"]
        engram = Engram(
            spec=TaskSpec(**_typed(TaskSpec, task)),
            tensors=tensors,
            trunk=TrunkInfo(**_typed(TrunkInfo, trunk)),
            preprocessing=preprocessing and Preprocessing.from_dict(preprocessing),
            parents=dict(header["parents"]),
            metrics=dict(header["metrics"]),
            recipe=dict(header["recipe"]),
            created=str(header["created"]),
            library=str(header["library"]),
        )
    except EngramError as error:
        raise _damaged(path, f"its header makes no sense: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"its header lacks or garbles a field ({error})") from None
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise _damaged(path, f"the tensor {name} is {tensor.dtype}, not torch.float32")
        if not bool(tensor.isfinite().all()):
            raise _damaged(path, f"the tensor {name} holds values that are not finite")
    own = {n: t for n, t in tensors.items() if not (engram.spec.parts.trunk and n[:6] == "trunk.")}
    Engram._check_tensors(
        Engram(engram.spec, own, engram.trunk, None, {}), expected_shapes(engram.spec, engram.trunk)
    )
    return engram


def _typed(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a dataclass's fields, of the very types that its defaults and names promise."""
    types = {"int": int, "str": str, "bool": bool, "Update": str}
    parts = {"tuple[str, ...]": str, "tuple[int, int]": int}
    for item in fields(kind):
        value, name = values[item.name], str(item.type)
        right: bool = type(value) is types.get(name, tuple)
        if right and name in parts:
            right = all(type(part) is parts[name] for part in value)
        if not right:
            raise TypeError(f"{item.name} is {value!r}")
    unknown = set(values) - {item.name for item in fields(kind)}
    if unknown:
        raise TypeError(f"unknown fields {', '.join(sorted(unknown))}")
    return values
