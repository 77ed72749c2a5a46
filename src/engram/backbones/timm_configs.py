"""What timm writes next to its tensors, and which of its families the tensors are of."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engram.backbones.configs import (
    ACTIVATIONS,
    DINOV3_ROTARY,
    READABLE,
    ModelSettings,
    pair_of,
)
from engram.backbones.layouts import FAMILIES
from engram.backbones.schemas import TIMM, TIMM_ARGUMENTS
from engram.backbones.translate import Translated
from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing
from engram.vit.layers import Activation, Pooling
from engram.vit.pos_embed import RotaryConfig

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


@dataclass(frozen=True)
class _Family:
    """What the tensors of a family of timm do not show."""

    defaults: str  # how images are prepared
    eps: float = 1e-6
    head_width: int | None = None  # None: see `usual_heads`


_FAMILIES = {
    "vit": _Family("timm"),
    "deit": _Family("timm deit"),
    "dinov2": _Family("timm dinov2"),
    "clip": _Family("clip", 1e-5),
    "dinov3": _Family("timm dinov2", 1e-5, 64),
    "aimv2": _Family("clip", 1e-5, 128),
    "eva02": _Family("timm eva02"),
    "pe": _Family("timm pe", 1e-5),
}


def settings_of_timm(config: Mapping[str, Any], found: Translated, name: str) -> ModelSettings:
    """The settings in timm's config.json; where it is missing, the tensors have to do.

    What they cannot show: QuickGELU (assumed: no) and the number of heads (see `usual_heads`).
    """
    cfg = {**config, **(config.get("pretrained_cfg") or {})}
    arguments = config.get("model_args") or {}
    TIMM.check(cfg, "pretrained_cfg")
    TIMM_ARGUMENTS.check(arguments, "model_args")
    kind = _family(found)
    family = _FAMILIES[kind]
    size = tuple(cfg.get("input_size") or ())[1:]
    image_size = pair_of(size, name) if len(set(size)) == 2 else None
    if kind == "dinov3":  # no tensor shows it
        image_size = pair_of(size or 256, name)
    return ModelSettings(
        family.defaults,
        family.eps,
        antialias=True,
        heads=arguments.get("num_heads") or _heads(family, found),
        activation=ACTIVATIONS.get(
            arguments.get("act_layer"), _timm_activation(config, cfg, kind, found)
        ),
        pooling=_timm_pooling(cfg.get("global_pool") or arguments.get("global_pool"), found, name),
        norm="rms" if kind == "aimv2" else "layer",
        positions="none" if kind == "dinov3" else "learned",
        rotary=_timm_rotary(kind, config, arguments, found),
        pool_heads=arguments.get("attn_pool_num_heads") or (8 if kind == "pe" else None),
        image_size=image_size,
        adjust_preprocessing=lambda default: _adjust_to_timm(default, cfg, name),
        labels=config.get("label_names"),
    )


def _family(found: Translated) -> str:
    """The family, a name of `_FAMILIES`, that the tensors are of."""
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


def _heads(family: _Family, found: Translated) -> int | None:
    if family.head_width is None or "patch.weight" not in found.tensors:
        return None
    width = found.tensors["patch.weight"].shape[0]
    if width == 4096:  # DINOv3 with 7 billion parameters
        return 32
    return max(width // family.head_width, 1)


def _timm_rotary(
    kind: str, config: Mapping[str, Any], arguments: Mapping[str, Any], found: Translated
) -> RotaryConfig | None:
    """Rotary positions of the family: the angles that its patches span were set in training."""
    if kind == "dinov3":
        return DINOV3_ROTARY
    if kind not in ("eva02", "pe"):
        return None
    given = arguments.get("ref_feat_shape")
    side = given[0] if isinstance(given, (list, tuple)) else given
    if kind == "eva02":
        return RotaryConfig(base=10_000.0, span=float(side or 16))
    class_token = found.has("class_token")
    if side is None:
        trained = re.search(r"_patch(\d+)_(\d+)$", str(config.get("architecture", "")))
        count = len(found.tensors.get("position", ())) - class_token
        side = int(trained[2]) // int(trained[1]) if trained else math.isqrt(max(count, 1))
    offset = float(class_token)
    return RotaryConfig(base=10_000.0, span=float(side), offset=offset, columns_first=True)


def _timm_activation(
    config: Mapping[str, Any], cfg: Mapping[str, Any], kind: str, found: Translated
) -> Activation:
    if kind == "pe":
        return "gelu"
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


def _adjust_to_timm(default: Preprocessing, cfg: Mapping[str, Any], name: str) -> Preprocessing:
    """The preprocessing of pretrained_cfg; what it leaves out is the default."""
    size = tuple(cfg.get("input_size") or (3, *default.size))[1:]
    mode = cfg.get("crop_mode") or "center"
    if mode not in ("center", "squash"):
        raise EngramError(
            f"{name} has the crop mode {mode!r}, which is not supported; give `preprocessing`."
        )
    resize = None if default.resize is None else default.with_size(pair_of(size, name)).resize
    if cfg.get("crop_pct"):
        resize = math.floor(max(size) / cfg["crop_pct"])
    if mode == "squash":
        resize = None
    return Preprocessing(
        pair_of(size, name),
        resize,
        cfg.get("interpolation") or default.interpolation,
        tuple(cfg.get("mean") or default.mean),
        tuple(cfg.get("std") or default.std),
    )
