"""The file of an engram: safetensors, the same bytes for the same engram, verified when read.

The metadata of the file has two entries: `engram`, a JSON header, and `sha256`, the hash of that
header. Nothing in the file can run code.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import safetensors.torch
from torch import Tensor

from engram.backbones.shape import NUMBERS, rules
from engram.errors import EngramError, flag
from engram.images.preprocessing import SCHEMA as PREPROCESSING
from engram.images.preprocessing import Preprocessing
from engram.methods import create_method
from engram.store.engram import (
    FORMAT,
    MAX_METRICS,
    BackboneInfo,
    Engram,
    shape_mismatch,
    stored_dtype,
)
from engram.store.portable import without_local_paths
from engram.tasks.class_statistics import PREFIX
from engram.tasks.spec import TaskSpec
from engram.util.documents import parse_json, read_header
from engram.util.files import open_regular, write_atomically
from engram.util.schema import Array, FreeObject, Integer, Invalid, Nullable, Object, String
from engram.util.text import printable

_VALUES = Integer(0, 65_535)  # of masks
HASH = String(pattern="[0-9a-f]{64}", about="a SHA-256 hash")
_TASK = Object(
    {
        **dict.fromkeys(("name", "kind", "regime"), String()),
        **dict.fromkeys(("classes", "extends"), Array(String())),
    },
    {"values": Array(_VALUES), "ignore": _VALUES},
    others=True,  # settings of the method, which checks them
)
_VERSION = Object({"format": Integer(0, 1_000_000)}, others=True)
#: The header of an engram. `TaskSpec` and `BackboneInfo` check what belongs together.
HEADER = Object(
    {
        "task": _TASK,
        "parents": FreeObject(10_000),
        "backbone": rules(BackboneInfo, NUMBERS | {"source": String(4_096), "fingerprint": HASH}),
        "preprocessing": Nullable(PREPROCESSING),
        **dict.fromkeys(("metrics", "recipe"), FreeObject(MAX_METRICS)),
        **dict.fromkeys(("created", "library"), String(200)),
        "content": HASH,
    },
    others=True,
)


def check_free(path: Path, overwrite: bool) -> None:
    """Refuse a path for an engram: a folder, another suffix, or without `overwrite` a file."""
    if path.is_dir():
        raise EngramError(f"{path} is a folder; {flag('out')} names the engram's file.")
    if path.suffix != ".safetensors":
        raise EngramError(
            f"An engram is a .safetensors file; give {flag('out')} a name such as "
            f"{path.with_suffix('.safetensors')}, not {path}."
        )
    if path.exists() and not overwrite:
        raise EngramError(
            f"{path} exists already; choose another {flag('out')}, or replace it with "
            f"{flag('overwrite', True)}."
        )


def write_engram(path: str | Path, engram: Engram) -> Path:
    """Write an engram atomically: after a crash there is the old file or all of the new one."""
    write_atomically(path, serialise_engram(engram))
    return Path(path)


def serialise_engram(engram: Engram) -> bytes:
    """The bytes of the file. An engram that could not be read again is an EngramError."""
    engram, _ = without_local_paths(engram, engram.backbone.source)  # load_model needs that path
    bad = [name for name, tensor in engram.tensors.items() if not bool(tensor.isfinite().all())]
    if bad:
        raise EngramError(
            f"The task {engram.spec.name!r} has values that are not finite in {', '.join(bad)}; "
            "nothing was written. A lower learning rate usually helps."
        )
    fields = {**engram.header(), "content": engram.content}
    header = json.dumps(fields, allow_nan=False)
    metadata = {"engram": header, "sha256": hashlib.sha256(header.encode()).hexdigest()}
    data = safetensors.torch.save(dict(engram.tensors), metadata)
    size = 8 + int.from_bytes(data[:8], "little")
    outer = json.loads(data[8:size])  # safetensors writes the metadata in a random order
    outer["__metadata__"] = metadata
    text = json.dumps(outer, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    try:
        HEADER.check(fields, "")
        engram.check_image_size()
        read_header(io.BytesIO(start))
    except (EngramError, ValueError) as error:
        reason = str(error).rstrip(".")
        raise EngramError(
            f"The task {engram.spec.name!r} cannot be saved: {reason}. Nothing was written."
        ) from None
    return start + data[size:]


def read_engram(path: str | Path) -> Engram:
    """Read and verify an engram, without its backbone. Printed, it says what the task is.

    Args:
        path: The file.

    Returns:
        The engram: its `spec`, `tensors`, `backbone`, `preprocessing`, `metrics` and `recipe`.

    Raises:
        EngramError: The file is missing, damaged or no engram. Structure, shapes, types, hashes
            and that all numbers are finite are checked.

    Examples:
        >>> what = engram.inspect("flowers.safetensors")
        >>> what.spec.name, what.spec.method.cells
        ('flowers', 5)
    """
    path = Path(path)
    try:
        with open_regular(path) as file:
            _metadata(path, file)  # before anything else is read: other files may be large
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
    path = Path(path)
    header = _header(path, _metadata(path, io.BytesIO(data)))
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
        with open_regular(path) as file:
            _metadata(Path(path), file)
    except (OSError, ValueError, EngramError):
        return False
    return True


def _damaged(path: Path, what: str) -> EngramError:
    return EngramError(
        f"{path} is damaged: {printable(what, 300).rstrip('.')}. Get a good copy of the file."
    )


def _metadata(path: Path, file: IO[bytes]) -> Mapping[str, Any]:
    """The metadata of a safetensors file, read before any tensor."""
    try:
        metadata = read_header(file).get("__metadata__", {})
        if not isinstance(metadata, dict):
            raise ValueError("its metadata are not an object")
    except ValueError as error:
        raise EngramError(
            f"{path} is not a safetensors file, or it is incomplete ({printable(str(error))}); "
            "give an engram, a .safetensors file that `engram fit` or model.save wrote."
        ) from None
    if "engram" not in metadata:
        raise EngramError(
            f"{path} is a safetensors file but not an engram (it has no engram header); if it is "
            f"a backbone, load it with load_backbone or give it with {flag('backbone')}."
        )
    return metadata


def _header(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON header, after checking its hash and format version."""
    text, expected = metadata["engram"], metadata.get("sha256")
    found = hashlib.sha256(str(text).encode(errors="backslashreplace")).hexdigest()
    if found != expected:
        raise _damaged(path, f"its header hashes to {found[:12]}, not to {str(expected)[:12]}")
    try:
        header = parse_json(str(text).encode())
        check_format(path, header)
    except ValueError:
        raise _damaged(path, "its header is not the JSON of an engram") from None
    return dict(header)


def check_format(path: Path, document: Any) -> None:
    """Refuse a header or a manifest of another version of the format."""
    _VERSION.check(document, "")
    if document["format"] != FORMAT:
        raise EngramError(
            f"{path} has the format {document['format']}, and this version of engram reads the "
            f"format {FORMAT}; install a newer version of Engram."
        )


def parse_header(path: Path, header: dict[str, Any], tensors: Mapping[str, Tensor]) -> Engram:
    """The engram of a decoded header and its tensors; errors call the file `path`."""
    try:
        HEADER.check(header, "")
        json.dumps({name: header[name] for name in HEADER.required}, ensure_ascii=False).encode()
        engram = _engram(header, tensors)
    except Invalid as error:
        raise _damaged(path, f"its header has a missing or invalid field ({error})") from None
    except UnicodeEncodeError:  # it could neither be printed nor sent
        raise _damaged(path, "its header holds text that UTF-8 cannot encode") from None
    except EngramError as error:
        raise _damaged(path, f"its header has invalid settings: {error}") from None
    problem = _tensor_problem(engram)
    if problem:
        raise _damaged(path, problem)
    return engram


def _engram(header: dict[str, Any], tensors: Mapping[str, Tensor]) -> Engram:
    """The engram that a header describes. Whatever does not belong together raises."""
    task, backbone = dict(header["task"]), dict(header["backbone"])
    own = {name: task.pop(name) for name in ("name", "kind", "regime", "ignore") if name in task}
    lists: dict[str, Any] = {
        name: tuple(task.pop(name, ())) for name in ("classes", "extends", "values")
    }
    method = create_method(own.pop("regime"), task)  # all that is left are its settings
    parents = header["parents"]
    if sorted(parents) != sorted(lists["extends"]):
        raise Invalid(f"it extends {len(lists['extends'])} tasks, but its parents are others")
    for name, content in parents.items():
        HASH.check(content, f"parents.{name}")
    preprocessing = header["preprocessing"]
    engram = Engram(
        spec=TaskSpec(**own, **lists, method=method),
        tensors=tensors,
        backbone=BackboneInfo(**{**backbone, "image_size": tuple(backbone["image_size"])}),
        preprocessing=None if preprocessing is None else Preprocessing.from_dict(preprocessing),
        parents={name: parents[name] for name in lists["extends"]},
        **{name: header[name] for name in ("metrics", "recipe", "created", "library")},
    )
    engram.check_image_size()
    spec = engram.spec
    for name in sorted(header["task"].keys() ^ spec.recorded().keys()):
        what = "is not a field" if name in header["task"] else "is missing from the fields"
        raise Invalid(f"task.{name} {what} of {spec.kind} with {spec.regime}")
    fitted = spec.fitted(engram.backbone).method.settings()
    for name, value in spec.method.settings().items():
        if value != fitted[name]:
            raise Invalid(f"task.{name} is {value!r}, and on this backbone it is {fitted[name]!r}")
    return engram


def _tensor_problem(engram: Engram) -> str | None:
    """The first tensor of another type or shape, or with values that it cannot have."""
    spec, tensors = engram.spec, engram.tensors
    expected = spec.shapes(engram.backbone)
    expected |= {f"head.{name}": (len(spec.classes),) for name in spec.kind_object.fitted}
    expected |= spec.statistics(engram.backbone) if engram.has_statistics else {}
    expected |= spec.sums(engram.backbone) if engram.has_sums else {}
    for name, tensor in tensors.items():
        dtype = stored_dtype(spec, name)
        if tensor.dtype != dtype:
            return f"the tensor {name} is {tensor.dtype}, not {dtype}"
        if not bool(tensor.isfinite().all()):
            return f"the tensor {name} holds values that are not finite"
    if spec.method.backbone_parameters(engram.backbone):
        tensors = {n: t for n, t in tensors.items() if not n.startswith("backbone.")}
    mismatch = shape_mismatch(tensors, expected)
    if mismatch:
        return mismatch
    if engram.has_statistics:
        counts, (low, middle) = tensors[f"{PREFIX}counts"], tensors[f"{PREFIX}quantiles"]
        possible = {
            "deviation": bool((tensors[f"{PREFIX}deviation"] > 0).all()),
            "counts": bool((counts >= 0).all()) and bool((counts > 0).any()),
            "quantiles": bool(low < middle),
        }
        for name in (name for name, good in possible.items() if not good):
            return f"the tensor {PREFIX}{name} has values that it cannot have"
    if engram.has_sums and not engram.sums.valid:
        return "its feature sums have values that they cannot have"
    return None
