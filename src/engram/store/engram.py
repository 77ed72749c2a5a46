"""Engrams on disk: one safetensors file a task, written atomically, verified when read.

The file's metadata holds two texts: `engram`, a JSON header, and `sha256`, the hash of that
header. The header's `content` is a SHA-256 over the tensors and over everything else that decides
what the task answers; a child names its parents by it. Nothing here can run code.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import io
import json
import math
import os
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor

from engram.errors import EngramError
from engram.images.images import Preprocessing
from engram.tasks.costs import Shape, shape_of
from engram.tasks.kinds import IGNORED, KINDS
from engram.tasks.regimes import TaskSpec
from engram.vit import ViT, tensors_hash

if TYPE_CHECKING:
    from engram.tasks.regimes import Task

FORMAT = 1
_MOST_HEADER = 50_000_000  # bytes; 100,000 classes with long names need a tenth of it
_MOST_DEPTH = 100  # of lists and objects in the header
_MASKS = ("values", "ignore")  # what only the header of a task that learns from masks has


@dataclass(frozen=True)
class TrunkInfo(Shape):
    """Which trunk a task was trained on, and its shape, so that costs are known without it."""

    heads: int
    source: str
    fingerprint: str
    antialias: bool  # when position embeddings are resized


def describe_trunk(trunk: ViT) -> TrunkInfo:
    return TrunkInfo(
        **vars(shape_of(trunk)),
        heads=trunk.config.heads,
        source=trunk.source,
        fingerprint=trunk.fingerprint,
        antialias=trunk.config.antialias,
    )


@dataclass(frozen=True, repr=False, eq=False)
class Engram:
    """One task as its file holds it. Printed, it says what the task is."""

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
        header = self.header()
        decides = {key: header[key] for key in ("format", "task", "preprocessing", "parents")}
        decides["trunk"] = self.trunk.fingerprint
        text = json.dumps(decides, sort_keys=True) + tensors_hash(dict(self.tensors))
        return hashlib.sha256(text.encode()).hexdigest()

    def header(self) -> dict[str, Any]:
        """The JSON header, without `content`."""
        spec = {**asdict(self.spec), "extends": list(self.parents)}
        for name in _MASKS if not self.spec.does.per_pixel else ():
            del spec[name]
        spec = {name: list(v) if isinstance(v, tuple) else v for name, v in spec.items()}
        return {
            "format": FORMAT,
            "task": spec,
            "parents": dict(self.parents),
            "trunk": {
                **asdict(self.trunk),
                "image_size": list(self.trunk.image_size),
                "source": utf8(self.trunk.source).decode(),
            },
            "preprocessing": self.preprocessing and self.preprocessing.to_dict(),
            "metrics": _json_safe(self.metrics),
            "recipe": _json_safe(self.recipe),
            "created": self.created,
            "library": self.library,
        }

    def renamed(self, name: str) -> Engram:
        """The same task under another name (and so with another content)."""
        return replace(self, spec=replace(self.spec, name=name))

    @property
    def parameters(self) -> int:
        """How many numbers the task learned."""
        found = {f"head.{name}" for name in self.spec.does.settled}
        return sum(tensor.numel() for name, tensor in self.tensors.items() if name not in found)

    def __str__(self) -> str:
        spec, trunk = self.spec, self.trunk
        made = " ".join(part for part in (self.created, self.library) if part)
        return "\n".join(
            shown(line, 400)
            for line in (
                f"engram {spec.name}: {spec.kind}, {few(spec.classes, nouns=spec.does.nouns)}",
                f"  regime   {regime_words(spec)}, {self.parameters:,} parameters",
                f"  trunk    {trunk.source}, fingerprint {trunk.fingerprint[:12]}",
                f"  content  {self.content[:12]}" + (f", {made}" if made else ""),
            )
        )

    def __repr__(self) -> str:
        return f"<Engram {self.spec.name!r}, {self.spec.regime}, content {self.content[:12]}>"

    def check_trunk(self, trunk: TrunkInfo, preprocessing: Preprocessing | None) -> None:
        """Refuse another trunk, or other pixels, than the task was trained with."""
        name = self.spec.name
        if trunk.fingerprint != self.trunk.fingerprint:
            raise EngramError(
                f"The engram {name!r} was trained on {shown(self.trunk.source)} (fingerprint "
                f"{self.trunk.fingerprint[:12]}), but this trunk is {trunk.source} "
                f"({trunk.fingerprint[:12]}); load the trunk it was trained on."
            )
        for item in fields(TrunkInfo):  # the same tensors can be read in more than one way
            ours, theirs = getattr(self.trunk, item.name), getattr(trunk, item.name)
            if item.name not in ("source", "antialias") and ours != theirs:
                raise EngramError(
                    f"The engram {name!r} was trained on a trunk with {item.name} "
                    f"{shown(str(ours))}, but {trunk.source} has {item.name} {theirs}; load the "
                    "trunk as it was when the engram was made."
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
        places = task.tensors()  # detached, but the same storage
        wrong = _wrong_tensor(self.tensors, {n: tuple(p.shape) for n, p in places.items()})
        if wrong:
            raise EngramError(f"The engram {self.spec.name!r} does not fit: {wrong}.")
        with torch.no_grad():
            for name, place in places.items():
                place.copy_(self.tensors[name])


def _wrong_tensor(
    tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]
) -> str | None:
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(set(found) | set(expected)):
        if found.get(name) != expected.get(name):
            return (
                f"the tensor {name} has the shape {found.get(name, 'none')}, but its header asks "
                f"for {expected.get(name, 'none')}"
            )
    return None


def few(names: Sequence[str], most: int = 5, nouns: tuple[str, str] = ("class", "classes")) -> str:
    """How many classes (or what `nouns` calls them), and what the first are called."""
    more = ", …" if len(names) > most else ""
    count = f"1 {nouns[0]}" if len(names) == 1 else f"{len(names):,} {nouns[1]}"
    return f"{count} ({', '.join(names[:most])}{more})"


def regime_words(spec: TaskSpec) -> str:
    words = [spec.regime]
    if spec.parts.cells:
        words.append(f"{spec.cells} cells a layer" + (" after the norm" if spec.after_norm else ""))
    if spec.update != "fresh":
        words.append(f"update {spec.update}")
    if spec.tokens > 1:
        words.append(f"{spec.tokens} class tokens")
    if spec.parts.adapters:
        words.append(f"adapters of width {spec.adapter_width}")
    if spec.extends:
        words.append(f"extends {', '.join(spec.extends)}")
    return ", ".join(words)


def shown(text: str, most: int = 120) -> str:
    """What a file says, safe to print: one line, no control characters, not without end."""
    text = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def without_folder(source: str) -> str:
    """The last part of a path: where it lies on this machine is nobody else's business."""
    return os.path.basename(source.rstrip("/")) if os.path.isabs(source) else source


def _show(preprocessing: Preprocessing | None) -> str:
    return "none" if preprocessing is None else json.dumps(preprocessing.to_dict())


def _json_safe(value: Any) -> Any:
    """Numbers that JSON lacks (NaN, infinity) become null; paths and tuples become texts, lists."""
    if isinstance(value, Mapping):
        return {utf8(str(key)).decode(): _json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int)) else utf8(str(value)).decode()


def utf8(text: str) -> bytes:
    """A file's name may be any bytes: what is no UTF-8, a surrogate in a str, is spelled out."""
    return text.encode(errors="backslashreplace")


def expected_shapes(spec: TaskSpec, trunk: TrunkInfo) -> dict[str, tuple[int, ...]]:
    """The tensors of a task, known from its header alone (a `full` task's own trunk left out)."""
    parts, width = spec.parts, trunk.width
    classes = len(spec.classes)
    head = spec.does.head_shapes(width, classes, mlp=parts.mlp, masked=parts.masked)
    shapes = {f"head.{name}": shape for name, shape in head.items()}
    shapes |= {f"head.{name}": (classes,) for name in spec.does.settled}
    if parts.token:
        shapes["class_token"] = (spec.tokens, width)
    if parts.cells:
        layers = 1 if spec.update == "propagate" else trunk.depth
        shapes["cells"] = (layers, spec.cells, width)
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
    write_atomically(path, as_bytes(engram))
    return Path(path)


def as_bytes(engram: Engram) -> bytes:
    """An engram as its file holds it, always the same bytes; refused if a number is not finite."""
    bad = [name for name, tensor in engram.tensors.items() if not bool(tensor.isfinite().all())]
    if bad:
        raise EngramError(
            f"The task {engram.spec.name!r} has values that are not finite in {', '.join(bad)}; "
            "nothing was written. A lower learning rate usually helps."
        )
    header = json.dumps({**engram.header(), "content": engram.content}, allow_nan=False)
    metadata = {"engram": header, "sha256": hashlib.sha256(header.encode()).hexdigest()}
    data = safetensors.torch.save(dict(engram.tensors), metadata)
    size = 8 + int.from_bytes(data[:8], "little")
    inside = json.loads(data[8:size])  # the library puts metadata in another order every time
    inside["__metadata__"] = metadata
    text = json.dumps(inside, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[size:]


def write_atomically(path: str | Path, data: bytes) -> None:
    """A temporary file in the same folder, fsync, rename; a failure leaves what was there."""
    target = Path(os.path.realpath(path))  # through a link, to the file it means
    _refuse_no_file(path, target)
    temporary = target.with_name(f".engram-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise EngramError(
            f"{path} cannot be written ({error.strerror or error}); check the folder, its "
            "permissions and the free space. What was there is unchanged."
        ) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    sync_folder(target.parent)


def _refuse_no_file(path: str | Path, target: Path) -> None:
    """A rename would put a file in the place of a folder, a pipe or a device."""
    if os.path.exists(target) and not os.path.isfile(target):  # which take any name
        what = "a folder" if os.path.isdir(target) else "no usual file"
        raise EngramError(f"{path} cannot be written (it is {what}); choose another place.")


def check_writable(path: str | Path, other: str = "place", parents: bool = False) -> None:
    """That a file can be written there later; if not, an EngramError now that asks for another.

    With `parents`, folders that are missing are made.
    """
    target = Path(os.path.realpath(path))
    _refuse_no_file(path, target)
    try:
        if parents:
            target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise EngramError(
            f"{path} cannot be written ({error.strerror or error}); choose another {other}."
        ) from None


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last, where the system lets a folder be synchronised."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# Reading


def read_engram(path: str | Path) -> Engram:
    """Read and verify an engram: structure, shapes, types, finiteness, hashes. See `Engram`."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # a folder, or a pipe that never ends
            raise EngramError(f"{path} is not a file; give an engram, a .safetensors file.")
        with open(path, "rb") as file:
            _metadata(path, file.read(8), file.read)
            file.seek(0)
            data = file.read()
    except OSError as error:
        raise EngramError(
            f"{path} cannot be read ({error.strerror or error}); give the path of an engram, a "
            ".safetensors file that `engram fit` or model.save wrote."
        ) from None
    except (MemoryError, ValueError) as error:  # larger than memory; a path with a zero byte
        raise EngramError(f"{path} cannot be read ({error or 'it is too large'}).") from None
    return parse_engram(data, path)


def parse_engram(data: bytes, path: str | Path) -> Engram:
    """The same for the bytes of a file; `path` is what the sentences call it."""
    path, stream = Path(path), io.BytesIO(data)
    header = _header(path, _metadata(path, stream.read(8), stream.read))
    try:
        tensors = safetensors.torch.load(data)
    except Exception as error:  # whatever the library makes of damage
        raise _damaged(path, f"its tensors cannot be read ({error})") from None
    engram = _parse(path, header, tensors)
    if engram.content != header["content"]:
        raise _damaged(
            path,
            f"its header says its content is {str(header['content'])[:12]}, but the content is "
            f"{engram.content[:12]}",
        )
    return engram


def is_engram(path: str | Path) -> bool:
    """Whether a file says that it is an engram; whether it is a good one, `read_engram` tells."""
    try:
        with open(path, "rb") as file:
            _metadata(Path(path), file.read(8), file.read)
    except (OSError, ValueError, EngramError):
        return False
    return True


def _damaged(path: Path, what: str) -> EngramError:
    return EngramError(
        f"{path} is damaged: {shown(what, 300).rstrip('.')}. Get a good copy of the file."
    )


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
    found = hashlib.sha256(str(text).encode(errors="backslashreplace")).hexdigest()
    if found != told:
        raise _damaged(path, f"its header hashes to {found[:12]}, not to {str(told)[:12]}")
    try:
        header = json.loads(text)
        version = header["format"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _damaged(path, "its header is not the JSON of an engram") from None
    if type(version) is not int or _deeper_than(_MOST_DEPTH, header):
        raise _damaged(path, "its header names no format, or nests too deeply")
    try:
        json.dumps(header, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # it could neither be printed nor sent anywhere
        raise _damaged(path, "its header holds what is no text in UTF-8") from None
    if version != FORMAT:
        raise EngramError(
            f"{path} has the format {shown(str(version))}, and this version of engram reads format "
            f"{FORMAT}; install a newer engram-vit."
        )
    assert isinstance(header, dict)
    return header


def _deeper_than(most: int, value: Any) -> bool:
    level = [value]
    for _ in range(most):
        inside = [list(v.values()) if isinstance(v, dict) else v for v in level]
        level = [part for item in inside if isinstance(item, list) for part in item]
    return bool(level)


def _parse(path: Path, header: dict[str, Any], tensors: Mapping[str, Tensor]) -> Engram:
    try:
        task = dict(header["task"])
        if str(task["kind"]) in KINDS and KINDS[task["kind"]].per_pixel:
            task["values"] = tuple(task["values"])
        else:
            task = {"values": (), "ignore": IGNORED} | task
        task["classes"], task["extends"] = tuple(task["classes"]), tuple(task["extends"])
        trunk = dict(header["trunk"])
        trunk["image_size"] = tuple(trunk["image_size"])
        engram = Engram(
            spec=TaskSpec(**_typed(TaskSpec, task)),
            tensors=tensors,
            trunk=TrunkInfo(**_typed(TrunkInfo, trunk)),
            preprocessing=_preprocessing(header["preprocessing"]),
            parents=_parents(header["parents"], task["extends"]),
            metrics=dict(header["metrics"]),
            recipe=dict(header["recipe"]),
            created=str(header["created"]),
            library=str(header["library"]),
        )
        _hash(header["content"], "content")
        _hash(engram.trunk.fingerprint, "fingerprint")
        expected = expected_shapes(engram.spec, engram.trunk)
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
    wrong = _wrong_tensor(own, expected)
    if wrong:
        raise _damaged(path, wrong)
    return engram


def _preprocessing(value: Any) -> Preprocessing | None:
    if value is None:
        return None
    preprocessing = Preprocessing.from_dict(dict(value))
    whole = (*preprocessing.size, preprocessing.resize or 1)
    real = (*preprocessing.mean, *preprocessing.std)
    if not all(type(number) is int for number in whole) or not all(
        type(number) in (int, float) and math.isfinite(number) for number in real
    ):
        raise TypeError(f"preprocessing is {value!r}")
    return preprocessing


def _parents(value: Any, extends: Sequence[Any]) -> dict[str, str]:
    """Parents by content, in the order in which the task extends them."""
    if type(value) is not dict or sorted(value) != sorted(extends):
        raise TypeError(f"it extends {list(extends)!r}, but its parents are {value!r}")
    return {name: _hash(value[name], "parent") for name in extends}


def _hash(value: Any, what: str) -> str:
    if type(value) is not str or not re.fullmatch(r"[0-9a-f]{64}", value):
        raise TypeError(f"{what} is {value!r}")
    return value


def _typed(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a dataclass's fields, of the very types that its defaults and names promise."""
    types = {"int": int, "str": str, "bool": bool, "Update": str}
    parts = {"tuple[str, ...]": str, "tuple[int, ...]": int, "tuple[int, int]": int}
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
