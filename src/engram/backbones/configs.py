"""What transformers writes next to its tensors: configurations -> `ModelSettings`.

`timm_configs.py` reads those of timm.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from engram.backbones.families import BACKBONE_FAMILIES
from engram.backbones.layouts import FAMILIES, Layout
from engram.backbones.schemas import PROCESSOR, TRANSFORMERS
from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing
from engram.util.schema import Invalid
from engram.vit.layers import Activation, Norm, Pooling, Positions
from engram.vit.pos_embed import RotaryConfig

#: The families, as errors list them.
READABLE = f"{', '.join(f.name for f in BACKBONE_FAMILIES[:-1])} and {BACKBONE_FAMILIES[-1].name}"

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
    "dinov3": (_IMAGENET, "bilinear", None),
    "clip": (_OPENAI, "bicubic", 1.0),
    "siglip": ((_HALF, _HALF), "bicubic", None),
    "aimv2": (_OPENAI, "bicubic", 1.0),
    "timm": ((_HALF, _HALF), "bicubic", 0.9),
    "timm deit": (_IMAGENET, "bicubic", 0.9),
    "timm dinov2": (_IMAGENET, "bicubic", 1.0),
    "timm eva02": (_OPENAI, "bicubic", 0.9),
    "timm pe": ((_HALF, _HALF), "bicubic", 1.0),
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
    norm: Norm = "layer"
    positions: Positions = "learned"
    rotary: RotaryConfig | None = None
    pool_heads: int | None = None  # of attention pooling; None: as many as the layers
    plain_pool: bool = False  # attention pooling without an MLP, whose query is the probe itself
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


# transformers

# It leaves out of config.json what equals its defaults: epsilon and activation of each family.
_DEFAULTS = {
    "vit": (1e-12, "gelu"),
    "deit": (1e-12, "gelu"),
    "dinov2": (1e-6, "gelu"),
    "clip": (1e-5, "quick_gelu"),
    "siglip": (1e-6, "gelu_pytorch_tanh"),
    "dinov3": (1e-5, "gelu"),
    "aimv2": (1e-5, "silu"),
}
ACTIVATIONS: dict[object, Activation] = {
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "silu": "swiglu",
}
#: DINOv3: the centres of the patches of an image are between -1 and 1, times 2 pi.
DINOV3_ROTARY = RotaryConfig(
    base=100.0, span=4 * math.pi, start=-2 * math.pi, offset=0.5, halves=True
)


def settings_of_transformers(
    config: Mapping[str, Any], layout: Layout, processor: Mapping[str, Any], name: str
) -> ModelSettings:
    """The settings in config.json and in those of the image processor."""
    model_type = config["model_type"]
    family = FAMILIES[model_type]
    vision = config
    two_towers = model_type == "aimv2" and "vision_config" in config
    if two_towers or model_type in ("clip", "siglip"):
        vision = (config.get("vision_config") or {}) | (config.get("vision_config_dict") or {})
    TRANSFORMERS.check(vision, "config")
    eps, activation = _DEFAULTS[family]
    activation = vision.get("hidden_act", activation)
    gated = isinstance(layout.names["blocks.{i}.mlp.fc1"], tuple) and family != "dinov2"
    if activation not in ACTIVATIONS or (activation == "silu") != gated:
        raise EngramError(
            f"{name} uses the activation {activation!r} in {'a gated' if gated else 'an'} MLP; "
            "silu is known in gated MLPs, and in others "
            f"{[known for known in ACTIVATIONS if known != 'silu']}."
        )
    classifier = layout.names.get("head.linear") == "classifier"
    declared = {"hidden_size": "width", "num_hidden_layers": "depth", "patch_size": "patch"}
    if family != "dinov2":
        declared["intermediate_size"] = "mlp_width"
    return ModelSettings(
        model_type if model_type in _DEFAULT_PREPROCESSING else family,
        float(vision.get("rms_norm_eps" if family == "aimv2" else "layer_norm_eps", eps)),
        # transformers antialiases resized position embeddings of the first of these. It has none
        # to resize in the others, which are as in timm then.
        antialias=model_type == "dinov2_with_registers" or family in ("dinov3", "aimv2"),
        heads=pair_of(vision.get("num_attention_heads", 12), name)[0],
        activation=ACTIVATIONS[activation],
        pooling=_transformers_pooling(family, layout, classifier),
        raw=family == "clip" and classifier,
        head_bias=family not in ("clip", "aimv2") or classifier,
        norm="rms" if family == "aimv2" else "layer",
        positions=_transformers_positions(family, vision),
        rotary=_transformers_rotary(vision) if family == "dinov3" else None,
        plain_pool=family == "aimv2",
        image_size=pair_of(vision["image_size"], name) if "image_size" in vision else None,
        declared={o: pair_of(vision[t], name)[0] for t, o in declared.items() if t in vision},
        adjust_preprocessing=lambda default: _adjust_to_processor(default, processor, name),
        labels=None if family == "clip" and not classifier else _transformers_labels(config),
    )


def _transformers_positions(family: str, vision: Mapping[str, Any]) -> Positions:
    if family == "dinov3":
        return "none"
    return "waves" if family == "aimv2" and vision.get("is_native") else "learned"


def _transformers_rotary(vision: Mapping[str, Any]) -> RotaryConfig:
    return replace(DINOV3_ROTARY, base=float(vision.get("rope_theta", DINOV3_ROTARY.base)))


def _transformers_pooling(family: str, layout: Layout, classifier: bool) -> Pooling:
    if "head.distilled" in layout.names:
        return "distilled"
    if family == "dinov2":
        return "class+mean"
    if family in ("clip", "siglip") and classifier:
        return "mean"
    return "attention" if family in ("siglip", "aimv2") else "class"


def _transformers_labels(config: Mapping[str, Any]) -> list[object] | None:
    """The names of the classes, unless they are the placeholders LABEL_0, LABEL_1, …"""
    names = config.get("id2label")
    if not isinstance(names, dict) or not all(str(key).isdigit() for key in names):
        return None
    labels = [names[key] for key in sorted(names, key=int)]
    return None if all(re.fullmatch(r"LABEL_\d+", str(label)) for label in labels) else labels


def pair_of(value: object, name: str) -> tuple[int, int]:
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
    size = pair_of(crop or resized, name)
    if not crop and not short:
        return size, None
    return size, max(*pair_of(resized, name), *size)
