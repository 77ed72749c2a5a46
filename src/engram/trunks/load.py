"""Other people's ViT files -> trunk.

Every file goes the same way: its tensors get our names (layouts.py), their shapes tell almost all
of the architecture, and a configuration beside them tells the rest, which is `Known`. Files are
read, never run: no pickle is opened and no module of another library is imported.
"""

from __future__ import annotations

import json
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing
from engram.trunks.configs import (
    READABLE,
    Known,
    known_of_timm,
    known_of_transformers,
    processor_settings,
    read_json,
    refuse_by_name,
    sane,
    usual_for,
)
from engram.trunks.layouts import (
    GOOGLE,
    Layout,
    Translated,
    as_torch,
    checked,
    split_in_proj,
    their_names,
    timm_layout,
    transformers_layout,
    translate,
)
from engram.util import hub
from engram.util.files import write_atomically
from engram.vit import Activation, HeadConfig, Pooling, ViT, ViTConfig

BUNDLED = Path(__file__).parent
HUB_FILES = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".tar")


def load_trunk(
    source: str | os.PathLike[str],
    *,
    image_size: int | tuple[int, int] | None = None,
    preprocessing: Preprocessing | None = None,
    antialias: bool | None = None,
    heads: int | None = None,
    activation: Activation | None = None,
    revision: str | None = None,
) -> ViT:
    """Load a ViT to be the trunk (or backbone) of tasks, in fp32, frozen and in evaluation mode.

    A safetensors file has no checksum: a damaged header, a wrong length, NaN and infinity are
    noticed, a number that was changed to another one is not.

    Args:
        source: A Hub id (`[hf:]owner/name[@revision]`), the path of a transformers or timm folder,
            of a timm `.safetensors` file or of Google's `.npz`, or `pico`, the bundled trunk.
        image_size: Height and width of the images, if not those the weights were trained at.
        preprocessing: How images become pixels, if not as the source says.
        antialias: Whether position embeddings are resized with antialiasing. By default as the
            library that wrote the file does it.
        heads: Number of attention heads, if what was read or inferred is wrong.
        activation: Activation of the MLPs, if what was read or inferred is wrong.
        revision: Branch, tag or commit on the Hub.

    Returns:
        The trunk.

    Raises:
        EngramError: The source does not exist, is damaged, or is no plain ViT.

    Examples:
        >>> trunk = engram.load_trunk("pico")
        >>> trunk.config.depth, trunk.config.width
        (6, 192)
    """
    name = os.fspath(source).removeprefix(hub.PREFIX)
    return build(
        _read(_locate(name if isinstance(source, str) else source, revision), name),
        name,
        source=f"{name}@{revision}" if revision else name,
        image_size=image_size,
        preprocessing=preprocessing,
        antialias=antialias,
        heads=heads,
        activation=activation,
    )


def save_trunk(
    trunk: ViT, folder: str | os.PathLike[str], dtype: torch.dtype = torch.float32
) -> Path:
    """Write a trunk as a folder that `load_trunk` reads: `config.json` and `model.safetensors`.

    Args:
        trunk: The trunk.
        folder: The folder to write into. It is created if needed.
        dtype: The type of the stored numbers. A smaller one rounds them, and the trunk that is read
            back then has another fingerprint.

    Returns:
        The folder.

    Examples:
        >>> folder = engram.save_trunk(engram.random_trunk(), "vit")
        >>> trunk = engram.load_trunk("vit")
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "engram_trunk": 1,
        "source": trunk.source,
        "config": asdict(trunk.config),
        "preprocessing": trunk.preprocessing.to_dict() if trunk.preprocessing else None,
        "labels": list(trunk.labels) if trunk.labels else None,
    }
    tensors = {n: t.detach().to("cpu", dtype).contiguous() for n, t in trunk.state_dict().items()}
    write_atomically(folder / "model.safetensors", save(tensors))
    write_atomically(folder / "config.json", (json.dumps(config, indent=1) + "\n").encode())
    return folder


# Where it is


def _locate(source: str | os.PathLike[str], revision: str | None) -> Path:
    """The file or folder that a source means; a Hub repository becomes a folder in the cache."""
    name = os.fspath(source)
    if name == "pico":
        if not (BUNDLED / name / "config.json").is_file():
            raise EngramError("This installation does not have the bundled trunk 'pico'.")
        return BUNDLED / name
    path = Path(name)
    if path.suffix in _PICKLES:
        raise EngramError(
            f"{name} is a pickle, and opening one can run code; convert it to safetensors first."
        )
    if path.is_file():
        if path.name == "model.safetensors" and (path.parent / "config.json").is_file():
            return path.parent
        if path.suffix in (".safetensors", ".npz"):
            return path
        raise EngramError(f"{name} is neither a .safetensors nor an .npz file, nor a folder.")
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        raise EngramError(
            f"The folder {name} is no model folder: it has no config.json beside a "
            "model.safetensors; or give the path of one .safetensors or .npz file."
        )
    repo, _, at = name.partition("@")
    if not isinstance(source, str) or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", repo):
        raise EngramError(f"There is no file or folder {name}; check the path.")
    if path.suffix in (".safetensors", ".npz", ".json"):
        raise EngramError(f"There is no file {name}; check the path.")
    folder = hub.fetch(repo, HUB_FILES, revision or at or None)
    if not (folder / "config.json").is_file():
        raise EngramError(f"The Hub repository {name} has no config.json: no model is in it.")
    return folder


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, RuntimeError, OverflowError) as error:
        raise EngramError(
            f"{path} cannot be read as safetensors: {str(error) or type(error).__name__}. It is "
            "damaged or cut short; fetch it again."
        ) from error


def _read_folder(folder: Path, name: str) -> dict[str, Tensor]:
    """All tensors of a folder: of one file, or of the shards that its index lists."""
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
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(v, str) for v in where.values()):
        raise EngramError(f"{index} has no weight_map from tensors to files.")
    tensors = {}
    for shard in sorted(set(where.values())):
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise EngramError(f"{name} lacks the shard {shard} that its index lists.")
        tensors.update(_read_safetensors(folder / shard))
    _refuse(name, sorted(set(where) - set(tensors)), sorted(set(tensors) - set(where)))
    return tensors


def _read_npz(path: Path) -> tuple[dict[str, Tensor], int | None]:
    """Google's tensors in torch's axes, and the number of heads, which their shapes show."""
    heads = None
    tensors = {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            for name in arrays.files:
                array = torch.from_numpy(np.ascontiguousarray(arrays[name]))
                if name.endswith("/query/kernel") and array.ndim == 3:
                    heads = array.shape[1]
                tensors[name] = as_torch(name, array)
    except (OSError, ValueError, TypeError, LookupError, EOFError, RuntimeError,
            zipfile.BadZipFile, zlib.error) as error:  # fmt: skip
        raise EngramError(
            f"{path} cannot be read as an .npz of arrays: {error}. It is damaged or no .npz file."
        ) from error
    return tensors, heads


# What it is


class Read(NamedTuple):
    found: Translated
    layout: Layout
    config: ViTConfig
    prepare: Callable[[], Preprocessing]
    labels: Sequence[object] | None


def build(
    read: Read,
    name: str,
    *,
    source: str,
    image_size: int | tuple[int, int] | None = None,
    preprocessing: Preprocessing | None = None,
    antialias: bool | None = None,
    heads: int | None = None,
    activation: Activation | None = None,
) -> ViT:
    """The trunk from what was read, with what the caller overrules; see `load_trunk`."""
    config = replace(
        read.config,
        antialias=read.config.antialias if antialias is None else antialias,
        heads=read.config.heads if heads is None else heads,
        activation=activation or read.config.activation,
    )
    trunk = _assemble(config, read.found, read.layout, name)
    trunk.source = source
    with sane(name):
        usual = preprocessing or read.prepare()
        if config.head and read.labels and len(read.labels) == config.head.classes:
            trunk.labels = tuple(str(label) for label in read.labels)
    trunk.preprocessing = _fit(usual, image_size, preprocessing is None, trunk)
    return trunk


def _read(place: Path, name: str) -> Read:
    """A file or folder in whichever layout it has."""
    config = None if place.is_file() else read_json(place / "config.json")
    if config is not None and "engram_trunk" in config:
        return _read_own(place, config, name)
    if place.suffix == ".npz" and config is None:
        tensors, heads = _read_npz(place)
        layout = GOOGLE
        found = translate(tensors, layout, name)
        known = Known("vit", 1e-6, antialias=True, heads=heads)  # antialiased as by timm
    elif config is None or "architecture" in config:
        refuse_by_name(config or {}, name)
        tensors = _read_safetensors(place) if config is None else _read_folder(place, name)
        if any("patch_embedding" in key for key in tensors):
            raise EngramError(
                f"{name} has transformers' names, and those need the config.json that belongs to "
                "them; give the folder that holds both."
            )
        return read_timm(tensors, config or {}, name)
    elif "model_type" in config:
        refuse_by_name(config, name)
        tensors = _read_folder(place, name)
        return read_transformers(tensors, config, processor_settings(place), name)
    else:
        raise EngramError(
            f"{name} has a config.json that names neither a model_type (transformers) nor an "
            "architecture (timm)."
        )
    return _understood(found, layout, known, name)


def read_timm(
    tensors: dict[str, Tensor], config: dict[str, Any], name: str, share: bool = False
) -> Read:
    """Tensors under timm's names, and what its configuration says of them."""
    layout = timm_layout(tensors)
    found = translate(tensors, layout, name, share)
    with sane(name):
        known = known_of_timm(config, found, name)
    return _understood(found, layout, known, name, share)


def read_transformers(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    processor: Mapping[str, Any],
    name: str,
    share: bool = False,
) -> Read:
    """Tensors under the names that transformers writes, with its two configurations."""
    tensors = split_in_proj(tensors)
    layout = transformers_layout(config["model_type"], tensors)
    found = translate(tensors, layout, name, share)
    with sane(name):
        known = known_of_transformers(config, layout, processor, name)
    return _understood(found, layout, known, name, share)


def _understood(
    found: Translated, layout: Layout, known: Known, name: str, share: bool = False
) -> Read:
    settings = _configure(found, layout, known, name, share)
    usual = usual_for(known.customs, settings.image_size)
    return Read(found, layout, settings, lambda: known.prepare(usual), known.labels)


def _read_own(folder: Path, config: dict[str, Any], name: str) -> Read:
    if config["engram_trunk"] != 1:
        raise EngramError(f"{name} was written by a newer version of Engram; update yours.")
    with sane(name):
        settings = dict(config["config"])
        head = settings.pop("head", None)
        settings["image_size"] = tuple(settings["image_size"])
        vit = ViTConfig(**settings, head=HeadConfig(**head) if head else None)
    tensors = {n: checked(n, t, name) for n, t in _read_folder(folder, name).items()}
    told = config.get("preprocessing")
    return Read(
        Translated(tensors, [], []),
        Layout({}),
        vit,
        lambda: Preprocessing.from_dict(told) if told else usual_for("timm", vit.image_size),
        config.get("labels"),
    )


def _configure(
    found: Translated, layout: Layout, known: Known, name: str, share: bool
) -> ViTConfig:
    """The architecture that the tensors show. Splits the positions in those of tokens and patches.

    A class position without one for the registers (DINOv2 in transformers) is added to the class
    token, as timm does it: the same weights are the same trunk, whoever wrote the file.
    """
    tensors = found.tensors
    axes = {"patch.weight": 4, "position": 2, "blocks.0.qkv.weight": 2,
            "blocks.0.mlp.fc1.weight": 2, "blocks.0.mlp.fc2.weight": 2}  # fmt: skip
    needed = (*axes, *layout.required)
    lacking = [theirs for n in needed if n not in tensors for theirs in their_names(n, layout)]
    if lacking:
        also = f" and has {_list(found.surplus)}" if found.surplus else ""
        raise EngramError(
            f"{name} is damaged, or no plain ViT that can be a trunk ({READABLE} can): it lacks "
            f"{_list(lacking)}{also}."
        )
    axes |= {n: 2 for n in ("class_token", "registers") if n in tensors}
    width = tensors["patch.weight"].shape[:1]
    for n, count in axes.items():
        tensor = tensors[n]
        in_width = tensor.shape[-1:] == width or n in ("patch.weight", "blocks.0.mlp.fc2.weight")
        if tensor.ndim != count or not tensor.numel() or not in_width:
            raise EngramError(
                f"The tensor {their_names(n, layout)[0]} of {name} has the shape "
                f"{tuple(tensor.shape)}, which does not fit the others."
            )
    _, channels, rows, columns = tensors["patch.weight"].shape
    if channels != 3 or rows != columns:
        raise EngramError(
            f"{name} cuts patches of {rows} x {columns} pixels with {channels} channels; square "
            "ones with 3 channels were expected."
        )
    layers = {n.split(".")[1] for n in tensors if n.startswith("blocks.")}
    mlp_width = tensors["blocks.0.mlp.fc2.weight"].shape[1]
    swiglu = tensors["blocks.0.mlp.fc1.weight"].shape[0] == 2 * mlp_width
    class_token = "class_token" in tensors
    registers = len(tensors["registers"]) if "registers" in tensors else 0
    prefix = int(class_token) + registers
    grid = _grid(len(tensors["position"]), rows, class_token, prefix, known, name)
    positions = len(tensors["position"]) - grid[0] * grid[1]
    if positions:
        parts = tensors["position"][:positions], tensors["position"][positions:]
        tensors["prefix_position"], tensors["position"] = (
            parts if share else (parts[0].clone(), parts[1].clone())
        )
    if 0 < positions < prefix:
        tensors["class_token"] = tensors["class_token"] + tensors.pop("prefix_position")
        positions = 0
    config = ViTConfig(
        image_size=(grid[0] * rows, grid[1] * rows),
        patch=rows,
        width=width[0],
        depth=len(layers),
        heads=known.heads or _heads(width[0], swiglu),
        mlp_width=mlp_width,
        eps=known.eps,
        activation="swiglu" if swiglu else known.activation,
        class_token=class_token,
        registers=registers,
        prefix_positions=positions,
        patch_bias=not found.has("pre_norm"),
        qkv_bias=any(n.endswith("qkv.bias") for n in tensors),
        pre_norm=found.has("pre_norm"),
        layer_scale=any(n.endswith(("scale1", "scale2")) for n in tensors),
        final_norm=not found.has("head.norm"),
        antialias=known.antialias,
        head=_head(found, known),
    )
    for key, value in known.says.items():
        if getattr(config, key) != value:
            raise EngramError(
                f"The config.json of {name} says {key} {value}, but its tensors have "
                f"{getattr(config, key)}; they do not belong together."
            )
    return config


def _grid(
    count: int, patch: int, class_token: bool, prefix: int, known: Known, name: str
) -> tuple[int, int]:
    """Rows and columns of patches; of all `count` positions some may belong to other tokens."""
    possible = (prefix, int(class_token), 0)
    if known.image_size is not None:
        grid = known.image_size[0] // patch, known.image_size[1] // patch
        if count - grid[0] * grid[1] in possible:
            return grid
    else:
        for extra in possible:
            side = math.isqrt(max(count - extra, 0))
            if side and side * side == count - extra:
                return side, side
    size = f"{known.image_size[0]} x {known.image_size[1]}" if known.image_size else "square"
    raise EngramError(
        f"{name} has {count} position embeddings, which do not fit {size} images in patches of "
        f"{patch} pixels with {prefix} further tokens."
    )


def _heads(width: int, swiglu: bool) -> int:
    """The number of heads by the width, where nothing says it: 64 wide, but 16 in large ones."""
    if width in (1152, 1280, 1408, 1664) or (width == 1536 and not swiglu):
        return 16
    return max(width // 64, 1)


def _head(found: Translated, known: Known) -> HeadConfig | None:
    """The head that a file brings tensors for."""
    if not found.has("head"):
        return None
    rows = [t.shape[0] for n, t in found.tensors.items() if n.startswith("head.linear.") and t.ndim]
    return HeadConfig(
        classes=max(rows, default=0),
        pooling=known.pooling,
        bias=known.head_bias,
        hidden=found.has("head.hidden"),
        norm=found.has("head.norm"),
        raw=known.raw,
    )


def _assemble(config: ViTConfig, found: Translated, layout: Layout, name: str) -> ViT:
    """The ViT with these tensors, if they are all it has and all it needs."""
    with sane(name):
        head = config.head or HeadConfig(0)
        if config.activation not in get_args(Activation) or head.pooling not in get_args(Pooling):
            raise ValueError(f"{config.activation} or {head.pooling} is unknown")
        if config.heads < 1 or config.depth > len(found.tensors):
            raise ValueError(f"{config.heads} heads, {config.depth} layers")
        with torch.device("meta"):  # no memory and no random numbers for what is replaced
            vit = ViT(config)
    expected = vit.state_dict()
    missing = [n for key in expected if key not in found.tensors for n in their_names(key, layout)]
    surplus = [n for key in found.tensors if key not in expected for n in their_names(key, layout)]
    _refuse(name, sorted({*missing, *found.missing}), sorted({*surplus, *found.surplus}))
    for key, tensor in expected.items():
        if found.tensors[key].shape != tensor.shape:
            raise EngramError(
                f"The tensor {' + '.join(their_names(key, layout))} of {name} has the shape "
                f"{tuple(found.tensors[key].shape)}; expected is {tuple(tensor.shape)}."
            )
    vit.load_state_dict(found.tensors, assign=True)
    return vit.requires_grad_(False).eval()


def _refuse(name: str, missing: list[str], surplus: list[str]) -> None:
    if missing or surplus:
        lacks = f"lacks the tensors {_list(missing)}" if missing else ""
        has = f"has tensors that no plain ViT has: {_list(surplus)}" if surplus else ""
        raise EngramError(f"{name} {' and '.join(part for part in (lacks, has) if part)}.")


def _list(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _fit(
    preprocessing: Preprocessing, image_size: int | tuple[int, int] | None, read: bool, trunk: ViT
) -> Preprocessing:
    """Pictures of a size that the trunk can cut into patches.

    A size that was read is made smaller to fit (SigLIP has one of 384 pixels in patches of 14:
    378); one that the caller gave is refused.
    """
    patch = trunk.config.patch
    size = preprocessing.size
    if image_size is not None:
        size = (image_size, image_size) if isinstance(image_size, int) else image_size
    elif read:
        size = max(size[0] // patch, 1) * patch, max(size[1] // patch, 1) * patch
    if len(size) != 2 or min(size) < 1 or size[0] % patch or size[1] % patch:
        raise EngramError(
            f"{trunk.source} cannot take images of {' x '.join(map(str, size))} pixels: height and "
            f"width must be multiples of its patch size {patch}, such as "
            f"{trunk.config.image_size[0]} x {trunk.config.image_size[1]}."
        )
    return preprocessing if size == preprocessing.size else preprocessing.with_size(size)
