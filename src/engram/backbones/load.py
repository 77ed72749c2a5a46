"""`load_backbone` and `save_backbone`: from the files of a ViT to a backbone, and back."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save
from torch import Tensor

from engram.backbones.build import (
    Overrides,
    ParsedModel,
    build_backbone,
    parse_timm,
    parse_transformers,
    parse_translated,
)
from engram.backbones.configs import (
    ModelSettings,
    default_preprocessing,
    explain_bad_settings,
)
from engram.backbones.layouts import GOOGLE, Layout
from engram.backbones.read import (
    locate,
    read_folder,
    read_json,
    read_npz,
    read_processor,
    read_safetensors,
)
from engram.backbones.recommended import recommended
from engram.backbones.schemas import CONFIG
from engram.backbones.timm_configs import check_architecture
from engram.backbones.translate import Translated, checked, translate
from engram.errors import EngramError
from engram.images.preprocessing import SCHEMA as PREPROCESSING
from engram.images.preprocessing import Preprocessing
from engram.util import hub
from engram.util.files import write_atomically
from engram.vit.layers import Activation
from engram.vit.pos_embed import RotaryConfig
from engram.vit.vit import HeadConfig, Stored, ViT, ViTConfig


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
    """Load a ViT to be the backbone (or backbone) of tasks, frozen and in evaluation mode.

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
    name = os.fspath(source).removeprefix(hub.PREFIX)
    known = recommended(name)
    if known and isinstance(source, str) and not Path(name).exists():
        name = known.repo
    path = locate(name if isinstance(source, str) else source, revision)
    backbone = build_backbone(
        _parse(path, name),
        name,
        f"{name}@{revision}" if revision else name,
        Overrides(image_size, preprocessing, antialias, heads, activation),
    )
    return backbone.round_weights() if dtype == "bf16" else backbone


def check_dtype(dtype: str) -> None:
    """Refuse a type that the weights of a backbone cannot have."""
    if dtype not in get_args(Stored):
        known = " or ".join(get_args(Stored))
        raise EngramError(f"The weights of a backbone can be in {known}, not in {dtype!r}.")


def save_backbone(
    backbone: ViT, folder: str | os.PathLike[str], dtype: torch.dtype = torch.float32
) -> Path:
    """Write a backbone as a folder that `load_backbone` reads: `config.json` and
    `model.safetensors`.

    Args:
        backbone: The backbone.
        folder: The folder to write into. It is created if needed.
        dtype: The type of the stored numbers. A smaller one rounds them, and the backbone that is
        read
            back then has another fingerprint.

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


# The layouts of files


def _parse(path: Path, name: str) -> ParsedModel:
    """A file or folder in whichever layout it has."""
    if path.is_file():
        if path.suffix == ".npz":
            return _parse_google(path, name)
        return _parse_timm(read_safetensors(path), {}, name)
    config = read_json(path / "config.json")
    if "engram_backbone" in config:
        return _parse_own(path, config, name)
    if "architecture" in config:
        check_architecture(config, name)
        return _parse_timm(read_folder(path, name), config, name)
    if "model_type" in config:
        check_architecture(config, name)
        tensors = read_folder(path, name)
        return parse_transformers(tensors, config, read_processor(path), name)
    raise EngramError(
        f"{name} has a config.json that names neither a model_type (transformers) nor an "
        "architecture (timm)."
    )


def _parse_timm(tensors: dict[str, Tensor], config: dict[str, Any], name: str) -> ParsedModel:
    if any("patch_embedding" in key for key in tensors):
        raise EngramError(
            f"{name} has the tensor names of transformers, which need the config.json that "
            "belongs to them; give the folder that holds both."
        )
    return parse_timm(tensors, config, name)


def _parse_google(path: Path, name: str) -> ParsedModel:
    tensors, heads = read_npz(path)
    settings = ModelSettings("vit", 1e-6, antialias=True, heads=heads)  # antialiased as by timm
    return parse_translated(translate(tensors, GOOGLE, name), GOOGLE, settings, name)


def _parse_own(folder: Path, config: dict[str, Any], name: str) -> ParsedModel:
    """A folder that `save_backbone` wrote."""
    if config["engram_backbone"] != 1:
        raise EngramError(f"{name} was written by a newer version of Engram; update yours.")
    with explain_bad_settings(name):
        CONFIG.check(config.get("config"), "config")
        settings = dict(config["config"])
        head = settings.pop("head", None)
        rotary = settings.pop("rotary", None)
        settings["image_size"] = tuple(settings["image_size"])
        vit = ViTConfig(
            **settings,
            rotary=RotaryConfig(**rotary) if rotary else None,
            head=HeadConfig(**head) if head else None,
        )
    tensors = {n: checked(n, t, name) for n, t in read_folder(folder, name).items()}
    saved = config.get("preprocessing")

    def preprocessing() -> Preprocessing:
        if saved:
            PREPROCESSING.check(saved, "preprocessing")
            return Preprocessing.from_dict(saved)
        return default_preprocessing("timm", vit.image_size)

    found = Translated(tensors, [], [])
    return ParsedModel(found, Layout({}), vit, preprocessing, config.get("labels"))
