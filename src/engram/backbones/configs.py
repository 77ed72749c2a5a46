"""Configurations of transformers and timm, read as `ModelSettings`: what tensors do not show."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from engram.backbones.layouts import FAMILIES
from engram.backbones.translate import Translated
from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing
from engram.util.schema import Invalid
from engram.vit.layers import Activation, Pooling
from engram.vit.pos_embed import RotaryConfig

#: The families, as errors list them; docs/backbones.md has a table of them.
READABLE = "ViT, DeiT, DINO, DINOv2, DINOv3, CLIP, SigLIP, SigLIP 2, MAE, AIMv2, EVA-02 and PE-Core"

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
    """Settings of a model that its tensors do not show."""

    preprocessing: Callable[[tuple[int, int]], Preprocessing]  # of images of a size
    vit: dict[str, Any]  # fields of `ViTConfig`; heads of None are inferred from the width
    head: dict[str, Any] = field(default_factory=dict)  # fields of `HeadConfig`
    image_size: tuple[int, int] | None = None  # None: the position embeddings are a square
    declared: Mapping[str, int] = field(default_factory=dict)  # sizes; the tensors must agree
    labels: Sequence[object] | None = None


_WRONG_TYPES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


@contextmanager
def explain_bad_settings(name: str) -> Iterator[None]:
    """Turn errors while settings are read into an EngramError that names the file."""
    try:
        yield
    except (EngramError, *_WRONG_TYPES) as error:
        if isinstance(error, EngramError) and name in str(error):
            raise
        sentence = isinstance(error, (EngramError, Invalid))
        reason = str(error).rstrip(".") if sentence else repr(error)
        raise EngramError(f"The settings of {name} cannot be understood: {reason}.") from error


def default_preprocessing(family: str, size: tuple[int, int]) -> Preprocessing:
    """The usual preprocessing of a family (a row of `_DEFAULT_PREPROCESSING`) at this size."""
    (mean, std), interpolation, crop = _DEFAULT_PREPROCESSING[family]
    resize = None if crop is None else math.floor(max(size) / crop)
    return Preprocessing(size, resize, interpolation, mean, std)


# Plain ViTs by timm's names, and those among them whose layers differ or are in another order.
_TIMM_VIT = re.compile(
    r"(vit|deit|deit3|flexivit|eva_large|eva02_(tiny|small|base|large)|aimv2)_.*"
)
_TIMM_OTHER = re.compile(
    r".*(_rpn_|_rope_|_relpos_|_xp_|resnet|_r26_|_r50_|_18x2_|_pe_lang_|_pe_spatial_|sapiens).*"
)
_INSTEAD = {
    "siglip2": "; this one is NaFlex, which pads every image. Take a SigLIP 2 of fixed resolution, "
    "such as google/siglip2-base-patch16-224"
}


def check_architecture(config: Mapping[str, Any], name: str) -> None:
    """Refuse a model that its configuration calls something other than a plain ViT."""
    architecture = str(config.get("architecture", config.get("model_type")))
    if "architecture" in config:
        plain = _TIMM_VIT.fullmatch(architecture) and not _TIMM_OTHER.fullmatch(architecture)
    else:
        plain = architecture in FAMILIES
    if not plain:
        raise EngramError(
            f"{name} is a {architecture!r} model, not a plain ViT that can be a backbone; "
            f"{READABLE} can{_INSTEAD.get(architecture, '')}."
        )


# transformers

#: DINOv3: the centres of the patches of an image are between -1 and 1, times 2 pi.
_DINOV3_ROTARY = RotaryConfig(
    base=100.0, span=4 * math.pi, start=-2 * math.pi, offset=0.5, halves=True
)
# By model_type or family: fields of `ViTConfig` and of `HeadConfig`, such as the defaults that are
# left out of config.json. transformers antialiases resized position embeddings of DINOv2 with
# registers. It has none to resize in DINOv3 and AIMv2, which are as in timm then.
_TRANSFORMERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vit": ({"eps": 1e-12}, {}),
    "deit": ({"eps": 1e-12}, {}),
    "dinov2": ({"eps": 1e-6}, {"pooling": "class+mean"}),
    "dinov2_with_registers": ({"eps": 1e-6, "antialias": True}, {"pooling": "class+mean"}),
    "dinov3": ({"eps": 1e-5, "antialias": True, "positions": "none", "rotary": _DINOV3_ROTARY}, {}),
    "clip": ({"eps": 1e-5, "activation": "quick_gelu"}, {"projection": True, "bias": False}),
    "siglip": ({"eps": 1e-6, "activation": "gelu_pytorch_tanh"}, {"pooling": "attention"}),
    "aimv2": (
        {"eps": 1e-5, "antialias": True, "activation": "silu", "norm": "rms"},
        {
            "pooling": "attention",
            "pool_mlp_width": 0,
            "pool_query": False,
            "projection": True,
            "bias": False,
        },
    ),
}
_ACTIVATIONS: dict[object, Activation] = {
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "silu": "swiglu",
}


def transformers_settings(
    config: Mapping[str, Any], processor: Mapping[str, Any], found: Translated
) -> ModelSettings:
    """Read config.json and the settings of the image processor."""
    model_type = config["model_type"]
    family = FAMILIES[model_type]
    vision = config
    two_towers = model_type == "aimv2" and "vision_config" in config
    if two_towers or model_type in ("clip", "siglip"):
        vision = (config.get("vision_config") or {}) | (config.get("vision_config_dict") or {})
    names, (own, head) = found.layout.names, _TRANSFORMERS.get(model_type, _TRANSFORMERS[family])
    vit = {"activation": "gelu", "antialias": False, **own}
    activation = vision.get("hidden_act", vit["activation"])
    gated = len(names["blocks.{i}.mlp.fc1"]) > 1 and family != "dinov2"
    if activation not in _ACTIVATIONS or (activation == "silu") != gated:
        raise Invalid(
            f"it uses the activation {activation!r} in {'a gated' if gated else 'an'} MLP; silu is "
            f"known in gated MLPs, and in others {[a for a in _ACTIVATIONS if a != 'silu']}"
        )
    eps = "rms_norm_eps" if family == "aimv2" else "layer_norm_eps"
    vit |= {"eps": float(vision.get(eps, vit["eps"])), "activation": _ACTIVATIONS[activation]}
    vit["heads"] = _pair(vision.get("num_attention_heads", 12))[0]
    if family == "dinov3":
        base = float(vision.get("rope_theta", _DINOV3_ROTARY.base))
        vit["rotary"] = replace(_DINOV3_ROTARY, base=base)
    if family == "aimv2" and vision.get("is_native"):
        vit["positions"] = "waves"
    classifier = names["head.linear"] == ("classifier",)
    if classifier and family in ("clip", "siglip"):
        head = {"pooling": "mean", "raw": family == "clip"}
    declared = {"hidden_size": "width", "num_hidden_layers": "depth", "patch_size": "patch"}
    if family != "dinov2":
        declared["intermediate_size"] = "mlp_width"
    usual = model_type if model_type in _DEFAULT_PREPROCESSING else family
    return ModelSettings(
        partial(_processor_preprocessing, usual, processor),
        vit,
        head,
        image_size=_pair(vision["image_size"]) if "image_size" in vision else None,
        declared={o: _pair(vision[t])[0] for t, o in declared.items() if t in vision},
        labels=None if family == "clip" and not classifier else _transformers_labels(config),
    )


def _transformers_labels(config: Mapping[str, Any]) -> list[object] | None:
    """The names of the classes, unless they are the placeholders LABEL_0, LABEL_1, …"""
    names = config.get("id2label")
    if not isinstance(names, dict) or not all(str(key).isdigit() for key in names):
        return None
    labels = [names[key] for key in sorted(names, key=int)]
    return None if all(re.fullmatch(r"LABEL_\d+", str(label)) for label in labels) else labels


def _pair(value: object) -> tuple[int, int]:
    """A size that is given as one number or as two."""
    pair: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value, value]
    if len(pair) == 2 and all(isinstance(n, int) and n > 0 for n in pair):
        return pair[0], pair[1]
    raise Invalid(f"there is {value!r} where a size was expected")


_PILLOW = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # in Pillow's numbers


def _processor_preprocessing(
    family: str, cfg: Mapping[str, Any], size: tuple[int, int]
) -> Preprocessing:
    """The preprocessing of preprocessor_config.json; what it leaves out is as in the family."""
    default = default_preprocessing(family, size)
    if not cfg.get("do_rescale", True) or abs(cfg.get("rescale_factor", 1 / 255) - 1 / 255) > 1e-6:
        raise Invalid(
            "pixels are not scaled to the range from 0 to 1, which is not supported; give "
            "`preprocessing`"
        )
    resize = default.resize
    if cfg.get("size") is not None:
        size, resize = _processor_size(cfg)
    normalise = cfg.get("do_normalize", True)
    return Preprocessing(
        size,
        resize,
        dict(enumerate(_PILLOW)).get(cfg.get("resample", -1), default.interpolation),
        tuple(cfg.get("image_mean") or default.mean) if normalise else (0.0, 0.0, 0.0),
        tuple(cfg.get("image_std") or default.std) if normalise else (1.0, 1.0, 1.0),
    )


def _processor_size(cfg: Mapping[str, Any]) -> tuple[tuple[int, int], int | None]:
    """The size of the images, and what their short side is resized to before the crop."""
    given = cfg["size"]  # a number, or an object with `shortest_edge` or with `height` and `width`
    crop = cfg.get("crop_size") if cfg.get("do_center_crop") else None
    if isinstance(given, dict):
        short = given.get("shortest_edge")
        resized = (given.get("height", short), given.get("width", short))
    else:
        short, resized = (given if crop else None), (given, given)
    if isinstance(crop, dict):
        crop = (crop.get("height"), crop.get("width"))
    size = _pair(crop or resized)
    return size, max(*_pair(resized), *size) if crop or short else None


# timm

# By family: how images are prepared, epsilon, and the width of a head (None: see `usual_heads`).
_TIMM_FAMILIES: dict[str, tuple[str, float, int | None]] = {
    "vit": ("timm", 1e-6, None),
    "deit": ("timm deit", 1e-6, None),
    "dinov2": ("timm dinov2", 1e-6, None),
    "clip": ("clip", 1e-5, None),
    "dinov3": ("timm dinov2", 1e-5, 64),
    "aimv2": ("clip", 1e-5, 128),
    "eva02": ("timm eva02", 1e-6, None),
    "pe": ("timm pe", 1e-5, None),
}


def timm_settings(config: Mapping[str, Any], found: Translated) -> ModelSettings:
    """Read timm's config.json; where it is missing, the tensors have to do.

    What they cannot show: QuickGELU (assumed: no) and the number of heads (see `usual_heads`).
    """
    cfg = {**config, **(config.get("pretrained_cfg") or {})}
    arguments = config.get("model_args") or {}
    family = _timm_family(found)
    defaults, eps, head_width = _TIMM_FAMILIES[family]
    heads = arguments.get("num_heads")
    if not heads and head_width and "patch.weight" in found.tensors:
        width = found.tensors["patch.weight"].shape[0]
        heads = 32 if width == 4096 else max(width // head_width, 1)  # 4096: DINOv3-7B
    size = tuple(cfg.get("input_size") or ())[1:]
    image_size = _pair(size) if len(set(size)) == 2 else None
    if family == "dinov3":  # no tensor shows it
        image_size = _pair(size or 256)
    activation = _timm_activation(config, cfg, family, found)
    return ModelSettings(
        partial(_timm_preprocessing, defaults, cfg),
        {
            "eps": eps,
            "heads": heads,
            "activation": _ACTIVATIONS.get(arguments.get("act_layer"), activation),
            "norm": "rms" if family == "aimv2" else "layer",
            "positions": "none" if family == "dinov3" else "learned",
            "rotary": _timm_rotary(family, config, arguments, found),
        },
        {
            "pooling": _timm_pooling(cfg.get("global_pool") or arguments.get("global_pool"), found),
            "projection": family in ("clip", "eva02", "pe") and _without_bias(found),
            "pool_heads": arguments.get("attn_pool_num_heads") or (8 if family == "pe" else None),
        },
        image_size=image_size,
        labels=config.get("label_names"),
    )


def _without_bias(found: Translated) -> bool:
    """Whether the linear layer of the head is a projection: timm gives that a bias of zeros."""
    bias = found.tensors.get("head.linear.bias")
    return bias is None or not bool(bias.any())


def _timm_family(found: Translated) -> str:
    """The family, a name of `_TIMM_FAMILIES`, that the tensors are of."""
    tensors = found.tensors
    if found.has("pre_norm"):
        return "pe" if found.has("head.pool") else "clip"
    if found.has("blocks.0.scale1"):
        rotary = found.has("class_token") and found.has("registers") and not found.has("position")
        return "dinov3" if rotary else "dinov2"
    if found.has("patch_norm") and "blocks.0.norm1.bias" not in tensors:
        return "aimv2"
    if found.has("head.distilled"):
        return "deit"
    fc1, fc2 = (tensors.get(f"blocks.0.mlp.{layer}.weight") for layer in ("fc1", "fc2"))
    bias = tensors.get("blocks.0.qkv.bias")
    gated = fc1 is not None and fc2 is not None and fc1.shape[:1] == (2 * fc2.shape[-1],)
    if gated and bias is not None and not bias.chunk(3)[1].any():  # no bias of keys
        return "eva02"
    return "vit"


def _timm_rotary(
    family: str, config: Mapping[str, Any], arguments: Mapping[str, Any], found: Translated
) -> RotaryConfig | None:
    """Rotary positions of the family: the angles that its patches span were set in training."""
    if family == "dinov3":
        return _DINOV3_ROTARY
    if family not in ("eva02", "pe"):
        return None
    given = arguments.get("ref_feat_shape")
    side = given[0] if isinstance(given, (list, tuple)) else given
    if family == "eva02":
        return RotaryConfig(base=10_000.0, span=float(side or 16))
    class_token = found.has("class_token")
    if side is None:
        trained = re.search(r"_patch(\d+)_(\d+)$", str(config.get("architecture", "")))
        count = len(found.tensors.get("position", ())) - class_token
        side = int(trained[2]) // int(trained[1]) if trained else math.isqrt(max(count, 1))
    offset = float(class_token)
    return RotaryConfig(base=10_000.0, span=float(side), offset=offset, columns_first=True)


def _timm_activation(
    config: Mapping[str, Any], cfg: Mapping[str, Any], family: str, found: Translated
) -> Activation:
    if family == "pe":
        return "gelu"
    model = f"{config.get('architecture', '')}.{cfg.get('tag', '')}"
    if found.has("head.pool") or "siglip" in model:
        return "gelu_tanh"  # SigLIP was trained with it, but timm does not use it for all of them
    if found.has("pre_norm") and (
        "quickgelu" in model or model.endswith(".openai") or "QuickGELU" in str(cfg.get("notes"))
    ):
        return "quick_gelu"
    return "gelu"


def _timm_pooling(pool: object, found: Translated) -> Pooling:
    if pool not in (None, "", "token", "avg", "map"):
        raise Invalid(f"its tokens are pooled by {pool!r}; token, avg and map can be read")
    if found.has("head.pool"):
        return "attention"
    if pool == "avg" or found.has("head.norm") or not found.has("class_token"):
        return "mean"
    return "class"


def _timm_preprocessing(
    family: str, cfg: Mapping[str, Any], usual: tuple[int, int]
) -> Preprocessing:
    """The preprocessing of pretrained_cfg; what it leaves out is as in the family."""
    default = default_preprocessing(family, usual)
    size = tuple(cfg.get("input_size") or (3, *usual))[1:]
    mode = cfg.get("crop_mode") or "center"
    if mode not in ("center", "squash"):
        raise Invalid(f"the crop mode {mode!r} is not supported; give `preprocessing`")
    resize = None if default.resize is None else default.with_size(_pair(size)).resize
    if cfg.get("crop_pct"):
        resize = math.floor(max(size) / cfg["crop_pct"])
    return Preprocessing(
        _pair(size),
        None if mode == "squash" else resize,
        cfg.get("interpolation") or default.interpolation,
        tuple(cfg.get("mean") or default.mean),
        tuple(cfg.get("std") or default.std),
    )
