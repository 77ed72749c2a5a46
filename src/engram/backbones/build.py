"""Build a backbone from the tensors and the configuration of another library.

Files (load.py) and models in memory (in_memory.py) go the same way: the tensors get our names
(translate.py), their shapes show almost all of the architecture, and the configuration adds the
rest (configs.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.backbones.configs import READABLE, ModelSettings, explain_bad_settings
from engram.backbones.shape import CONFIG, MAX_PATCHES, can_be_cut
from engram.backbones.translate import Translated, check_complete, translate
from engram.errors import EngramError
from engram.images.preprocessing import MAX_SIDE, Preprocessing
from engram.util.schema import Invalid
from engram.util.text import join_names
from engram.vit.layers import Activation
from engram.vit.vit import HeadConfig, ViT, ViTConfig


@dataclass(frozen=True)
class ParsedModel:
    """A model's tensors under our names, and all that is needed to make a backbone of them."""

    found: Translated
    config: ViTConfig
    preprocessing: Callable[[], Preprocessing]  # raises where the settings make no sense
    labels: Sequence[object] | None


@dataclass(frozen=True)
class Overrides:
    """Settings of the caller in place of the source's; None keeps that. See `load_backbone`."""

    image_size: int | tuple[int, int] | None = None
    preprocessing: Preprocessing | None = None
    antialias: bool | None = None
    heads: int | None = None
    activation: Activation | None = None


# From another library's tensors to ours


def parse(
    tensors: Mapping[str, Tensor],
    kind: str,
    read_settings: Callable[[Translated], ModelSettings],
    name: str,
    share: bool = False,
) -> ParsedModel:
    """A model of timm or google, or of a transformers model_type; errors call it `name`.

    With `share`, tensors keep their storage if they can.
    """
    found = translate(tensors, kind, name, share)
    with explain_bad_settings(name):
        settings = read_settings(found)
    config = _infer_config(found, settings)
    found = replace(found, tensors=_split_positions(found.tensors, config, share))
    preprocessing = partial(settings.preprocessing, settings.image_size or config.image_size)
    return ParsedModel(found, config, preprocessing, settings.labels)


def _split_positions(
    tensors: dict[str, Tensor], config: ViTConfig, share: bool
) -> dict[str, Tensor]:
    """Split the position embeddings of patches from those of other tokens.

    A class token that has a position while the registers have none (DINOv2 in transformers) gets it
    added, as timm does, so that the same weights are the same backbone in both layouts. With
    `share`, both parts keep the storage of the original.
    """
    if config.positions != "learned":
        return tensors
    positions = tensors["position"]
    count = len(positions) - config.grid[0] * config.grid[1]
    if not count:
        return tensors
    prefix, patches = positions[:count], positions[count:]
    if not share:
        prefix, patches = prefix.clone(), patches.clone()
    if config.prefix_positions:
        return {**tensors, "prefix_position": prefix, "position": patches}
    return {**tensors, "class_token": tensors["class_token"] + prefix, "position": patches}


# The architecture, from the shapes of the tensors

# Every ViT has the first four of these tensors. Number of axes of each.
_AXES = {
    "patch.weight": 4,
    "blocks.0.qkv.weight": 2,
    "blocks.0.mlp.fc1.weight": 2,
    "blocks.0.mlp.fc2.weight": 2,
    "class_token": 2,
    "registers": 2,
    "position": 2,
}
#: Height and width of a backbone without position embeddings: its tensors fit images of any size.
_ANY_SIZE = 224


def _infer_config(found: Translated, settings: ModelSettings) -> ViTConfig:
    """The architecture of a model. Tensors that no plain ViT has are an EngramError."""
    tensors = found.tensors
    learned = settings.vit.get("positions", "learned") == "learned"
    _check_tensors(found, learned)
    width, _, patch, _ = tensors["patch.weight"].shape
    mlp_width = tensors["blocks.0.mlp.fc2.weight"].shape[1]
    swiglu = tensors["blocks.0.mlp.fc1.weight"].shape[0] == 2 * mlp_width
    class_token = "class_token" in tensors
    registers = len(tensors["registers"]) if "registers" in tensors else 0
    prefix = int(class_token) + registers
    grid, prefix_positions = (_ANY_SIZE // patch, _ANY_SIZE // patch), 0
    if learned:
        positions = len(tensors["position"])
        others = prefix, int(class_token), 0
        grid = _infer_grid(positions, patch, others, settings.image_size, found.source)
        prefix_positions = positions - grid[0] * grid[1]
    bare = settings.vit.get("norm") == "rms"  # AIMv2, which has few biases

    def has_bias(module: str) -> bool:
        return not bare or any(n.endswith(f"{module}.bias") for n in tensors if n[:5] != "head.")

    shown = {
        "image_size": (grid[0] * patch, grid[1] * patch),
        "patch": patch,
        "width": width,
        "depth": len({n.split(".")[1] for n in tensors if n.startswith("blocks.")}),
        "heads": settings.vit.get("heads") or usual_heads(width, swiglu),
        "mlp_width": mlp_width,
        "class_token": class_token,
        "registers": registers,
        "prefix_positions": prefix_positions if prefix_positions == prefix else 0,
        "patch_bias": not found.has("pre_norm"),
        "qkv_bias": any(n.endswith("qkv.bias") for n in tensors),
        "proj_bias": has_bias(".proj"),
        "mlp_bias": has_bias(".fc1"),
        "patch_norm": found.has("patch_norm"),
        "pre_norm": found.has("pre_norm"),
        "read_norm": found.has("blocks.0.read_norm"),
        "mlp_norm": found.has("blocks.0.mlp.norm"),
        "layer_scale": any(n.endswith(("scale1", "scale2")) for n in tensors),
        "final_norm": not found.has("head.norm"),
        "head": _infer_head(found, settings),
    }
    if swiglu:
        shown["activation"] = "swiglu"
    for key, value in settings.declared.items():
        if shown[key] != value:
            raise EngramError(
                f"The config.json of {found.source} says {key} {value}, but its tensors have "
                f"{shown[key]}; they do not belong together."
            )
    return ViTConfig(**settings.vit | shown)


def usual_heads(width: int, swiglu: bool) -> int:
    """The number of heads of a published ViT of this width: 64 wide each, but 16 in large ones.

    DINOv3 and AIMv2 have others, which `configs` knows.
    """
    if width in (1152, 1280, 1408, 1664) or (width == 1536 and not swiglu):
        return 16
    return max(width // 64, 1)


def _infer_grid(
    count: int, patch: int, others: tuple[int, ...], image_size: tuple[int, int] | None, name: str
) -> tuple[int, int]:
    """Rows and columns of patches, from the number of position embeddings.

    `others` are the numbers of them that may belong to tokens which are not patches.
    """
    if image_size is not None:
        grid = image_size[0] // patch, image_size[1] // patch
        if count - grid[0] * grid[1] in others:
            return grid
        size = f"{image_size[0]} x {image_size[1]}"
    else:
        for other in others:
            side = math.isqrt(max(count - other, 0))
            if side and side * side == count - other:
                return side, side
        size = "square"
    raise EngramError(
        f"{name} has {count} position embeddings, which do not fit {size} images in patches of "
        f"{patch} pixels with {others[0]} further tokens."
    )


def _infer_head(found: Translated, settings: ModelSettings) -> HeadConfig | None:
    """The head that the file has tensors for."""
    if not found.has("head"):
        return None
    tensors = found.tensors
    rows = [t.shape[0] for n, t in tensors.items() if n.startswith("head.linear.") and t.ndim]
    shown: dict[str, Any] = {"hidden": found.has("head.hidden"), "norm": found.has("head.norm")}
    if found.has("head.distilled"):
        shown["pooling"] = "distilled"
    if "head.pool.mlp.fc1.weight" in tensors:
        own = tensors["head.pool.mlp.fc1.weight"].shape[0]
        same = own == tensors["blocks.0.mlp.fc2.weight"].shape[1]
        shown["pool_mlp_width"] = None if same else own
    return HeadConfig(max(rows, default=0), **settings.head | shown)


def _check_tensors(found: Translated, positions: bool) -> None:
    """Refuse tensors that are missing, or of shapes from which nothing can be inferred."""
    tensors, name = found.tensors, found.source
    needed = [*list(_AXES)[:4], *(["position"] if positions else []), *found.layout.required]
    missing = [theirs for n in needed if n not in tensors for theirs in found.layout.their_names(n)]
    if missing:
        also = f" and has {join_names(found.surplus)}" if found.surplus else ""
        raise EngramError(
            f"{name} is damaged, or no plain ViT that can be a backbone ({READABLE} can): it lacks "
            f"{join_names(missing)}{also}."
        )
    width = tensors["patch.weight"].shape[:1]
    for n, tensor in ((n, tensors[n]) for n in _AXES if n in tensors):
        in_width = tensor.shape[-1:] == width or n in ("patch.weight", "blocks.0.mlp.fc2.weight")
        if tensor.ndim != _AXES[n] or not tensor.numel() or not in_width:
            raise EngramError(
                f"The tensor {found.layout.their_names(n)[0]} of {name} has the shape "
                f"{tuple(tensor.shape)}, which does not fit the others."
            )
    _, channels, rows, columns = tensors["patch.weight"].shape
    if channels != 3 or rows != columns:
        raise EngramError(
            f"{name} has patches of {rows} x {columns} pixels with {channels} channels; square "
            "patches with 3 channels were expected."
        )


# From our tensors to a backbone


def build_backbone(parsed: ParsedModel, source: str, overrides: Overrides) -> ViT:
    """Build the backbone of a parsed model, which engrams record as `source`."""
    given = {n: getattr(overrides, n) for n in ("antialias", "heads", "activation")}
    config = replace(parsed.config, **{n: v for n, v in given.items() if v is not None})
    backbone = _assemble(config, parsed.found)
    backbone.source = source
    with explain_bad_settings(parsed.found.source):
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


def _assemble(config: ViTConfig, found: Translated) -> ViT:
    """The ViT with these tensors, if they are all it has and all it needs."""
    name = found.source
    with explain_bad_settings(name):
        CONFIG.check(asdict(config), "")
        if config.depth > len(found.tensors):
            raise Invalid(f"{config.depth} layers, but {len(found.tensors)} tensors")
        if config.prefix_positions > max(1, config.prefix):  # one is there, and unused, without any
            raise Invalid(f"{config.prefix_positions} positions for {config.prefix} tokens")
        with torch.device("meta"):  # no memory and no random numbers for what is replaced
            vit = ViT(config)
    expected, theirs = vit.state_dict(), found.layout.their_names
    missing = {n for key in expected.keys() - found.tensors.keys() for n in theirs(key)}
    surplus = {n for key in found.tensors.keys() - expected.keys() for n in theirs(key)}
    check_complete(name, sorted(missing.union(found.missing)), sorted(surplus.union(found.surplus)))
    for key, tensor in expected.items():
        if found.tensors[key].shape != tensor.shape:
            raise EngramError(
                f"The tensor {' + '.join(theirs(key))} of {name} has the shape "
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


# Class names of ImageNet-1k

#: Classes that look alike, most of them far apart in the order: bathtub and tub, laptop and
#: notebook, monitor and screen, cassette player and tape player, corn and ear, …
_ALIKE = (
    *((435, 876), (620, 681), (664, 782), (482, 848), (987, 998), (511, 817), (504, 968)),
    *((508, 878), (486, 889), (402, 546), (432, 683), (579, 881), (413, 764), (497, 663)),
    *((665, 670), (407, 734), (547, 820), (440, 907), (400, 667), (505, 849), (445, 638)),
    *((657, 744), (836, 837), (404, 895)),
)
#: The mean cosine of these pairs. AugReg ViT-Ti has 0.65; its classes in 2,000 random orders have
#: 0.08 at most, and moved by one place 0.03.
_LEAST = 0.2


def imagenet_names(weight: Tensor | None) -> tuple[str, ...] | None:
    """The names of a head's classes if its weights (classes, width) are those of ImageNet-1k.

    Most files say nothing about their classes, and a head of another dataset may have 1,000 too. So
    the head itself is asked: two classes that look alike, such as `bathtub` and `tub`, have rows of
    weights that point the same way, and in any other order rows at these places do not.
    """
    if weight is None or weight.ndim != 2 or len(weight) != 1000:
        return None
    rows = F.normalize(weight.detach().float() - weight.detach().float().mean(0), dim=1)
    first, second = torch.tensor(_ALIKE, device=rows.device).T
    if not float((rows[first] * rows[second]).sum(1).mean()) > _LEAST:
        return None
    names = Path(__file__).with_name("imagenet1k.txt")  # a name a line, in the order of the classes
    return tuple(names.read_text(encoding="utf-8").splitlines())
