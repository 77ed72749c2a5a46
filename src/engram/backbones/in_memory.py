"""`from_timm` and `from_transformers`: a model in memory becomes a backbone on the same storage.

A model is asked only for its state_dict and its configuration. Neither timm nor transformers is
imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from engram.backbones.build import Overrides, build_backbone, parse
from engram.backbones.configs import (
    READABLE,
    check_architecture,
    timm_settings,
    transformers_settings,
)
from engram.errors import EngramError
from engram.images.preprocessing import Preprocessing
from engram.vit import ViT
from engram.vit.layers import Activation


def from_transformers(
    model: nn.Module,
    *,
    processor: Any = None,
    source: str | None = None,
    image_size: int | tuple[int, int] | None = None,
    preprocessing: Preprocessing | None = None,
    antialias: bool | None = None,
) -> ViT:
    """The backbone inside a transformers model in memory, of a family that `load_backbone` reads.

    Tensors in fp32 keep their storage, so they are in memory once. Copies are made only of what is
    several tensors there and one here: queries, keys and values (a quarter of a layer), the first
    half of a gated MLP, and the class token of DINOv2 with registers. Weights of another type are
    copied into fp32. The model itself is not changed, nor is which of its parameters train. Do not
    train it while it is a backbone; `backbone.fingerprint` shows if that happened.

    Args:
        model: The model.
        processor: Its image processor, if images are not prepared in the family's usual way.
        source: What engrams record as their backbone. By default what the model was loaded from, if
            its configuration says so.
        image_size: Height and width of the images, if not those the weights were trained at.
        preprocessing: How images become pixels, if not as the processor says.
        antialias: Whether position embeddings are resized with antialiasing.

    Returns:
        The backbone.

    Raises:
        EngramError: It is no model of transformers, or no plain ViT.

    Examples:
        >>> vit = transformers.ViTModel(transformers.ViTConfig(num_hidden_layers=2))
        >>> model = engram.MemoryViT(engram.from_transformers(vit))
    """
    model = _unwrapped(model, "from_transformers")
    config = _as_dict(getattr(model, "config", None), "config", model)
    loaded_from = config.get("_name_or_path") or getattr(model.config, "name_or_path", "")
    name = source or str(loaded_from or "") or f"{type(model).__name__} (an object)"
    if "model_type" not in config:
        raise EngramError(
            f"The model given to from_transformers ({type(model).__name__}) has no config with a "
            "model_type, so it is not a model of transformers; from_timm takes models of timm."
        )
    check_architecture({"model_type": config["model_type"]}, name)
    settings = _as_dict(processor, "processor", model) if processor is not None else {}
    settings = settings.get("image_processor") or settings
    read = partial(transformers_settings, config, settings)
    parsed = parse(model.state_dict(), config["model_type"], read, name, share=True)
    return build_backbone(parsed, name, Overrides(image_size, preprocessing, antialias))


def from_timm(
    model: nn.Module,
    *,
    source: str | None = None,
    image_size: int | tuple[int, int] | None = None,
    preprocessing: Preprocessing | None = None,
    antialias: bool | None = None,
    heads: int | None = None,
    activation: Activation | None = None,
) -> ViT:
    """The backbone inside a timm model in memory, a VisionTransformer that `load_backbone` could
    read.

    All tensors in fp32 keep their storage: nothing is in memory twice. Weights of another type are
    copied into fp32. The model itself is not changed, nor is which of its parameters train. Do not
    train it while it is a backbone; `backbone.fingerprint` shows if that happened.

    Args:
        model: The model. Its `pretrained_cfg` says how images are prepared.
        source: What engrams record as their backbone. By default what `pretrained_cfg` says.
        image_size: Height and width of the images, if not those the weights were trained at.
        preprocessing: How images become pixels, if not as `pretrained_cfg` says.
        antialias: Whether position embeddings are resized with antialiasing.
        heads: Number of attention heads, if what was inferred is wrong.
        activation: Activation of the MLPs, if what was inferred is wrong.

    Returns:
        The backbone.

    Raises:
        EngramError: It is no model of timm, or no plain ViT.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", pretrained=True)  # doctest: +SKIP
        >>> model = engram.MemoryViT(engram.from_timm(vit))  # doctest: +SKIP
    """
    model = _unwrapped(model, "from_timm")
    tensors = model.state_dict()
    if any("patch_embedding" in key for key in tensors):
        raise EngramError(
            f"The model given to from_timm ({type(model).__name__}) has the tensor names of "
            "transformers; use from_transformers."
        )
    cfg = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    cfg = _as_dict(cfg, "pretrained_cfg", model) if cfg is not None else {}
    name = source or _timm_source(cfg) or f"{type(model).__name__} (an object)"
    config: dict[str, Any] = {"pretrained_cfg": cfg, "label_names": cfg.get("label_names")}
    if cfg.get("architecture"):
        config["architecture"] = cfg["architecture"]
        check_architecture(config, name)
    pool = getattr(model, "global_pool", None)
    if isinstance(pool, str):
        config["global_pool"] = cfg["global_pool"] = pool
    config["model_args"] = _arguments(model)
    parsed = parse(tensors, "timm", partial(timm_settings, config), name, share=True)
    overrides = Overrides(image_size, preprocessing, antialias, heads, activation)
    return build_backbone(parsed, name, overrides)


def _unwrapped(model: nn.Module, function: str) -> nn.Module:
    """The model inside DataParallel and torch.compile."""
    if not isinstance(model, nn.Module):
        raise EngramError(
            f"{function} got {model!r}; it takes a model in memory ({READABLE}). For paths and Hub "
            "ids, use load_backbone."
        )
    while True:
        inner = getattr(model, "_orig_mod", getattr(model, "module", None))
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _as_dict(settings: Any, what: str, model: nn.Module) -> dict[str, Any]:
    """A configuration as a dictionary, whether it is one or can become one."""
    if hasattr(settings, "to_dict"):
        settings = settings.to_dict()
    if not isinstance(settings, Mapping):
        raise EngramError(
            f"The {what} of the model {type(model).__name__} is {settings!r}; settings were "
            "expected."
        )
    return dict(settings)


def _timm_source(cfg: Mapping[str, Any]) -> str:
    """Source of a timm model's weights: a Hub id, a model's name, or nothing."""
    model = ".".join(str(cfg[key]) for key in ("architecture", "tag") if cfg.get(key))
    hub_id = str(cfg.get("hf_hub_id") or "")
    return (hub_id + model if hub_id.endswith("/") else hub_id) or model


def _arguments(model: nn.Module) -> dict[str, Any]:
    """Arguments that the model was made with, which the tensors do not show."""
    found, modules = {}, dict(model.named_modules())
    for argument, module, attribute in (
        ("num_heads", "blocks.0.attn", "num_heads"),
        ("attn_pool_num_heads", "attn_pool", "num_heads"),
        ("ref_feat_shape", "rope", "ref_feat_shape"),
    ):
        part = modules.get(module)
        value = getattr(part, attribute, None)
        if isinstance(value, (int, list, tuple)):
            found[argument] = value if isinstance(value, int) else list(value)
    return found
