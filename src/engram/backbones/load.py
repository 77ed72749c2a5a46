"""`load_backbone` and `save_backbone`: from the files of a ViT to a backbone, and back.

Files are read, never run: no pickle is opened, and no module of another library is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from engram.backbones.build import Overrides, ParsedModel, build_backbone, parse
from engram.backbones.configs import (
    ModelSettings,
    check_architecture,
    default_preprocessing,
    explain_bad_settings,
    timm_settings,
    transformers_settings,
)
from engram.backbones.layouts import Layout, google_to_torch
from engram.backbones.recommended import HUB_FILES, PICO, RECOMMENDED, recommended
from engram.backbones.shape import CONFIG
from engram.backbones.translate import Translated, check_complete, to_fp32
from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing
from engram.util import hub
from engram.util.documents import MAX_BYTES, parse_json, read_header
from engram.util.files import write_atomically
from engram.util.progress import Progress, silent
from engram.util.text import explained, first_line
from engram.util.zip_files import check_archive
from engram.vit.layers import Activation
from engram.vit.pos_embed import RotaryConfig
from engram.vit.vit import HeadConfig, Stored, ViT, ViTConfig

BUNDLED = Path(__file__).parent  # the folder of the bundled backbones
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".tar")


def load_backbone(
    source: str | os.PathLike[str],
    *,
    image_size: int | tuple[int, int] | None = None,
    preprocessing: Preprocessing | None = None,
    antialias: bool | None = None,
    heads: int | None = None,
    activation: Activation | None = None,
    revision: str | None = None,
    dtype: str = "fp32",
) -> ViT:
    """Load a ViT to be the backbone of tasks, frozen and in evaluation mode.

    A safetensors file has no checksum: a damaged header, a wrong length, NaN and infinity are
    noticed, a number that was changed to another one is not.

    Args:
        source: A Hub id (`[hf:]owner/name[@revision]`), the path of a transformers or timm folder,
            of a timm `.safetensors` file or of Google's `.npz`, a name that `engram backbones`
            lists, or `pico`, the bundled backbone.
        image_size: Height and width of the images, if not those the weights were trained at.
        preprocessing: How images become pixels, if not as the source says.
        antialias: Whether position embeddings are resized with antialiasing. By default as the
            library that wrote the file does it.
        heads: Number of attention heads, if what was read or inferred is wrong.
        activation: Activation of the MLPs, if what was read or inferred is wrong.
        revision: Branch, tag or commit on the Hub.
        dtype: `bf16` keeps the weights of the layers in half precision: half the memory. Its
            answers, and tasks that are trained on it, differ a little from those in fp32.

    Returns:
        The backbone.

    Raises:
        EngramError: The source does not exist, is damaged, or is no plain ViT.

    Examples:
        >>> backbone = engram.load_backbone("pico")
        >>> backbone.config.depth, backbone.config.width
        (6, 192)
    """
    check_dtype(dtype)
    name, path = locate(source, revision)
    overrides = Overrides(image_size, preprocessing, antialias, heads, activation)
    recorded = f"{name}@{revision}" if revision else name
    backbone = build_backbone(_parse(path, name), recorded, overrides)
    return backbone.round_weights() if dtype == "bf16" else backbone


def check_dtype(dtype: str) -> None:
    """Refuse a type that the weights of a backbone cannot have."""
    if dtype not in get_args(Stored):
        known = " or ".join(get_args(Stored))
        raise EngramError(f"The weights of a backbone can be in {known}, not in {dtype!r}.")


def save_backbone(
    backbone: ViT, folder: str | os.PathLike[str], dtype: torch.dtype = torch.float32
) -> Path:
    """Write a backbone as a folder that `load_backbone` reads: `config.json`, `model.safetensors`.

    Args:
        backbone: The backbone.
        folder: The folder to write into. It is created if needed.
        dtype: The type of the stored numbers. A smaller one rounds them, and the backbone that is
            read back then has another fingerprint.

    Returns:
        The folder.

    Examples:
        >>> folder = engram.save_backbone(engram.random_backbone(), "vit")
        >>> backbone = engram.load_backbone("vit")
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "engram_backbone": 1,
        "source": backbone.source,
        "config": asdict(backbone.config),
        "preprocessing": backbone.preprocessing.to_dict() if backbone.preprocessing else None,
        "labels": list(backbone.labels) if backbone.labels else None,
    }
    tensors = {
        n: t.detach().to("cpu", dtype).contiguous() for n, t in backbone.state_dict().items()
    }
    write_atomically(folder / "model.safetensors", save(tensors))
    write_atomically(folder / "config.json", (json.dumps(config, indent=1) + "\n").encode())
    return folder


def get_backbone(
    name: str,
    *,
    announce: Callable[[str], object] = lambda sentence: None,
    progress: Progress = silent,
) -> tuple[ViT, Path]:
    """Fetch a backbone of the Hub, by a recommended name or its id; returns it and its folder.

    It is loaded, so a damaged or incomplete download is an EngramError.
    """
    if name == PICO:
        raise EngramError("pico comes with the package; there is nothing to get.")
    known = recommended(name.removeprefix(hub.PREFIX))
    source = known.repo if known else name.removeprefix(hub.PREFIX)
    repo, _, revision = source.partition("@")
    if not hub.REPO.fullmatch(repo):
        names = ", ".join(backbone.name for backbone in RECOMMENDED)
        raise EngramError(f"{name!r} is neither a Hub id (owner/name) nor one of {names}.")
    if known and not known.on_this_machine:
        announce(f"{repo} takes about {known.download / 1e6:.0f} MB in the cache of the Hub.")
    folder = hub.fetch(repo, HUB_FILES, revision or None, may_be_path=False, progress=progress)
    backbone = load_backbone(source)
    parameters = sum(parameter.numel() for parameter in backbone.parameters())
    if known and parameters != known.parameters:
        raise EngramError(
            f"{repo} has {parameters:,} parameters; {known.parameters:,} were expected. It is not "
            f"the model that {known.name} stands for; delete {folder} and get it again."
        )
    return backbone, folder


# Finding the files


def locate(source: str | os.PathLike[str], revision: str | None = None) -> tuple[str, Path]:
    """The path, Hub id or `pico` that a source stands for, and the file or folder of it.

    A Hub repository is downloaded into the local cache.
    """
    name = os.fspath(source).removeprefix(hub.PREFIX)
    known = recommended(name)
    if known and isinstance(source, str) and not Path(name).exists():
        name = known.repo
    if name == PICO:
        if not (BUNDLED / name / "config.json").is_file():
            raise EngramError("This installation does not have the bundled backbone 'pico'.")
        return name, BUNDLED / name
    path = Path(name)
    if path.suffix in _PICKLES:
        raise EngramError(
            f"{name} is a pickle, and opening one can run code; convert it to safetensors first."
        )
    if path.is_file():
        if path.name == "model.safetensors" and (path.parent / "config.json").is_file():
            return name, path.parent
        if path.suffix not in (".safetensors", ".npz"):
            raise EngramError(f"{name} is neither a .safetensors nor an .npz file, nor a folder.")
        return name, path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise EngramError(
                f"The folder {name} has no config.json; give a folder with config.json and "
                "model.safetensors, or the path of one .safetensors or .npz file."
            )
        return name, path
    repo, _, at = name.partition("@")
    if not isinstance(source, str) or not hub.REPO.fullmatch(repo):
        raise EngramError(f"There is no file or folder {name}; check the path.")
    if path.suffix in (".safetensors", ".npz", ".json"):
        raise EngramError(f"There is no file {name}; check the path.")
    folder = hub.fetch(repo, HUB_FILES, revision or at or None)
    if not (folder / "config.json").is_file():
        raise EngramError(f"The Hub repository {name} has no config.json, so it holds no model.")
    return name, folder


# Reading them


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file; whatever else it holds is an EngramError."""
    try:
        with open(path, "rb") as file:
            content = parse_json(file.read(MAX_BYTES + 1))
    except (OSError, ValueError) as error:
        raise EngramError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(content, dict):
        raise EngramError(f"{path} holds no settings; a JSON object was expected.")
    return content


def _read_processor(folder: Path) -> dict[str, Any]:
    """The settings of the image processor in a transformers folder; empty if there are none."""
    settings: dict[str, Any] = {}
    for file in ("processor_config.json", "preprocessor_config.json"):  # the second overrules
        if (folder / file).is_file():
            content = read_json(folder / file)
            settings |= content.get("image_processor") or content
    return settings


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    with explained(
        lambda error: (
            f"{path} cannot be read as safetensors: {first_line(error)}. The file is "
            "damaged or incomplete; get it again."
        )
    ):
        with open(path, "rb") as file:
            read_header(file)
        return load_file(path)


def _read_folder(folder: Path, name: str) -> dict[str, Tensor]:
    """All tensors of a model folder: from one file, or from the shards that its index lists."""
    if (folder / "model.safetensors").is_file():
        return _read_safetensors(folder / "model.safetensors")
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
        tensors.update(_read_safetensors(folder / shard))
    check_complete(name, sorted(set(shards) - set(tensors)), sorted(set(tensors) - set(shards)))
    return tensors


def _read_npz(path: Path) -> tuple[dict[str, Tensor], int | None]:
    """The tensors of one of Google's files with torch's axes, and the number of heads: an axis."""
    heads = None
    tensors = {}
    with explained(
        lambda error: (
            f"{path} cannot be read as an .npz file of arrays: {first_line(error)}. The "
            "file is damaged or not an .npz file."
        )
    ):
        check_archive(path)
        with np.load(path, allow_pickle=False) as arrays:
            for name in arrays.files:
                array = torch.from_numpy(np.ascontiguousarray(arrays[name]))
                if name.endswith("/query/kernel") and array.ndim == 3:
                    heads = array.shape[1]
                tensors[name] = google_to_torch(name, array)
    return tensors, heads


# The layouts of files


def _parse(path: Path, name: str) -> ParsedModel:
    """Parse a file or folder in whichever layout it has."""
    if path.is_file() and path.suffix == ".npz":
        tensors, heads = _read_npz(path)
        settings = ModelSettings(
            partial(default_preprocessing, "vit"), {"eps": 1e-6, "heads": heads}
        )
        return parse(tensors, "google", lambda found: settings, name)
    config = read_json(path / "config.json") if path.is_dir() else {}
    if "engram_backbone" in config:
        return _parse_own(path, config, name)
    if path.is_dir():
        if not {"architecture", "model_type"} & config.keys():
            raise EngramError(
                f"{name} has a config.json that names neither a model_type (transformers) nor an "
                "architecture (timm)."
            )
        check_architecture(config, name)
    tensors = _read_folder(path, name) if path.is_dir() else _read_safetensors(path)
    if "model_type" in config and "architecture" not in config:
        read = partial(transformers_settings, config, _read_processor(path))
        return parse(tensors, config["model_type"], read, name)
    if any("patch_embedding" in key for key in tensors):
        raise EngramError(
            f"{name} has the tensor names of transformers, which need the config.json that "
            "belongs to them; give the folder that holds both."
        )
    return parse(tensors, "timm", partial(timm_settings, config), name)


def _parse_own(folder: Path, config: dict[str, Any], name: str) -> ParsedModel:
    """Parse a folder that `save_backbone` wrote."""
    if config["engram_backbone"] != 1:
        raise EngramError(f"{name} was written by a newer version of Engram; update yours.")
    with explain_bad_settings(name):
        CONFIG.check(config.get("config"), "config")
        settings = dict(config["config"])
        head, rotary = settings.get("head"), settings.get("rotary")
        settings["head"] = HeadConfig(**head) if head else None
        settings["rotary"] = RotaryConfig(**rotary) if rotary else None
        settings["image_size"] = tuple(settings["image_size"])
        vit = ViTConfig(**settings)
    tensors = {n: to_fp32(n, t, name) for n, t in _read_folder(folder, name).items()}
    saved = config.get("preprocessing")

    def preprocessing() -> Preprocessing:
        if saved:
            return Preprocessing.from_dict(saved)
        return default_preprocessing("timm", vit.image_size)

    found = Translated(name, Layout({}), tensors)
    return ParsedModel(found, vit, preprocessing, config.get("labels"))
