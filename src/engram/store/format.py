"""The file of an engram: safetensors, the same bytes for the same engram, verified when read.

The metadata of the file has two entries: `engram`, a JSON header, and `sha256`, the hash of that
header. Nothing in the file can run code.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing
from engram.store.engram import FORMAT, Engram, TrunkInfo, shape_mismatch
from engram.tasks.kinds import IGNORED, KINDS
from engram.tasks.spec import TaskSpec
from engram.util.files import write_atomically
from engram.util.text import printable

_MAX_HEADER = 50_000_000  # bytes; 100,000 classes with long names need a tenth of it
_MAX_NESTING = 100  # of lists and objects in the header


def write_engram(path: str | Path, engram: Engram) -> Path:
    """Write an engram atomically: after a crash there is the old file or all of the new one."""
    write_atomically(path, serialise_engram(engram))
    return Path(path)


def serialise_engram(engram: Engram) -> bytes:
    """The bytes of the file. A tensor with values that are not finite is an EngramError."""
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
    outer = json.loads(data[8:size])  # safetensors writes the metadata in a random order
    outer["__metadata__"] = metadata
    text = json.dumps(outer, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[size:]


def read_engram(path: str | Path) -> Engram:
    """Read and verify an engram, without its trunk. Printed, it says what the task is.

    Args:
        path: The file.

    Returns:
        The engram: its `spec`, `tensors`, `trunk`, `preprocessing`, `metrics` and `recipe`.

    Raises:
        EngramError: The file is missing, damaged or no engram. Structure, shapes, types, hashes
            and that all numbers are finite are checked.

    Examples:
        >>> what = engram.inspect("flowers.safetensors")
        >>> what.spec.name, what.spec.cells
        ('flowers', 5)
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # a folder, or a pipe without an end
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
    """Parse and verify the bytes of a file; errors call it `path`. See `read_engram`."""
    path, stream = Path(path), io.BytesIO(data)
    header = _header(path, _metadata(path, stream.read(8), stream.read))
    try:
        tensors = safetensors.torch.load(data)
    except Exception as error:  # safetensors raises many types for damaged files
        raise _damaged(path, f"its tensors cannot be read ({error})") from None
    engram = parse_header(path, header, tensors)
    if engram.content != header["content"]:
        raise _damaged(
            path,
            f"its header says its content is {str(header['content'])[:12]}, but the content is "
            f"{engram.content[:12]}",
        )
    return engram


def is_engram(path: str | Path) -> bool:
    """Whether a file has the metadata of an engram. `read_engram` verifies the rest."""
    try:
        with open(path, "rb") as file:
            _metadata(Path(path), file.read(8), file.read)
    except (OSError, ValueError, EngramError):
        return False
    return True


def _damaged(path: Path, what: str) -> EngramError:
    return EngramError(
        f"{path} is damaged: {printable(what, 300).rstrip('.')}. Get a good copy of the file."
    )


def _metadata(path: Path, length: bytes, read: Any) -> Mapping[str, Any]:
    """The metadata of a safetensors file, read before any tensor.

    `length` is the first 8 bytes of the file, and `read` reads what follows.
    """
    size = int.from_bytes(length, "little")
    text = read(size) if len(length) == 8 and size <= _MAX_HEADER else b""
    try:
        metadata = json.loads(text).get("__metadata__", {}) if len(text) == size else None
    except (ValueError, AttributeError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict):
        raise EngramError(
            f"{path} is not a safetensors file, or it is incomplete; give an engram, a "
            ".safetensors file that `engram fit` or model.save wrote."
        )
    if "engram" not in metadata:
        raise EngramError(
            f"{path} is a safetensors file but not an engram (it has no engram header); if it is "
            "a trunk, load it with load_trunk or give it with --backbone."
        )
    return metadata


def _header(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON header, after checking its hash and format version."""
    text, expected = metadata["engram"], metadata.get("sha256")
    found = hashlib.sha256(str(text).encode(errors="backslashreplace")).hexdigest()
    if found != expected:
        raise _damaged(path, f"its header hashes to {found[:12]}, not to {str(expected)[:12]}")
    try:
        header = json.loads(text)
        version = header["format"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _damaged(path, "its header is not the JSON of an engram") from None
    if type(version) is not int or _is_deeper(_MAX_NESTING, header):
        raise _damaged(path, "its header has no format version, or is nested too deeply")
    try:
        json.dumps(header, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # it could neither be printed nor sent
        raise _damaged(path, "its header holds text that UTF-8 cannot encode") from None
    if version != FORMAT:
        raise EngramError(
            f"{path} has the format {printable(str(version))}, and this version of engram reads "
            f"format {FORMAT}; install a newer engram-vit."
        )
    assert isinstance(header, dict)
    return header


def _is_deeper(levels: int, value: Any) -> bool:
    """Whether lists and objects are nested deeper than this."""
    level = [value]
    for _ in range(levels):
        inside = [list(v.values()) if isinstance(v, dict) else v for v in level]
        level = [part for item in inside if isinstance(item, list) for part in item]
    return bool(level)


def parse_header(path: Path, header: dict[str, Any], tensors: Mapping[str, Tensor]) -> Engram:
    """The engram of a decoded header and its tensors; errors call the file `path`."""
    try:
        engram = _engram(header, tensors)
        expected = _expected_shapes(engram)
    except EngramError as error:
        raise _damaged(path, f"its header has invalid settings: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"its header has a missing or invalid field ({error})") from None
    _check_tensors(path, engram, expected)
    return engram


def _engram(header: dict[str, Any], tensors: Mapping[str, Tensor]) -> Engram:
    """The engram that a header describes. Whatever is wrong with a field raises."""
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
    return engram


def _check_tensors(path: Path, engram: Engram, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse tensors with another type or shape, or with values that are not finite."""
    tensors = engram.tensors
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise _damaged(path, f"the tensor {name} is {tensor.dtype}, not torch.float32")
        if not bool(tensor.isfinite().all()):
            raise _damaged(path, f"the tensor {name} holds values that are not finite")
    own = {n: t for n, t in tensors.items() if not (engram.spec.parts.trunk and n[:6] == "trunk.")}
    mismatch = shape_mismatch(own, expected)
    if mismatch:
        raise _damaged(path, mismatch)


def _expected_shapes(engram: Engram) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that the header requires, without a `full` task's own trunk."""
    spec = engram.spec
    computed = {f"head.{name}": (len(spec.classes),) for name in spec.does.settled}
    return spec.shapes(engram.trunk) | computed


def _preprocessing(value: Any) -> Preprocessing | None:
    if value is None:
        return None
    preprocessing = Preprocessing.from_dict(dict(value))
    integers = (*preprocessing.size, preprocessing.resize or 1)
    real = (*preprocessing.mean, *preprocessing.std)
    if not all(type(number) is int for number in integers) or not all(
        type(number) in (int, float) and math.isfinite(number) for number in real
    ):
        raise TypeError(f"preprocessing is {value!r}")
    return preprocessing


def _parents(value: Any, extends: Sequence[Any]) -> dict[str, str]:
    """The contents of the parents, in the order in which the task extends them."""
    if type(value) is not dict or sorted(value) != sorted(extends):
        raise TypeError(f"it extends {list(extends)!r}, but its parents are {value!r}")
    return {name: _hash(value[name], "parent") for name in extends}


def _hash(value: Any, what: str) -> str:
    if type(value) is not str or not re.fullmatch(r"[0-9a-f]{64}", value):
        raise TypeError(f"{what} is {value!r}")
    return value


def _typed(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Values for the fields of a dataclass, after checking that they have exactly its types."""
    types = {"int": int, "str": str, "bool": bool}
    parts = {"tuple[str, ...]": str, "tuple[int, ...]": int, "tuple[int, int]": int}
    for item in fields(kind):
        value, annotation = values[item.name], str(item.type)
        valid: bool = type(value) is types.get(annotation, tuple)
        if valid and annotation in parts:
            valid = all(type(part) is parts[annotation] for part in value)
        if not valid:
            raise TypeError(f"{item.name} is {value!r}")
    unknown = set(values) - {item.name for item in fields(kind)}
    if unknown:
        raise TypeError(f"unknown fields {', '.join(sorted(unknown))}")
    return values
