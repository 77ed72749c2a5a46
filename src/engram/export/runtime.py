"""Exported files at work: asked about pictures, and compared with the model they came from."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.data.scenes import draw_scenes
from engram.errors import EngramError
from engram.export.graphs import INPUT, KEY
from engram.images.preprocessing import Preprocessing, normalise
from engram.images.views import evaluation_view

BATCHES = (1, 3, 8)  # pictures, to see that any number of them gives the same answers

Answer = Callable[[Tensor], Mapping[str, Tensor]]


class OnnxModel:
    """An exported ONNX file, ready to answer; `about` is what it says of itself."""

    def __init__(self, path: str | Path | bytes, threads: int | None = None) -> None:
        require("onnxruntime")
        source = path if isinstance(path, bytes) else os.fspath(path)
        shown = "The exported graph" if isinstance(path, bytes) else str(path)
        if isinstance(source, str) and not os.path.isfile(source):
            raise EngramError(f"{shown} does not exist; `engram export` writes such a file.")
        try:
            self._session = open_session(source, threads)
            metadata = self._session.get_modelmeta().custom_metadata_map
            self.about: dict[str, Any] = json.loads(metadata[KEY])
            self.tasks: tuple[str, ...] = tuple(self.about["tasks"])
        except Exception as error:  # whatever the runtime makes of a bad file
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise EngramError(
                f"{shown} is not an ONNX file that `engram export` wrote ({reason})."
            ) from None

    def run(self, pixels: Tensor, tasks: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Logits by name, of `tasks` or of all. Pixels are (b, 3, height, width), normalised."""
        names = list(self.tasks if tasks is None else dict.fromkeys(tasks))
        for name in names:
            if name not in self.tasks:
                raise EngramError(f"There is no {name!r} in this file: {', '.join(self.tasks)}.")
        array = pixels.detach().cpu().float().contiguous().numpy()
        found = self._session.run(names, {INPUT: array})
        return {name: torch.from_numpy(logits) for name, logits in zip(names, found, strict=True)}


class TorchProgram:
    """An exported .pt2, ready to answer."""

    def __init__(self, path: Path) -> None:
        self._program = torch.export.load(path).module()

    def run(self, pixels: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        found = self._program(pixels)
        return {name: found[name] for name in tasks}


def open_session(source: str | bytes, threads: int | None = None) -> Any:
    """onnxruntime on a file or its bytes, with as many threads as torch has unless told."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def require(*packages: str) -> None:
    """Refuse with a sentence that names the extra when one of its packages is missing."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError:
            raise EngramError(
                f"ONNX needs the package {package}, which is not installed; install the extra "
                "with pip install 'engram-vit[export]'."
            ) from None


def check_pixels(preprocessing: Preprocessing, number: int, seed: int = 0) -> Tensor:
    """Generated pictures (coloured shapes on textures), as the trunk takes them."""
    scenes = draw_scenes(number, seed, max(32, *preprocessing.size)).pixels
    views = np.stack([evaluation_view(scene, preprocessing) for scene in scenes])
    return normalise(torch.from_numpy(views), preprocessing)


@dataclass(frozen=True)
class Change:
    """How the exported file's logits differ from the model's on the same pictures."""

    largest: float  # of all differences
    relative: float  # length of the difference, as a share of the length of the logits
    agreement: float  # how often the best class is the same
    size: float  # the largest logit of the model


def compare(answer: Answer, pixels: Tensor, expected: Mapping[str, Tensor]) -> dict[str, Change]:
    """Ask about the pictures in batches of several sizes, and compare with what was expected."""
    parts = [answer(part) for part in torch.split(pixels, list(BATCHES))]
    changes = {}
    for name, wanted in expected.items():
        given = torch.cat([part[name] for part in parts])
        difference = given - wanted
        largest = float(difference.abs().max()) if bool(given.isfinite().all()) else float("inf")
        length = float(wanted.norm())
        changes[name] = Change(
            largest=largest,
            relative=float(difference.norm()) / length if length else largest,
            agreement=float((given.argmax(1) == wanted.argmax(1)).float().mean()),
            size=float(wanted.abs().max()),
        )
    return changes
