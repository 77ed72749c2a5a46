"""Find the files of a backbone, on this machine or on the Hub, and read what is in them.

Files are read, never run: no pickle is opened, and no module of another library is imported.
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engram.backbones.layouts import as_torch
from engram.backbones.translate import check_complete
from engram.errors import EngramError
from engram.util import hub
from engram.util.archives import check_archive
from engram.util.documents import MAX_BYTES, parse_json, read_header
from engram.util.hub import PathOrHubId

BUNDLED = Path(__file__).parent  # the folder of the bundled backbones
HUB_FILES = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".tar")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


# Finding the files


def locate(source: PathOrHubId, revision: str | None = None) -> Path:
    """The file or folder of a backbone. A Hub repository is downloaded into the local cache."""
    name, path = os.fspath(source), Path(source)
    if name == "pico":
        if not (BUNDLED / name / "config.json").is_file():
            raise EngramError("This installation does not have the bundled backbone 'pico'.")
        return BUNDLED / name
    if path.suffix in _PICKLES:
        raise EngramError(
            f"{name} is a pickle, and opening one can run code; convert it to safetensors first."
        )
    if path.is_file():
        return _check_file(path, name)
    if path.is_dir():
        return _check_folder(path, name)
    repo, _, at = name.partition("@")
    if not isinstance(source, str) or not _HUB_ID.fullmatch(repo):
        raise EngramError(f"There is no file or folder {name}; check the path.")
    if path.suffix in (".safetensors", ".npz", ".json"):
        raise EngramError(f"There is no file {name}; check the path.")
    folder = hub.fetch(repo, HUB_FILES, revision or at or None)
    if not (folder / "config.json").is_file():
        raise EngramError(f"The Hub repository {name} has no config.json, so it holds no model.")
    return folder


def _check_file(path: Path, name: str) -> Path:
    """The file, or its folder if the configuration of the file is in it."""
    if path.name == "model.safetensors" and (path.parent / "config.json").is_file():
        return path.parent
    if path.suffix not in (".safetensors", ".npz"):
        raise EngramError(f"{name} is neither a .safetensors nor an .npz file, nor a folder.")
    return path


def _check_folder(path: Path, name: str) -> Path:
    if not (path / "config.json").is_file():
        raise EngramError(
            f"The folder {name} is not a model folder: it has no config.json. Give a folder with "
            "config.json and model.safetensors, or the path of one .safetensors or .npz file."
        )
    return path


# Reading them


def read_json(path: Path) -> dict[str, Any]:
    """The settings in a JSON file."""
    try:
        with open(path, "rb") as file:
            content = parse_json(file.read(MAX_BYTES + 1))
    except (OSError, ValueError) as error:
        raise EngramError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(content, dict):
        raise EngramError(f"{path} holds no settings; a JSON object was expected.")
    return content


def read_processor(folder: Path) -> dict[str, Any]:
    """The settings of the image processor in a transformers folder; empty if there are none."""
    settings: dict[str, Any] = {}
    for file in ("processor_config.json", "preprocessor_config.json"):  # the second overrules
        if (folder / file).is_file():
            content = read_json(folder / file)
            settings |= content.get("image_processor") or content
    return settings


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file."""
    try:
        with open(path, "rb") as file:
            read_header(file)
        return load_file(path)
    except (SafetensorError, OSError, ValueError, RuntimeError, OverflowError) as error:
        raise EngramError(
            f"{path} cannot be read as safetensors: {str(error) or type(error).__name__}. The "
            "file is damaged or incomplete; get it again."
        ) from error


def read_folder(folder: Path, name: str) -> dict[str, Tensor]:
    """All tensors of a model folder: from one file, or from the shards that its index lists."""
    if (folder / "model.safetensors").is_file():
        return read_safetensors(folder / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        pickled = any(path.suffix in _PICKLES for path in folder.iterdir())
        raise EngramError(
            f"{name} has no model.safetensors"
            + (", only pickles, which can run code" if pickled else "")
            + "; convert its weights to safetensors, or name a revision that has them."
        )
    shards = read_json(index).get("weight_map")  # tensor -> file
    if not isinstance(shards, dict) or not all(isinstance(v, str) for v in shards.values()):
        raise EngramError(f"{index} has no weight_map from tensors to files.")
    tensors = {}
    for shard in sorted(set(shards.values())):
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise EngramError(f"{name} lacks the shard {shard} that its index lists.")
        tensors.update(read_safetensors(folder / shard))
    check_complete(name, sorted(set(shards) - set(tensors)), sorted(set(tensors) - set(shards)))
    return tensors


def read_npz(path: Path) -> tuple[dict[str, Tensor], int | None]:
    """The tensors of one of Google's `.npz` files with torch's axes, and the number of heads.

    Google's tensors keep the heads as an axis, so their shapes show the number.
    """
    heads = None
    tensors = {}
    try:
        check_archive(path)
        with np.load(path, allow_pickle=False) as arrays:
            for name in arrays.files:
                array = torch.from_numpy(np.ascontiguousarray(arrays[name]))
                if name.endswith("/query/kernel") and array.ndim == 3:
                    heads = array.shape[1]
                tensors[name] = as_torch(name, array)
    except (OSError, ValueError, TypeError, LookupError, EOFError, RuntimeError, MemoryError,
            zipfile.BadZipFile, zlib.error) as error:  # fmt: skip
        raise EngramError(
            f"{path} cannot be read as an .npz file of arrays: {error}. The file is damaged or "
            "not an .npz file."
        ) from error
    return tensors, heads
