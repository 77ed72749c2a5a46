"""Running exported files: both kinds are engines, as the model itself is."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram.errors import EngramError
from engram.util.optional import require
from engram.util.text import first_line

INPUT = "pixels"
KEY = "engram"  # of the metadata in an ONNX file; in a .pt2 it is the file engram.json


class OnnxModel:
    """An exported ONNX file that can be run.

    Args:
        path: The file, or its bytes.
        threads: CPU threads. By default as many as torch uses.

    Attributes:
        tasks: The names of the outputs.
        about: The file's metadata: preprocessing, backbone, and each task with its classes.

    Raises:
        EngramError: `engram export` did not write the file, or onnxruntime is not installed.

    Examples:
        >>> exported = engram.export.OnnxModel("model.onnx")
        >>> exported.tasks
        ('base', 'flowers')
    """

    def __init__(self, path: str | Path | bytes, threads: int | None = None) -> None:
        require("onnxruntime", extra="export", purpose="Running an ONNX file")
        source = path if isinstance(path, bytes) else os.fspath(path)
        name = "The exported graph" if isinstance(path, bytes) else str(path)
        if isinstance(source, str) and not os.path.isfile(source):
            raise EngramError(f"{name} does not exist; `engram export` writes such a file.")
        try:
            self._session = open_session(source, threads)
            metadata = self._session.get_modelmeta().custom_metadata_map
            self.about: dict[str, Any] = json.loads(metadata[KEY])
            self.tasks: tuple[str, ...] = tuple(self.about["tasks"])
        except Exception as error:  # onnxruntime raises many types for a bad file
            raise EngramError(
                f"{name} is not an ONNX file that `engram export` wrote ({first_line(error)})."
            ) from None

    def run(self, pixels: Tensor, tasks: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Compute the logits.

        Args:
            pixels: Normalised images, float (batch, 3, height, width).
            tasks: The outputs to return. By default all of them.

        Returns:
            The logits by task; "base" is the backbone's own head.
        """
        names = list(self.tasks if tasks is None else dict.fromkeys(tasks))
        for name in names:
            if name not in self.tasks:
                raise EngramError(f"There is no {name!r} in this file: {', '.join(self.tasks)}.")
        array = pixels.detach().cpu().float().contiguous().numpy()
        arrays = self._session.run(names, {INPUT: array})
        return {name: torch.from_numpy(logits) for name, logits in zip(names, arrays, strict=True)}


class TorchProgram:
    """An exported .pt2 file that can be run."""

    def __init__(self, path: Path) -> None:
        self._program = torch.export.load(path).module()

    def run(self, pixels: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        outputs = self._program(pixels)
        return {name: outputs[name] for name in tasks}


def open_session(source: str | bytes, threads: int | None = None) -> Any:
    """onnxruntime on a file or its bytes; by default with as many threads as torch uses."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def require_onnx() -> None:
    """Refuse with a sentence if a package that ONNX export needs is missing."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, extra="export", purpose="ONNX export")
