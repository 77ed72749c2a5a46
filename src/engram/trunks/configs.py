"""What other libraries write next to their tensors: configurations -> `ModelSettings`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing
from engram.trunks.layouts import FAMILIES, Layout
from engram.trunks.schemas import PROCESSOR, TIMM, TIMM_ARGUMENTS, TRANSFORMERS
from engram.trunks.translate import Translated
from engram.util.schema import Invalid
from engram.vit import Activation, Pooling

READABLE = "ViT, DeiT, DINO, DINOv2, CLIP, SigLIP and MAE"

_HALF = (0.5, 0.5, 0.5)
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_OPENAI = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))

# Where no file says how images are prepared: mean and std, interpolation, and the crop's share of
# the short side (None: the whole image is resized to the target size, whatever its shape).
_DEFAULT_PREPROCESSING = {
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
class ModelSettings:
    """What the tensors of a model do not show."""

    defaults: str  # a row of _DEFAULT_PREPROCESSING
    eps: float
    antialias: bool
    heads: int | None = None  # None: inferred from the width
    activation: Activation = "gelu"
    pooling: Pooling = "class"
    raw: bool = False
    head_bias: bool = True
    image_size: tuple[int, int] | None = None  # None: the position embeddings are a square
    declared: Mapping[str, int] = field(default_factory=dict)  # sizes; the tensors must agree
    adjust_preprocessing: Callable[[Preprocessing], Preprocessing] = lambda default: default
    labels: Sequence[object] | None = None


@contextmanager
def explain_bad_settings(name: str) -> Iterator[None]:
    """Errors while settings are read become an EngramError: the file is wrong, not the program."""
    try:
        yield
    except Invalid as error:
        raise EngramError(f"The settings of {name} cannot be understood: {error}.") from None
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise EngramError(f"The settings of {name} cannot be understood: {error!r}.") from error


# Plain ViTs by timm's names, and those among them whose layers differ or are in another order.
_TIMM_VIT = re.compile(r"(vit|deit|deit3|flexivit|eva_large)_.*")
_TIMM_OTHER = re.compile(r".*(_rpn_|_rope_|_relpos_|_xp_|resnet|_r26_|_r50_|_18x2_).*")


def check_architecture(config: Mapping[str, Any], name: str) -> None:
    """Refuse a model that its configuration calls something other than a plain ViT."""
    architecture = str(config.get("architecture", config.get("model_type")))
    if "architecture" in config:
        plain = _TIMM_VIT.fullmatch(architecture) and not _TIMM_OTHER.fullmatch(architecture)
    else:
        plain = architecture in FAMILIES
    if not plain:
        raise EngramError(
            f"{name} is a {architecture!r} model, not a plain ViT that can be a trunk; {READABLE} "
            "can."
        )


# transformers

# It leaves out of config.json what equals its defaults: epsilon and activation of each family.
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


def settings_of_transformers(
    config: Mapping[str, Any], layout: Layout, processor: Mapping[str, Any], name: str
) -> ModelSettings:
    """The settings in config.json and in those of the image processor."""
    model_type = config["model_type"]
    family = FAMILIES[model_type]
    vision = config
    if model_type in ("clip", "siglip"):  # of two towers
        vision = (config.get("vision_config") or {}) | (config.get("vision_config_dict") or {})
    TRANSFORMERS.check(vision, "config")
    eps, activation = _DEFAULTS[family]
    activation = vision.get("hidden_act", activation)
    if activation not in _ACTIVATIONS:
        raise EngramError(
            f"{name} uses the activation {activation!r}; {list(_ACTIVATIONS)} are known."
        )
    classifier = layout.names.get("head.linear") == "classifier"
    declared = {"hidden_size": "width", "num_hidden_layers": "depth", "patch_size": "patch"}
    if family != "dinov2":
        declared["intermediate_size"] = "mlp_width"
    return ModelSettings(
        model_type if model_type in _DEFAULT_PREPROCESSING else family,
        float(vision.get("layer_norm_eps", eps)),
        # Of all families, transformers antialiases resized position embeddings of this one alone.
        antialias=model_type == "dinov2_with_registers",
        heads=_pair(vision.get("num_attention_heads", 12), name)[0],
        activation=_ACTIVATIONS[activation],
        pooling=_transformers_pooling(family, layout, classifier),
        raw=family == "clip" and classifier,
        head_bias=family != "clip" or classifier,
        image_size=_pair(vision["image_size"], name) if "image_size" in vision else None,
        declared={o: _pair(vision[t], name)[0] for t, o in declared.items() if t in vision},
        adjust_preprocessing=lambda default: _adjust_to_processor(default, processor, name),
        labels=None if family == "clip" and not classifier else _transformers_labels(config),
    )


def _transformers_pooling(family: str, layout: Layout, classifier: bool) -> Pooling:
    if "head.distilled" in layout.names:
        return "distilled"
    if family == "dinov2":
        return "class+mean"
    if family in ("clip", "siglip") and classifier:
        return "mean"
    return "attention" if family == "siglip" else "class"


def _transformers_labels(config: Mapping[str, Any]) -> list[object] | None:
    """The names of the classes, unless they are the placeholders LABEL_0, LABEL_1, …"""
    names = config.get("id2label")
    if not isinstance(names, dict) or not all(str(key).isdigit() for key in names):
        return None
    labels = [names[key] for key in sorted(names, key=int)]
    return None if all(re.fullmatch(r"LABEL_\d+", str(label)) for label in labels) else labels


# timm


def settings_of_timm(config: Mapping[str, Any], found: Translated, name: str) -> ModelSettings:
    """The settings in timm's config.json; where it is missing, the tensors have to do.

    What they cannot show: QuickGELU (assumed: no) and the number of heads (see `usual_heads`).
    """
    cfg = {**config, **(config.get("pretrained_cfg") or {})}
    arguments = config.get("model_args") or {}
    TIMM.check(cfg, "pretrained_cfg")
    TIMM_ARGUMENTS.check(arguments, "model_args")
    activation = _timm_activation(config, cfg, found)
    pooling = _timm_pooling(cfg.get("global_pool") or arguments.get("global_pool"), found, name)
    clip = found.has("pre_norm")
    defaults = "timm"
    if clip:
        defaults = "clip"
    elif found.has("blocks.0.scale1"):
        defaults = "timm dinov2"
    elif pooling == "distilled":
        defaults = "timm deit"
    size = tuple(cfg.get("input_size") or ())[1:]
    return ModelSettings(
        defaults,
        1e-5 if clip else 1e-6,
        antialias=True,
        heads=arguments.get("num_heads"),
        activation=_ACTIVATIONS.get(arguments.get("act_layer"), activation),
        pooling=pooling,
        image_size=_pair(size, name) if len(set(size)) == 2 else None,
        adjust_preprocessing=lambda default: _adjust_to_timm(default, cfg, name),
        labels=config.get("label_names"),
    )


def _timm_activation(
    config: Mapping[str, Any], cfg: Mapping[str, Any], found: Translated
) -> Activation:
    model = f"{config.get('architecture', '')}.{cfg.get('tag', '')}"
    if found.has("head.pool") or "siglip" in model:
        return "gelu_tanh"  # SigLIP was trained with it, but timm does not use it for all of them
    if found.has("pre_norm") and (
        "quickgelu" in model or model.endswith(".openai") or "QuickGELU" in str(cfg.get("notes"))
    ):
        return "quick_gelu"
    return "gelu"


def _timm_pooling(pool: object, found: Translated, name: str) -> Pooling:
    if pool not in (None, "", "token", "avg", "map"):
        raise EngramError(f"{name} pools its tokens by {pool!r}; token, avg and map can be read.")
    if found.has("head.pool"):
        return "attention"
    if found.has("head.distilled"):
        return "distilled"
    if pool == "avg" or found.has("head.norm") or not found.has("class_token"):
        return "mean"
    return "class"


def _pair(value: object, name: str) -> tuple[int, int]:
    """A size that is given as one number or as two."""
    pair: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value, value]
    if len(pair) == 2 and all(isinstance(n, int) and n > 0 for n in pair):
        return pair[0], pair[1]
    raise EngramError(f"The configuration of {name} has {value!r} where a size was expected.")


# How images are prepared


def default_preprocessing(family: str, size: tuple[int, int]) -> Preprocessing:
    """The usual preprocessing of a family (a row of `_DEFAULT_PREPROCESSING`) at this size."""
    (mean, std), interpolation, crop = _DEFAULT_PREPROCESSING[family]
    resize = None if crop is None else math.floor(max(size) / crop)
    return Preprocessing(size, resize, interpolation, mean, std)


def _adjust_to_timm(default: Preprocessing, cfg: Mapping[str, Any], name: str) -> Preprocessing:
    """The preprocessing of pretrained_cfg; what it leaves out is the default."""
    size = tuple(cfg.get("input_size") or (3, *default.size))[1:]
    mode = cfg.get("crop_mode") or "center"
    if mode not in ("center", "squash"):
        raise EngramError(
            f"{name} has the crop mode {mode!r}, which is not supported; give `preprocessing`."
        )
    resize = None if default.resize is None else default.with_size(_pair(size, name)).resize
    if cfg.get("crop_pct"):
        resize = math.floor(max(size) / cfg["crop_pct"])
    if mode == "squash":
        resize = None
    return Preprocessing(
        _pair(size, name),
        resize,
        cfg.get("interpolation") or default.interpolation,
        tuple(cfg.get("mean") or default.mean),
        tuple(cfg.get("std") or default.std),
    )


# Pillow's numbers of its interpolations.
_PILLOW: dict[Any, str] = dict(
    enumerate(("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"))
)


def _adjust_to_processor(
    default: Preprocessing, cfg: Mapping[str, Any], name: str
) -> Preprocessing:
    """The preprocessing of preprocessor_config.json; what it leaves out is the default."""
    PROCESSOR.check(cfg, "preprocessor_config")
    if not cfg.get("do_rescale", True) or abs(cfg.get("rescale_factor", 1 / 255) - 1 / 255) > 1e-6:
        raise EngramError(
            f"{name} does not scale pixels to the range from 0 to 1, which is not supported; give "
            "`preprocessing`."
        )
    size, resize = _processor_size(cfg, name) or (default.size, default.resize)
    normalise = cfg.get("do_normalize", True)
    return Preprocessing(
        size,
        resize,
        _PILLOW.get(cfg.get("resample"), default.interpolation),
        tuple(cfg.get("image_mean") or default.mean) if normalise else (0.0, 0.0, 0.0),
        tuple(cfg.get("image_std") or default.std) if normalise else (1.0, 1.0, 1.0),
    )


def _processor_size(cfg: Mapping[str, Any], name: str) -> tuple[tuple[int, int], int | None] | None:
    """The size of the images and what their short side is resized to; None if not given.

    A size is a number, or an object with `shortest_edge` or with `height` and `width`.
    """
    given = cfg.get("size")
    if given is None:
        return None
    crop = cfg.get("crop_size") if cfg.get("do_center_crop") else None
    if isinstance(given, dict):
        short = given.get("shortest_edge")
        resized = (given.get("height", short), given.get("width", short))
    else:
        short, resized = (given if crop else None), (given, given)
    if isinstance(crop, dict):
        crop = (crop.get("height"), crop.get("width"))
    size = _pair(crop or resized, name)
    if not crop and not short:
        return size, None
    return size, max(*_pair(resized, name), *size)
