"""From the tensors and the configuration of another library to a backbone.

Files (load.py) and models in memory (objects.py) go the same way: the tensors get our names
(layouts.py), their shapes show almost all of the architecture (infer.py), and the configuration
adds the rest (configs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engram.backbones.configs import (
    ModelSettings,
    default_preprocessing,
    explain_bad_settings,
    settings_of_transformers,
)
from engram.backbones.imagenet import imagenet_names
from engram.backbones.infer import infer_config, split_positions
from engram.backbones.layouts import (
    Layout,
    join_biases,
    split_in_proj,
    timm_layout,
    transformers_layout,
)
from engram.backbones.schemas import CONFIG, MAX_PATCHES, can_be_cut
from engram.backbones.timm_configs import settings_of_timm
from engram.backbones.translate import Translated, check_complete, their_names, translate
from engram.errors import EngramError
from engram.images.preprocessing import MAX_SIDE, Preprocessing
from engram.util.schema import Invalid
from engram.vit.layers import Activation
from engram.vit.vit import ViT, ViTConfig


@dataclass(frozen=True)
class ParsedModel:
    """A model's tensors under our names, and all that is needed to make a backbone of them."""

    found: Translated
    layout: Layout
    config: ViTConfig
    preprocessing: Callable[[], Preprocessing]  # raises where the settings make no sense
    labels: Sequence[object] | None


@dataclass(frozen=True)
class Overrides:
    """What the caller sets instead of what the source says; None keeps it. See `load_backbone`."""

    image_size: int | tuple[int, int] | None = None
    preprocessing: Preprocessing | None = None
    antialias: bool | None = None
    heads: int | None = None
    activation: Activation | None = None


# From another library's tensors to ours


def parse_timm(
    tensors: Mapping[str, Tensor], config: dict[str, Any], name: str, share: bool = False
) -> ParsedModel:
    """A model under timm's tensor names. With `share`, tensors keep their storage if they can."""
    layout = timm_layout(tensors)
    found = translate(join_biases(tensors), layout, name, share)
    with explain_bad_settings(name):
        settings = settings_of_timm(config, found, name)
    return parse_translated(found, layout, settings, name, share)


def parse_transformers(
    tensors: Mapping[str, Tensor],
    config: dict[str, Any],
    processor: Mapping[str, Any],
    name: str,
    share: bool = False,
) -> ParsedModel:
    """A model under the names of transformers' files, with its two configurations."""
    tensors = split_in_proj(tensors)
    layout = transformers_layout(config["model_type"], tensors)
    found = translate(tensors, layout, name, share)
    with explain_bad_settings(name):
        settings = settings_of_transformers(config, layout, processor, name)
    return parse_translated(found, layout, settings, name, share)


def parse_translated(
    found: Translated, layout: Layout, settings: ModelSettings, name: str, share: bool = False
) -> ParsedModel:
    """A model whose tensors have our names already, with what its configuration says."""
    config = infer_config(found, layout, settings, name)
    found = replace(found, tensors=split_positions(found.tensors, config, share))
    default = default_preprocessing(settings.defaults, settings.image_size or config.image_size)
    return ParsedModel(
        found, layout, config, lambda: settings.adjust_preprocessing(default), settings.labels
    )


# From our tensors to a backbone


def build_backbone(parsed: ParsedModel, name: str, source: str, overrides: Overrides) -> ViT:
    """Build the backbone of a parsed model; errors call it `name`, engrams record `source`."""
    given = {n: getattr(overrides, n) for n in ("antialias", "heads", "activation")}
    config = replace(parsed.config, **{n: v for n, v in given.items() if v is not None})
    backbone = _assemble(config, parsed.found, parsed.layout, name)
    backbone.source = source
    with explain_bad_settings(name):
        preprocessing = overrides.preprocessing or parsed.preprocessing()
        if config.head and parsed.labels and len(parsed.labels) == config.head.classes:
            backbone.labels = tuple(str(label) for label in parsed.labels)
    if backbone.labels is None and backbone.head is not None and backbone.head.linear is not None:
        backbone.labels = imagenet_names(backbone.head.linear.weight)
    size = _image_size(preprocessing.size, overrides, backbone)
    if size != preprocessing.size:
        preprocessing = preprocessing.with_size(size)
    backbone.preprocessing = preprocessing
    return backbone


def _assemble(config: ViTConfig, found: Translated, layout: Layout, name: str) -> ViT:
    """The ViT with these tensors, if they are all it has and all it needs."""
    with explain_bad_settings(name):
        CONFIG.check(asdict(config), "")
        if config.depth > len(found.tensors):
            raise Invalid(f"{config.depth} layers, but {len(found.tensors)} tensors")
        if config.prefix_positions > max(1, config.prefix):  # one is there, and unused, without any
            raise Invalid(f"{config.prefix_positions} positions for {config.prefix} tokens")
        with torch.device("meta"):  # no memory and no random numbers for what is replaced
            vit = ViT(config)
    expected = vit.state_dict()
    missing = [n for key in expected if key not in found.tensors for n in their_names(key, layout)]
    surplus = [n for key in found.tensors if key not in expected for n in their_names(key, layout)]
    check_complete(name, sorted({*missing, *found.missing}), sorted({*surplus, *found.surplus}))
    for key, tensor in expected.items():
        if found.tensors[key].shape != tensor.shape:
            raise EngramError(
                f"The tensor {' + '.join(their_names(key, layout))} of {name} has the shape "
                f"{tuple(found.tensors[key].shape)}; {tuple(tensor.shape)} was expected."
            )
    vit.load_state_dict(found.tensors, assign=True)
    return vit.requires_grad_(False).eval()


def _image_size(size: tuple[int, int], overrides: Overrides, backbone: ViT) -> tuple[int, int]:
    """A height and width that the backbone can cut into patches.

    A size that the source names is made smaller to fit (one SigLIP has 384 pixels and patches of
    14: 378). A size that the caller gave is refused if it does not fit.
    """
    patch = backbone.config.patch
    if overrides.image_size is not None:
        side = overrides.image_size
        size = (side, side) if isinstance(side, int) else side
    elif overrides.preprocessing is None:
        size = max(size[0] // patch, 1) * patch, max(size[1] // patch, 1) * patch
    if not can_be_cut(size, patch):
        raise EngramError(
            f"{backbone.source} cannot take images of {' x '.join(map(str, size))} pixels: height "
            f"and width must be multiples of its patch size {patch}, such as "
            f"{backbone.config.image_size[0]} x {backbone.config.image_size[1]}, up to "
            f"{MAX_SIDE:,} pixels and {MAX_PATCHES:,} patches."
        )
    return size
