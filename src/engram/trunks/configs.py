"""What other libraries write beside their tensors: configurations and preprocessing -> `Known`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing
from engram.trunks.layouts import FAMILIES, Layout, Translated
from engram.vit import Activation, Pooling

READABLE = "ViT, DeiT, DINO, DINOv2, CLIP, SigLIP and MAE"

_HALF = (0.5, 0.5, 0.5)
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_OPENAI = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))

# Where no file says how pictures are prepared: mean and std, interpolation, and the crop's share
# of the short side (None: the whole picture is squashed).
_CUSTOMS = {
    "vit": ((_HALF, _HALF), "bilinear", None),
    "vit_mae": (_IMAGENET, "bicubic", 0.875),
    "deit": (_IMAGENET, "bicubic", 0.875),
    "dinov2": (_IMAGENET, "bicubic", 0.875),
    "clip": (_OPENAI, "bicubic", 1.0),
    "siglip": ((_HALF, _HALF), "bicubic", None),
    "timm": ((_HALF, _HALF), "bicubic", 0.9),
    "timm deit": (_IMAGENET, "bicubic", 0.9),
    "timm dinov2": (_IMAGENET, "bicubic", 1.0),
}


@dataclass(frozen=True)
class Known:
    """What the tensors do not show."""

    customs: str  # a row of _CUSTOMS
    eps: float
    antialias: bool
    heads: int | None = None  # None: by the width
    activation: Activation = "gelu"
    pooling: Pooling = "class"
    raw: bool = False
    head_bias: bool = True
    image_size: tuple[int, int] | None = None  # None: the position embeddings are a square
    says: Mapping[str, int] = field(default_factory=dict)  # must agree with the tensors
    prepare: Callable[[Preprocessing], Preprocessing] = lambda usual: usual
    labels: Sequence[object] | None = None


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EngramError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(content, dict):
        raise EngramError(f"{path} holds no settings: a JSON object was expected.")
    return content


@contextmanager
def sane(name: str) -> Iterator[None]:
    """Settings of the wrong kind inside are the file's mistake, not a program's."""
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise EngramError(f"The settings of {name} cannot be understood: {error!r}.") from error


# transformers leaves out of config.json what equals its defaults.
_DEFAULTS = {
    "vit": (1e-12, "gelu"),
    "deit": (1e-12, "gelu"),
    "dinov2": (1e-6, "gelu"),
    "clip": (1e-5, "quick_gelu"),
    "siglip": (1e-6, "gelu_pytorch_tanh"),
}
_ACTIVATIONS: dict[object, Activation] = {
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
# Plain ViTs by timm's names, and those of them whose layers are others or in another order.
_TIMM_VIT = re.compile(r"(vit|deit|deit3|flexivit|eva_large)_.*")
_TIMM_OTHER = re.compile(r".*(_rpn_|_rope_|_relpos_|_xp_|resnet|_r26_|_r50_|_18x2_).*")


def refuse_by_name(config: Mapping[str, Any], name: str) -> None:
    """Refuse what its configuration calls something else than a plain ViT."""
    if not config:
        return
    called = str(config.get("architecture", config.get("model_type")))
    if "architecture" in config:
        plain = _TIMM_VIT.fullmatch(called) and not _TIMM_OTHER.fullmatch(called)
    else:
        plain = called in FAMILIES
    if not plain:
        raise EngramError(
            f"{name} is a {called!r} model, not a plain ViT that can be a trunk; {READABLE} can."
        )


def processor_settings(folder: Path) -> dict[str, Any]:
    """How pictures are prepared, where a folder of transformers says it."""
    settings: dict[str, Any] = {}
    for file in ("processor_config.json", "preprocessor_config.json"):  # the second overrules
        if (folder / file).is_file():
            read = read_json(folder / file)
            settings |= read.get("image_processor") or read
    return settings


def known_of_transformers(
    config: dict[str, Any], layout: Layout, processor: Mapping[str, Any], name: str
) -> Known:
    kind = config["model_type"]
    family = FAMILIES[kind]
    vision = config
    if kind in ("clip", "siglip"):
        vision = (config.get("vision_config") or {}) | (config.get("vision_config_dict") or {})
    eps, act = _DEFAULTS[family]
    act = vision.get("hidden_act", act)
    if act not in _ACTIVATIONS:
        raise EngramError(f"{name} uses the activation {act!r}; {list(_ACTIVATIONS)} are known.")
    classifier = layout.names.get("head.linear") == "classifier"
    pooling: Pooling = "class"
    if "head.distilled" in layout.names:
        pooling = "distilled"
    elif family == "dinov2":
        pooling = "class+mean"
    elif family in ("clip", "siglip") and classifier:
        pooling = "mean"
    elif family == "siglip":
        pooling = "attention"
    says = {"hidden_size": "width", "num_hidden_layers": "depth", "patch_size": "patch"}
    if family != "dinov2":
        says["intermediate_size"] = "mlp_width"
    names = config.get("id2label")
    labels = None
    if isinstance(names, dict) and all(str(key).isdigit() for key in names):
        labels = [names[key] for key in sorted(names, key=int)]
        if all(re.fullmatch(r"LABEL_\d+", str(label)) for label in labels):
            labels = None
    return Known(
        kind if kind in _CUSTOMS else family,
        float(vision.get("layer_norm_eps", eps)),
        # Of all families, transformers antialiases the resized positions of this one alone.
        antialias=kind == "dinov2_with_registers",
        heads=_pair(vision.get("num_attention_heads", 12), name)[0],
        activation=_ACTIVATIONS[act],
        pooling=pooling,
        raw=family == "clip" and classifier,
        head_bias=family != "clip" or classifier,
        image_size=_pair(vision["image_size"], name) if "image_size" in vision else None,
        says={o: _pair(vision[t], name)[0] for t, o in says.items() if t in vision},
        prepare=lambda usual: _like_processor(usual, processor, name),
        labels=None if family == "clip" and not classifier else labels,
    )


def known_of_timm(config: dict[str, Any], found: Translated, name: str) -> Known:
    """timm's config.json names the model; where it is missing, the tensors have to do.

    What they cannot show: QuickGELU (assumed: no) and the number of heads (see `_heads`).
    """
    cfg = config | (config.get("pretrained_cfg") or {})
    arguments = config.get("model_args") or {}
    called = f"{config.get('architecture', '')}.{cfg.get('tag', '')}"
    clip = found.has("pre_norm")
    siglip = found.has("head.pool") or "siglip" in called
    activation: Activation = "gelu"
    if siglip:  # trained with tanh-GELU, which timm itself does not use for all of them
        activation = "gelu_tanh"
    elif clip and ("quickgelu" in called or called.endswith(".openai") or
                   "QuickGELU" in str(cfg.get("notes"))):  # fmt: skip
        activation = "quick_gelu"
    pool = cfg.get("global_pool") or arguments.get("global_pool")
    if pool not in (None, "", "token", "avg", "map"):
        raise EngramError(f"{name} pools its tokens by {pool!r}; token, avg and map can be read.")
    pooling: Pooling = "class"
    if found.has("head.pool"):
        pooling = "attention"
    elif found.has("head.distilled"):
        pooling = "distilled"
    elif pool == "avg" or found.has("head.norm") or not found.has("class_token"):
        pooling = "mean"
    customs = "timm"
    if clip:
        customs = "clip"
    elif found.has("blocks.0.scale1"):
        customs = "timm dinov2"
    elif pooling == "distilled":
        customs = "timm deit"
    size = tuple(cfg.get("input_size") or ())[1:]
    return Known(
        customs,
        1e-5 if clip else 1e-6,
        antialias=True,
        heads=arguments.get("num_heads"),
        activation=_ACTIVATIONS.get(arguments.get("act_layer"), activation),
        pooling=pooling,
        image_size=_pair(size, name) if len(set(size)) == 2 else None,
        prepare=lambda usual: _like_timm(usual, cfg, name),
        labels=config.get("label_names"),
    )


def _pair(value: object, name: str) -> tuple[int, int]:
    """A size that is one number or two."""
    pair: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value, value]
    if len(pair) == 2 and all(isinstance(n, int) and n > 0 for n in pair):
        return pair[0], pair[1]
    raise EngramError(f"The configuration of {name} has {value!r} where a size was expected.")


# How its pictures are prepared


def usual_for(customs: str, size: tuple[int, int]) -> Preprocessing:
    (mean, std), interpolation, share = _CUSTOMS[customs]
    resize = None if share is None else math.floor(max(size) / share)
    return Preprocessing(size, resize, interpolation, mean, std)


def _like_timm(usual: Preprocessing, cfg: Mapping[str, Any], name: str) -> Preprocessing:
    """What pretrained_cfg says; where it is silent, the family's customs."""
    size = tuple(cfg.get("input_size") or (3, *usual.size))[1:]
    mode = cfg.get("crop_mode") or "center"
    if mode not in ("center", "squash"):
        raise EngramError(f"{name} crops by {mode!r}, which is not known; give `preprocessing`.")
    resize = None if usual.resize is None else usual.with_size(_pair(size, name)).resize
    if cfg.get("crop_pct"):
        resize = math.floor(max(size) / cfg["crop_pct"])
    if mode == "squash":
        resize = None
    return Preprocessing(
        _pair(size, name),
        resize,
        cfg.get("interpolation") or usual.interpolation,
        tuple(cfg.get("mean") or usual.mean),
        tuple(cfg.get("std") or usual.std),
    )


_PILLOW: dict[Any, str] = dict(
    enumerate(("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"))
)


def _like_processor(usual: Preprocessing, cfg: Mapping[str, Any], name: str) -> Preprocessing:
    """What preprocessor_config.json says; where it is silent, the family's customs."""
    if not cfg.get("do_rescale", True) or abs(cfg.get("rescale_factor", 1 / 255) - 1 / 255) > 1e-6:
        raise EngramError(f"{name} scales its pixels in an unknown way; give `preprocessing`.")
    size, resize = usual.size, usual.resize
    told = cfg.get("size")
    if told is not None:
        crop = cfg.get("crop_size") if cfg.get("do_center_crop") else None
        if isinstance(told, dict):
            short = told.get("shortest_edge")
            whole = (told.get("height", short), told.get("width", short))
        else:
            short, whole = (told if crop else None), (told, told)
        if isinstance(crop, dict):
            crop = (crop.get("height"), crop.get("width"))
        size = _pair(crop or whole, name)
        resize = max(_pair(whole, name)) if crop or short else None
        resize = resize and max(resize, *size)
    normalise = cfg.get("do_normalize", True)
    resample = cfg.get("resample")
    return Preprocessing(
        size,
        resize,
        _PILLOW.get(resample, usual.interpolation),
        tuple(cfg.get("image_mean") or usual.mean) if normalise else (0.0, 0.0, 0.0),
        tuple(cfg.get("image_std") or usual.std) if normalise else (1.0, 1.0, 1.0),
    )
