"""A model as one file for other programs: ONNX or torch.export, checked before it is kept.

The file answers for the trunk and all tasks at once, for any number of images. Keys and values of
cells depend on no image, so they are constants in it. What it needs to be used is inside: how
pictures become pixels, what the classes are called, which engrams it was made from.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from engram.errors import EngramError
from engram.export import standalone
from engram.export.graphs import INPUT, KEY, about, describe, onnx_graph, quiet, trace
from engram.export.quantise import quantised
from engram.export.runtime import (
    BATCHES,
    Answer,
    Change,
    OnnxModel,
    check_pixels,
    compare,
    require,
)
from engram.model import MemoryViT
from engram.util.files import check_writable, write_atomically

__all__ = ["Change", "Export", "OnnxModel", "check_pixels", "export_onnx", "export_torch"]

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}

#: How far a logit may be from the model's, as a share of the largest one (or of 1).
TOLERANCE = 1e-4
#: The same for int8, where rounding is the purpose: the error's length, as a share of the logits'.
INT8_TOLERANCE = 0.5

_MOST_BYTES = 2**31 - 2**24  # an ONNX file is one protobuf message


@dataclass(frozen=True)
class Export:
    """A file that was checked and kept."""

    path: Path
    format: str  # onnx or torch
    int8: bool
    bytes: int
    seconds: float
    changes: Mapping[str, Change]  # by task, on generated pictures
    script: Path | None  # predict.py, if it was written


def export_onnx(
    model: MemoryViT,
    path: str | Path,
    *,
    int8: bool = False,
    tasks: Sequence[str] | None = None,
    overwrite: bool = True,
) -> Export:
    """Write a model as ONNX, one output a task, with a small `predict.py` beside it.

    With `int8` the large products are computed with whole numbers. A file whose answers are not
    the model's is not kept. The model itself is left as it is.
    """
    began, path = time.monotonic(), Path(path)
    check_place(path, "onnx", overwrite)
    require("onnx", "onnxscript", "onnxruntime")
    names, pixels, expected = _asked(model, tasks)
    size = sum(p.numel() for p in model.parameters()) * 4
    if size > _MOST_BYTES:
        raise EngramError(
            f"The model has {size / 1e9:.1f} GB of weights, and an ONNX file holds at most 2 GB; "
            "export it as .pt2 instead."
        )
    proto = onnx_graph(model, names, pixels)
    data = proto.SerializeToString()
    changes = compare(OnnxModel(data).run, pixels, expected)
    _refuse(path, changes, int8=False)
    if int8:
        try:
            proto = quantised(proto, pixels, path.parent)
        except OSError as error:
            raise EngramError(
                f"{path} cannot be written ({error.strerror or error}); check the folder, its "
                "permissions and the free space. What was there is unchanged."
            ) from None
        describe(proto, about(model, names, int8=True))
        data = proto.SerializeToString()
        changes = compare(OnnxModel(data).run, pixels, expected)
        _refuse(path, changes, int8=True)
    write_atomically(path, data)
    script = _write_script(path)
    return Export(path, "onnx", int8, len(data), time.monotonic() - began, changes, script)


def export_torch(
    model: MemoryViT,
    path: str | Path,
    *,
    tasks: Sequence[str] | None = None,
    overwrite: bool = True,
) -> Export:
    """Write a model with torch.export, as a .pt2 that torch runs without this package."""
    began, path = time.monotonic(), Path(path)
    check_place(path, "torch", overwrite)
    names, pixels, expected = _asked(model, tasks)
    program = trace(model, names, pixels)
    buffer = io.BytesIO()
    with quiet():
        torch.export.save(
            program, buffer, extra_files={f"{KEY}.json": json.dumps(about(model, names))}
        )
        loaded = torch.export.load(io.BytesIO(buffer.getvalue())).module()
    changes = compare(cast("Answer", loaded), pixels, expected)
    _refuse(path, changes, int8=False)
    write_atomically(path, buffer.getvalue())
    size, seconds = len(buffer.getvalue()), time.monotonic() - began
    return Export(path, "torch", False, size, seconds, changes, None)


def check_place(path: Path, kind: str, overwrite: bool) -> None:
    """Refuse a place that a file of this format cannot be written to, before any work is done."""
    suffix = SUFFIXES[kind]
    if path.suffix != suffix:
        raise EngramError(
            f"{path} does not end in {suffix}; give -o a name such as model{suffix}, or choose "
            f"another format ({', '.join(f'{k}: {v}' for k, v in SUFFIXES.items())})."
        )
    if path.is_dir():
        raise EngramError(f"{path} is a folder; -o names the file to write.")
    if path.exists() and not overwrite:
        raise EngramError(
            f"{path} is there already; choose another -o, or replace it with --overwrite."
        )
    check_writable(path, other="-o", parents=True)


def _asked(
    model: MemoryViT, tasks: Sequence[str] | None
) -> tuple[list[str], Tensor, dict[str, Tensor]]:
    """The outputs' names, pictures to check them with, and what the model says about those."""
    names = model.output_names(tasks)
    if not names:
        raise EngramError("There is nothing to export: the trunk has no head, and no task is here.")
    if INPUT in names:
        raise EngramError(
            f"A task is called {INPUT!r}, which is what the exported file calls its input; save "
            "the task under another name (engram.inspect(FILE).renamed(NAME))."
        )
    position = model.trunk.position
    if position.dtype != torch.float32:
        raise EngramError(
            f"The model is in {position.dtype}, and files are written in torch.float32; cast it "
            "with model.float() first."
        )
    pixels = check_pixels(model.preprocessing, sum(BATCHES))
    with torch.inference_mode():
        expected = model(pixels.to(position.device), names)
    return names, pixels, {name: logits.cpu() for name, logits in expected.items()}


def _refuse(path: Path, changes: Mapping[str, Change], int8: bool) -> None:
    for name, change in changes.items():
        far = not change.relative <= INT8_TOLERANCE
        if not int8:
            far = not change.largest <= TOLERANCE * max(1.0, change.size)
        if far:
            what = "with int8, " if int8 else ""
            raise EngramError(
                f"The exported {name!r} does not answer as the model does: {what}its logits are "
                f"off by up to {change.largest:.2g} (the largest is {change.size:.2g}), so {path} "
                "was not written."
            )


def _write_script(path: Path) -> Path | None:
    """Put predict.py beside an ONNX file, unless somebody else's file or folder has that name."""
    text = Path(standalone.__file__).read_text(encoding="utf-8")
    script = path.with_name("predict.py")
    if script.exists():
        if not script.is_file():
            return None
        first = text.splitlines()[0]
        with open(script, encoding="utf-8", errors="replace") as file:
            if file.readline().rstrip("\n") != first:
                return None
    text = text.replace('MODEL = "model.onnx"', f"MODEL = {path.name!r}")
    write_atomically(script, text.encode())
    return script
